"""The section `generators`: what hundreds of generators cost one learner process, with no training beside it."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.harness.child_process import run_child
from benchmarks.harness.section import Effort, Measurement, PageSection, Record, Results
from benchmarks.harness.tables import table
from benchmarks.harness.workload import make_model, write_config
from benchmarks.pipeline.rollout_rate import GROUP_SIZE, GROUPS, TOKENS

NUMBER = 300
_BATCHES, _LIMIT_S = 16, 480.0
_TEXT = """
{number} generators without engines, in one process, and a learner without a trainer, whose processor time this is. \
*A look*: the publisher reads all heartbeats and compares versions, twice a second in a run; the least of many. *An \
update*: until all generators serve a new version of {parameters:,} parameters, by changes; the least of five. \
*Intake*: a scored rollout of {tokens:,} tokens from Redis through checks and assembly to its acknowledgement.

{costs}
"""


def measurements(effort: Effort) -> Iterator[Measurement]:
    """One number of generators."""
    yield Measurement(f"{NUMBER} generators", _measure, (3 if effort.quick else _BATCHES,), by_clock=False)


def _measure(num_batches: int) -> Record:
    model = make_model("model-smallest", hidden_size=32, layers=1, ends=True)
    algorithm = {"rollout_batch_size": GROUPS, "num_return_sequences_in_group": GROUP_SIZE, "response_length": TOKENS}
    path = write_config("generators", "fixed", "float32", model={"path": str(model)}, algorithm=algorithm)
    arguments = {"config": str(path), "num_generators": NUMBER, "num_batches": num_batches}
    record: Record = run_child("benchmarks.pipeline.lone_learner.costs", arguments, timeout_s=_LIMIT_S)
    return record


def text(results: Results) -> str:
    """The costs of the one case."""
    (case,) = results["generators"]
    intake_ms = case["intake_s"] / case["rollouts"] * 1e3
    rows = {
        "a look at all generators": f"{case['look_s'] * 1e3:.1f}",
        "the first policy to all generators": f"{case['first_s'] * 1e3:,.0f}",
        "an update of all generators": f"{case['changes_s'] * 1e3:,.0f}",
        "intake of a rollout": f"{intake_ms:.2f}",
    }
    return _TEXT.format(**case, costs=table(("", rows.keys(), ""), ("ms", rows.values(), "")))


GENERATORS = PageSection("generators", "Many generators", measurements, text)
