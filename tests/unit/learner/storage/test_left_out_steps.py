"""The tokens of steps that are left out, in the token ledger: each step in one account, through kills and wipes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from gspo.learner.assembly.rows import row_from_scored
from gspo.learner.storage.run_directory import RunDir
from gspo.runlog.token_ledger import LedgerRecord, token_ledger
from tests.unit.learner.conftest import MakeScored


def ledger_line(run: RunDir, account: str, tokens: dict[str, int]) -> LedgerRecord:
    """A line as the learner writes it."""
    counts = dict(tokens)
    for column, num in run.left_out.moved(account).items():
        counts[column] = counts.get(column, 0) + num
    return LedgerRecord(step=1, unix_s=0.0, account=account, tokens=counts)


def test_each_step_is_moved_in_one_account_and_the_ledger_closes(tmp_path: Path, scored: MakeScored) -> None:
    row = replace(row_from_scored(scored(1)), step=1)
    counted, sampled = int(row.mask.sum()), row.num_sampled
    assert 0 < counted <= sampled
    skipped = replace(row, number=1, skipped="failed")
    with RunDir(tmp_path) as run:
        run.write_step(1, [row, skipped])
        run.leave_out(1)
    masked = sampled - counted
    in_redis = {"generated": 2 * sampled + 5, "trained": counted + 5, "masked_failed": sampled, "masked_stale": masked}
    with RunDir(tmp_path) as run:
        first = ledger_line(run, "a", in_redis)
        assert first == ledger_line(run, "a", in_redis), "a second line moves nothing more"
        assert first.tokens["left_out"] == 2 * sampled
        assert (first.tokens["trained"], first.tokens["masked_failed"], first.difference) == (5, 0, 0)
    # Redis is wiped, and the learner starts again.
    with RunDir(tmp_path) as run:
        second = ledger_line(run, "b", {"generated": 7, "trained": 7})
        assert second.tokens == {"generated": 7, "trained": 7}
        # Another step fails; its tokens were counted in either account.
        run.write_step(2, [replace(row_from_scored(scored(2)), step=2)])
        run.leave_out(2)
        third = ledger_line(run, "b", {"generated": 7 + sampled, "trained": 7 + counted, "masked_stale": masked})
        assert (third.tokens["trained"], third.tokens["left_out"], third.difference) == (7, sampled, 0)
    ledger = token_ledger([first, second, third])
    assert ledger is not None
    assert (ledger.tokens["left_out"], ledger.tokens["trained"], ledger.difference) == (3 * sampled, 12, 0)
    assert f"{3 * sampled:,} left out" in ledger.line
