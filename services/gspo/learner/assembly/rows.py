"""One rollout as the learner trains on it and as the step log keeps it: a row, and a table of rows.

The columns are declared once, in Row.
"""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Annotated, Any, get_type_hints

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from gspo.common.score_numbers import reward_or_failure
from gspo.common.streams.entries import word_of
from gspo_proto.rollout_pb2 import Outcome, Rollout, Score, ScoredRollout

SCHEMA_NUMBER = b"1"
NO_MINI_BATCH = -1
# One of each for all rows without them.
NO_SIZES, NO_IDS = np.empty(0, np.uint8), np.empty(0, np.int32)

Int = Annotated[int, pa.int64()]
Small = Annotated[int, pa.int32()]
Number = Annotated[float, pa.float64()]
MaybeNumber = Annotated[float | None, pa.float64()]
Text = Annotated[str, pa.string()]
MaybeText = Annotated[str | None, pa.string()]
Ints_T = Annotated[NDArray[np.int32], pa.list_(pa.int32())]
Floats_T = Annotated[NDArray[np.float32], pa.list_(pa.float32())]
Bytes_T = Annotated[NDArray[np.uint8], pa.list_(pa.uint8())]
Bools_T = Annotated[NDArray[np.bool_], pa.list_(pa.bool_())]


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """One rollout of a step. Arrays of T run over the tokens after the prompt; times are Unix seconds.

    step: Step that trains it; 0 while it belongs to none.
    logp: Behavior log-prob of each policy token, 0 elsewhere.
    version: Policy version that sampled each policy token, -1 elsewhere.
    mask: The tokens that count. Under on_stale: mask without those too old, which `version` still shows.
    outcome: eos, stop_string, truncated; of a conversation also environment_done, turn_limit, turn_token_limit,
        time_limit, step_time_limit, environment_failed; unspecified.
    reward, failure: A number or a reason, never both.
    parts_json: List of {name, value, weight, version}, one for each reward function.
    advantage: The normalised reward, null when skipped. Truncated rows have one under
        algorithm.mask_truncated_completions, which masks their loss alone.
    skipped: Why the row is not trained on: failed, truncated or stale; null when it is.
    mini_batch: Optimizer step within the step, from 0; -1 when skipped.
    num_turns: The policy's; 1 for a single answer.
    num_malformed_calls, num_cut_turns: Turns with a tool call that cannot be made, and turns cut off at turn_tokens.
    turns_json: A conversation after its prompt, as chat messages; empty where it is one answer.
    source: Name in data.sources; empty where data.prompts is the only source.
    branch_starts: Places in the arrays where a further branch begins, with its own context; empty where there is one.
    teacher_logp: The log-prob of every token by the teacher at teacher.address; empty without one.
    logged_json: The values that functions logged: an object of FUNCTION/COLUMN; empty without any.
    kept_sizes: The number of tokens that each token was sampled from under sampling.top_k; 0 elsewhere, and where ties
        made them too many, which `mask` leaves out. Empty without top_k.
    kept_ids: Their ids, those of one token after those of another.
    """

    step: Small
    group: Int
    number: Small
    attempt: Small
    prompt: Text
    prompt_token_ids: Ints_T
    messages_json: Text
    columns_json: Text
    token_ids: Ints_T
    logp: Floats_T
    version: Ints_T
    mask: Bools_T
    text: Text
    outcome: Text
    stop: Text
    reward: MaybeNumber
    failure: MaybeText
    parts_json: Text
    reward_version: Text
    advantage: MaybeNumber
    skipped: MaybeText
    mini_batch: Small
    num_rollouts: Small
    temperature: Number
    generator: Text
    scorer: Text
    issued_unix_s: Number
    started_unix_s: Number
    finished_unix_s: Number
    scored_unix_s: Number
    num_turns: Small = 1
    num_tool_calls: Small = 0
    num_malformed_calls: Small = 0
    num_cut_turns: Small = 0
    turns_json: Text = ""
    source: Text = ""
    branch_starts: Ints_T = field(default_factory=lambda: np.empty(0, dtype=np.int32))
    teacher_logp: Floats_T = field(default_factory=lambda: np.empty(0, dtype=np.float32))
    logged_json: Text = ""
    kept_sizes: Bytes_T = field(default_factory=lambda: NO_SIZES)
    kept_ids: Ints_T = field(default_factory=lambda: NO_IDS)

    @property
    def branch_bounds(self) -> list[tuple[int, int]]:
        """First place of each branch in the arrays, and the place behind its last."""
        return list(pairwise([0, *self.branch_starts.tolist(), len(self.token_ids)]))

    @property
    def num_sampled(self) -> int:
        """Tokens that the policy sampled, whether they count or not."""
        return int((self.version >= 0).sum())

    @property
    def num_tied(self) -> int:
        """Tokens that do not count because ties made the tokens that they were sampled from too many."""
        return int((self.version[: len(self.kept_sizes)] >= 0)[self.kept_sizes == 0].sum())


_COLUMNS = get_type_hints(Row, include_extras=True).items()
SCHEMA = pa.schema(
    [pa.field(name, column.__metadata__[0], column in {MaybeNumber, MaybeText}) for name, column in _COLUMNS],
    metadata={"gspo.schema": SCHEMA_NUMBER},
)

# The last columns, which step files of earlier versions lack: a row then has their defaults.
_LATER = ("kept_sizes", "kept_ids")


@dataclass(frozen=True)
class TokenRecord:
    """A rollout's figures at the update that trained it, the last one under several epochs.

    Attributes:
        logp_T: Log-prob of each token behind the first context by the policy; 0 where a token does not count.
        entropy_T: That of the policy's distribution there, in nats; 0 where a token does not count.
    """

    group: int
    number: int
    logp_T: NDArray[np.float32]
    entropy_T: NDArray[np.float32]


def row_from_scored(scored: ScoredRollout) -> Row:
    """A row that belongs to no step yet, from an entry of the `scored` stream.

    A reward that is not finite becomes a failure with its reason: it is not a number to train on.

    Raises:
        ValueError: The arrays differ in length, a policy token has no version, or there is neither reward nor failure.
    """
    rollout, score = scored.rollout, scored.score
    arrays, kept_sizes = _token_arrays(rollout), NO_SIZES
    if rollout.kept_sizes:
        kept_sizes = np.array(rollout.kept_sizes, dtype=np.uint8)
        arrays["mask"] &= kept_sizes > 0
    if score.WhichOneof("result") is None:
        raise ValueError("a score holds neither a reward nor a failure")
    reward, failure = reward_or_failure(score)
    return Row(
        step=0,
        group=rollout.group,
        number=rollout.number,
        attempt=rollout.attempt,
        prompt=rollout.prompt.text,
        prompt_token_ids=np.array(rollout.prompt.token_ids, dtype=np.int32),
        messages_json=rollout.prompt.messages_json,
        columns_json=rollout.prompt.columns_json,
        **arrays,
        text=rollout.text,
        outcome=word_of(Outcome, rollout.outcome),
        stop=rollout.stop,
        reward=reward,
        failure=failure,
        parts_json=_parts_json(score),
        reward_version=score.version,
        advantage=None,
        skipped=None,
        mini_batch=NO_MINI_BATCH,
        num_rollouts=rollout.num_rollouts,
        temperature=rollout.temperature,
        generator=rollout.generator,
        scorer=score.scorer,
        issued_unix_s=rollout.issued_unix_s,
        started_unix_s=rollout.started_unix_s,
        finished_unix_s=rollout.finished_unix_s,
        scored_unix_s=score.scored_unix_s,
        num_turns=max(1, rollout.num_turns),
        num_tool_calls=rollout.episode.num_tool_calls,
        num_malformed_calls=rollout.episode.num_malformed,
        num_cut_turns=rollout.episode.num_cut_turns,
        turns_json=rollout.episode.turns_json,
        branch_starts=np.array(rollout.branch_starts, dtype=np.int32),
        teacher_logp=np.array(score.teacher_logp, dtype=np.float32),
        logged_json=score.logged_json,
        kept_sizes=kept_sizes,
        kept_ids=np.array(rollout.kept_ids, dtype=np.uint32).astype(np.int32) if len(kept_sizes) else NO_IDS,
    )


def lowered(row: Row, name: str, penalty: float) -> Row:
    """The row with its reward lowered by a penalty, which becomes a part of that name beside the functions' parts."""
    if row.reward is None or penalty == 0:
        return row
    part = {"name": name, "value": -penalty, "weight": 1.0, "version": ""}
    return replace(row, reward=row.reward - penalty, parts_json=json.dumps([*json.loads(row.parts_json), part]))


def _token_arrays(rollout: Rollout) -> dict[str, Any]:
    where = f"rollout {rollout.group}-{rollout.number}"
    lengths = {name: len(getattr(rollout, name)) for name in ("token_ids", "logp", "version", "mask")}
    if len(set(lengths.values())) != 1:
        raise ValueError(f"{where}: its arrays run over the same tokens and have lengths {lengths}")
    arrays = {
        "token_ids": np.array(rollout.token_ids, dtype=np.int32),
        "logp": np.array(rollout.logp, dtype=np.float32),
        "version": np.array(rollout.version, dtype=np.int32),
        "mask": np.frombuffer(rollout.mask, dtype=np.uint8).astype(np.bool_),
    }
    if (arrays["version"][arrays["mask"]] < 0).any():
        raise ValueError(f"{where}: a policy token has no version")
    return arrays


def _parts_json(score: Score) -> str:
    """The parts as strict JSON: a value that is not finite becomes null."""
    parts = [
        {
            "name": part.name,
            "value": part.value if math.isfinite(part.value) else None,
            "weight": part.weight,
            "version": part.version,
        }
        for part in score.parts
    ]
    return json.dumps(parts)


def to_table(rows: Sequence[Row]) -> Any:
    """A pyarrow Table with the rows in their order; numbers keep their bits."""
    columns = [_to_column([getattr(row, column.name) for row in rows], column.type) for column in SCHEMA]
    return pa.Table.from_arrays(columns, schema=SCHEMA)


def _to_column(values: list[Any], arrow_type: Any) -> Any:
    if not pa.types.is_list(arrow_type):
        return pa.array(values, arrow_type)
    offsets = np.cumsum([0, *(len(value) for value in values)], dtype=np.int32)
    flat = np.concatenate(values) if values else np.empty(0, dtype=arrow_type.value_type.to_pandas_dtype())
    return pa.ListArray.from_arrays(offsets, pa.array(flat, arrow_type.value_type), type=arrow_type)


def from_table(table: Any) -> list[Row]:
    """The rows of a table of `to_table`.

    Raises:
        ValueError: The columns are not those of this version.
    """
    stored = pa.schema([c for c in SCHEMA if c.name in table.column_names or c.name not in _LATER], SCHEMA.metadata)
    if not table.schema.equals(stored):
        raise ValueError(f"the table's columns are not those of a step file of this version:\n{table.schema}")
    columns = [_from_column(table.column(column.name), column.type) for column in stored]
    return [Row(*values) for values in zip(*columns, strict=True)]


def _from_column(column: Any, arrow_type: Any) -> Iterable[Any]:
    if not pa.types.is_list(arrow_type):
        values: list[Any] = column.to_pylist()
        return values
    lists = column.combine_chunks()
    # A copy: Arrow's memory is read-only, and torch warns about tensors on such memory.
    flat = lists.values.to_numpy(zero_copy_only=False).copy()
    return [flat[first:last] for first, last in pairwise(lists.offsets.to_numpy())]
