"""docs/scale.md: its formulas run, its table is what they give, and what it says of a size follows from them."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from gspo_proto.rollout_pb2 import Rollout
from services.common.config import RunConfig

TEXT = (Path(__file__).parents[2] / "docs/scale.md").read_text()
MEASURED = json.loads((Path(__file__).parents[2] / "docs/benchmarks.json").read_text())


@pytest.fixture(scope="module")
def formulas() -> ModuleType:
    (code,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    module = ModuleType("scale")
    sys.modules["scale"] = module  # dataclasses look their module up
    exec(code, module.__dict__)  # noqa: S102 - our own document
    return module


def row(run: Any) -> list[str]:
    return [
        f"{run.gpus:,}",
        f"{run.parameters / 1e9:g}",
        f"{run.generators}",
        f"{run.trainers}",
        f"{run.step_s:.0f}",
        f"{run.batch_tokens / run.step_s:,.0f}",
        f"{run.push_s:.1f}",
        f"{run.join_s:.0f}",
        f"{run.rollouts_s:.0f}",
        f"{run.redis_bytes_s / 1e6:.1f}",
        f"{run.redis_bytes / 2**30:.2f}",
        f"{run.log_bytes_day / 1e9:.0f}",
    ]


def test_the_table_is_what_the_formulas_give(formulas: ModuleType) -> None:
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in TEXT.splitlines()
        if line[:3].strip("| ").isdigit()
    ]
    table = [cells for cells in rows if len(cells) == 12]
    assert table == [row(run) for run in formulas.RUNS]


def test_the_machines_beside_the_gpus_are_what_the_formulas_give(formulas: ModuleType) -> None:
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in TEXT.splitlines() if "shared, " in line]
    assert [(cells[0], *re.findall(r"\d+", " ".join(cells[2:]))) for cells in rows] == [
        (f"{run.gpus:,}", str(run.reward_replicas), "2", "2", str(run.redis_limit_gib), str(run.disk_tb))
        for run in formulas.RUNS[2:]
    ]
    assert RunConfig().keep_checkpoints == formulas.KEPT
    assert all(run.rollouts_s < 300 for run in formulas.RUNS), "some hundred rollouts a second at the most"


def test_every_gpu_is_used_once(formulas: ModuleType) -> None:
    for run in formulas.RUNS[1:]:
        assert run.generators * run.gpus_each + run.trainers == run.gpus


def test_by_hand(formulas: ModuleType) -> None:
    # 8 GPUs, 8e9 parameters, tokens/s: generating 0.1 * 989e12 / 16e9 = 6,181, training 0.35 * 989e12 / 48e9 = 7,211.
    run = formulas.RUNS[1]
    assert [round(rate) for rate in run.rates] == [6181, 7211]
    # 7,211 / (6,181 + 7,211) of 8 is 4.3: 4 generators; 64 * 8 * 2,000 tokens by 4 of them.
    assert run.generators == 4
    assert run.step_s == pytest.approx(1_024_000 / (4 * 6181.25))
    # 4 generators, 16e9 bytes each, of which 3.3 %, at 1.1e9 a second.
    assert run.push_s == pytest.approx(4 * 16e9 * 0.033 / 1.1e9)


def test_constants_are_the_measured_ones(formulas: ModuleType) -> None:
    packing = {case["rate"]: case for case in MEASURED["push"]["cases"] if case["kind"] == "packing"}
    most = {rate: max(v["gaps"]["bytes"] / v["bytes"] for v in case["versions"]) for rate, case in packing.items()}
    assert most == pytest.approx({1e-6: formulas.CHANGED, 3e-6: 0.073, 1e-5: 0.121}, abs=0.001)
    (wire,) = (case for case in MEASURED["push"]["cases"] if case["kind"] == "wire")
    (stream,) = (case for case in MEASURED["reward"]["cases"] if case["what"] == "stream")
    # Rates are not to be promised too high, and differ from one day to another.
    assert 0.3 < formulas.PUSH / (wire["bytes"] / wire["grpc_s"]) < 1
    assert 0.3 < formulas.SCORES / stream["per_s"] < 1
    rollout = Rollout(
        token_ids=[75_000] * 3072 + [10_000] * 1024, logp=[-0.5] * 4096, version=[17] * 4096, text="abcd" * 4096
    )
    assert rollout.ByteSize() / 4096 == pytest.approx(formulas.WIRE, abs=0.2)


def test_what_is_said_of_a_size(formulas: ModuleType) -> None:
    one, _, sixty_four, middle, thousand = formulas.RUNS
    assert 0.15 < sixty_four.push_s / sixty_four.step_s < 0.25, "a fifth of a step"
    assert formulas.SCORES / sixty_four.rollouts_s > 100, "a hundred times what comes"
    assert middle.log_bytes_day > 100e9
    assert 0.7 < thousand.push_s / thousand.step_s < 1, "within a step, and barely"
    small = formulas.Run(1_000, 32e9, groups=1_024, answers=16, tokens=8_000, gpus_each=1)
    assert small.push_s > 6 * small.step_s, "more than six times as long as the step"
    assert one.generators == one.trainers == 1
