"""The tables of docs/scale.md have the numbers of docs/benchmarks.json, and those of the planning formulas."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from benchmarks.plans.scale_page import BEGIN, CASES, END, PAGE, planned_case, planned_table
from gspo.cli.plan.plan_request import Planned
from gspo_proto.rollout_pb2 import Rollout

DOCS = Path(__file__).parents[3] / "docs"
MEASURED = json.loads((DOCS / "benchmarks.json").read_text())


def table() -> list[float]:
    """The column of measured numbers."""
    measured = (DOCS / "scale.md").read_text().partition("## Measured\n")[2]
    rows = [line.split("|") for line in measured.splitlines() if line.startswith("|")]
    return [float(row[2].split()[0].rstrip("s").replace(",", "")) for row in rows[2:]]


def cases(part: str, **of: str) -> list[dict[str, Any]]:
    return [case for case in MEASURED[part]["cases"] if of.items() <= case.items()]


def pushes(key: str, rate: float | None) -> float:
    """The median of the pushes of changes at a learning rate, or of whole policies."""
    (service,) = cases("push", kind="service")
    selected = [
        push
        for push in service["pushes"]
        if (push["rate"] == rate and push["version"] if rate else not push["version"])
    ]
    return float(median([push[key] for push in selected]))


def test_the_table_has_what_was_measured() -> None:
    (stream,), (wire,) = cases("reward", what="stream"), cases("push", kind="wire")
    (many,) = cases("generators")
    rollout = Rollout(
        token_ids=[75_000] * 3072 + [10_000] * 1024, logp=[-0.5] * 4096, version=[17] * 4096, text="abcd" * 4096
    )
    assert table() == pytest.approx(
        [
            stream["per_s"],
            rollout.ByteSize() / 4096,
            wire["grpc_s"],
            pushes("push_s", None),
            pushes("push_s", 1e-6),
            pushes("push_s", 1e-5),
            pushes("stall_s", 1e-5),
            many["look_s"] * 1e3,
            many["changes_s"] * 1e3,
            many["intake_s"] / many["rollouts"] * 1e3,
        ],
        rel=0.01,
    )


def test_the_planned_table_is_that_of_the_formulas() -> None:
    """`python -m benchmarks.plans.scale_page` writes it again."""
    planned = PAGE.read_text().partition(BEGIN)[2].partition(END)[0]
    assert planned == planned_table()


def test_every_planned_case_starts() -> None:
    """A plan's memory fits, and its ranks divide the rollouts of a mini-batch."""
    for case in CASES:
        planned = planned_case(case)
        assert isinstance(planned, Planned), case
        assert planned.choice.rank.peak < planned.machine.gpu_bytes
        learner, algorithm = planned.choice.config.learner, planned.choice.config.algorithm
        shares = planned.choice.ranks // learner.sequence_ranks
        assert algorithm.num_rollouts % (algorithm.num_mini_batches * shares) == 0
