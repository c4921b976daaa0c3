"""Writes the planned part of docs/scale.md: `python -m benchmarks.plans.scale_page`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from benchmarks.plans.published_models import published_models
from gspo.cli.plan.choice import Choice
from gspo.cli.plan.plan_request import Planned, PlanRequest, choice_of, planned_choice
from gspo.cli.plan.plan_tables import short_number
from gspo.cli.plan.planned_times import SecondsRange
from gspo.cli.plan.rates import find_kind, rates_of
from gspo.cli.plan.refusal import counted
from gspo.common.host.machine import GIB

PAGE = Path(__file__).parents[2] / "docs/scale.md"
BEGIN, END = "<!-- planned: python -m benchmarks.plans.scale_page -->\n", "<!-- end of planned -->\n"
_HOST_GIB = 2048
_HEADS = (
    "model, H100 of 80 GB, context",
    "learner",
    "generators",
    "GiB of a rank, of a host",
    "s a step",
    "bound by",
    "update: GB of changes, s",
)


@dataclass(frozen=True)
class PlannedCase:
    """One row: a model on so many GPUs, with the longest rollout in tokens."""

    model: str
    num_gpus: int
    context: int


CASES = (
    PlannedCase("Qwen3-0.6B", 1, 4096),
    PlannedCase("Qwen3-8B", 8, 8192),
    PlannedCase("Qwen3-8B", 8, 32_768),
    PlannedCase("Qwen3-30B-A3B", 16, 16_384),
    PlannedCase("Qwen3-32B", 8, 32_768),
    PlannedCase("Qwen3-32B", 64, 32_768),
    PlannedCase("Qwen3-235B-A22B", 64, 16_384),
    PlannedCase("Qwen3-235B-A22B", 128, 16_384),
)


def planned_case(case: PlannedCase) -> Planned | Choice | None:
    """The plan of a row; the nearest choice where nothing fits."""
    gpu, profile = find_kind(None, 80), published_models()[case.model]
    request = PlanRequest(case.model, case.num_gpus, context=case.context, host_gib=_HOST_GIB)
    choice = choice_of(request, profile, gpu)
    if choice is None or choice.shortages:
        return choice
    return planned_choice(request, profile, gpu, rates_of(gpu), choice)


def planned_table() -> str:
    """The table as Markdown."""
    rows = [_HEADS, ("---",) * len(_HEADS), *(_row(case) for case in CASES)]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _row(case: PlannedCase) -> tuple[str, ...]:
    where = f"{case.model}, {case.num_gpus}, {case.context:,}"
    planned = planned_case(case)
    if not isinstance(planned, Planned):
        places = [short.place for short in planned.shortages] if planned else ["the number of rollouts"]
        return (where, f"does not fit: {', '.join(places)}", *[""] * (len(_HEADS) - 2))
    choice, times, learner = planned.choice, planned.times, planned.choice.config.learner
    shared = f", {learner.sequence_ranks} share a line" if learner.sequence_ranks > 1 else ""
    offload = "" if learner.offload == "none" else f", offload {learner.offload}"
    low, high, _ = times.sent_bytes
    return (
        where,
        f"{counted(choice.ranks, 'rank')}, ZeRO {learner.zero_stage}{offload}{shared}",
        f"{choice.replicas} of {counted(choice.parallel, 'GPU')}",
        f"{choice.rank.peak / GIB:.0f}, {choice.host.total / GIB:,.0f}",
        _span(SecondsRange(times.fast.step_s, times.slow.step_s)),
        times.slow.bound,
        f"{short_number(low / 1e9)} to {short_number(high / 1e9)}, {_span(times.update)}",
    )


def _span(seconds: SecondsRange) -> str:
    return f"{seconds.low:,.0f} to {seconds.high:,.0f}"


def write_page() -> None:
    """Replace the planned part of the page."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}{planned_table()}{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    write_page()
