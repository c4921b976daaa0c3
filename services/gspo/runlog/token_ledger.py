"""The token ledger: every sampled token in one column of `log/ledger.jsonl`.

Two sides count apart: generators the tokens that they sample and keep, learner and coordinator those in the arrays of
rollouts that end. services/gspo/common/streams/token_counts.py has the counts in Redis.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict

LEDGER = "ledger.jsonl"
GENERATED, IN_FLIGHT, LOST, EVALUATION = "generated", "in_flight", "lost", "evaluation"
LEFT_OUT_TOKENS, SUPERSEDED = "left_out", "superseded"
# Column -> its meaning, in the order of display: `generated`, and all that it is the sum of.
COLUMNS = {
    GENERATED: "sampled for training, and reported to Redis with a rollout's state or result",
    IN_FLIGHT: "kept in rollouts that are not trained and not given up",
    "trained": "counted in the loss of a logged step",
    "masked_failed": "in rollouts of a trained group that had no score",
    "masked_truncated": "in rollouts of a trained group that were cut off (algorithm.mask_truncated*)",
    "masked_stale": "too old for the loss, in a trained group (staleness.on_stale: mask)",
    "masked_tied": "sampled from too many tokens that tie at the cut (sampling.top_k), in a trained group",
    LEFT_OUT_TOKENS: "in logged steps that a resume left out of training (--leave-out)",
    "filtered": "in groups without a signal",
    "stale": "in groups that were too old",
    "failed": "in finished rollouts of groups that failed",
    "unused": "in finished rollouts of groups that the end of the run left over",
    "unfinished": "saved of rollouts whose group ended before they did",
    SUPERSEDED: "in no rollout: begun anew, made twice, late for its group, or cut behind a stop string",
    "dead_letters": "in rollouts that the learner gave up as dead letters",
    LOST: "in flight when Redis lost its data: at most, by the last record before",
}


class LedgerRecord(BaseModel):
    """A line of ledger.jsonl: the counts of one moment.

    Attributes:
        step: The newest step.
        account: That of the data of one Redis; its counts only grow, `in_flight` apart. A wipe begins another account.
        tokens: Column -> tokens of this account; columns of zeros may be missing.
    """

    model_config = ConfigDict(frozen=True)

    step: int
    unix_s: float
    account: str
    tokens: dict[str, int]

    @property
    def difference(self) -> int:
        """Generated tokens without a column; 0 in an account that is right."""
        return self.tokens.get(GENERATED, 0) - sum(self.tokens.get(name, 0) for name in COLUMNS if name != GENERATED)


@dataclass(frozen=True)
class TokenLedger:
    """The ledger of a run.

    Attributes:
        tokens: Every column -> its tokens.
        evaluation: Tokens sampled for evaluations, which are in no column.
        difference: Generated tokens that no column has; 0 unless something was lost or counted twice.
        step: The last record's.
    """

    tokens: dict[str, int]
    evaluation: int
    difference: int
    step: int

    @property
    def rows(self) -> list[tuple[str, int, float, str]]:
        """Name, tokens, share of the generated ones, and meaning of each column that has tokens."""
        generated = max(1, self.tokens[GENERATED])
        return [
            (name.replace("_", " "), self.tokens[name], self.tokens[name] / generated, meaning)
            for name, meaning in COLUMNS.items()
            if self.tokens[name] or name in (GENERATED, "trained", IN_FLIGHT)
        ]

    @property
    def line(self) -> str:
        _, *parts = self.rows
        text = " + ".join(f"{num:,} {name}" for name, num, _, _ in parts)
        text = f"tokens: {self.tokens[GENERATED]:,} generated = {text}"
        return f"{text}; {self.warning}" if self.warning else text

    @property
    def warning(self) -> str:
        """The fault of a sum that does not close; empty where it does."""
        if not self.difference:
            return ""
        sign, side = ("less", "lost") if self.difference > 0 else ("more", "counted twice")
        return (
            f"the columns have {abs(self.difference):,} tokens {sign} than were generated: some were {side}. "
            "That is a fault of gspo: please report it with the log folder"
        )


def token_ledger(records: Iterable[LedgerRecord]) -> TokenLedger | None:
    """The sum of a run's accounts by their last records; None where there is no record.

    The tokens in flight of an account that another one follows are lost.
    """
    records = list(records)
    if not records:
        return None
    last = {record.account: record for record in records}
    totals = dict.fromkeys(COLUMNS, 0)
    for record in last.values():
        for name in COLUMNS:
            totals[name] += record.tokens.get(name, 0)
        if record.account != records[-1].account:
            totals[IN_FLIGHT] -= record.tokens.get(IN_FLIGHT, 0)
            totals[LOST] += record.tokens.get(IN_FLIGHT, 0)
    evaluation = sum(record.tokens.get(EVALUATION, 0) for record in last.values())
    return TokenLedger(totals, evaluation, sum(record.difference for record in last.values()), records[-1].step)
