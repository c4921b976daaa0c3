"""Two ranks against one: the same gradient, figures and weights under every ZeRO stage, offload and cut."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from gspo.common.errors import InputError
from gspo.learner.storage.step_log import StepLog
from gspo.learner.training.trainer import Trainer
from tests.integration.learner.rank_cases import ALGORITHM, CASES, LAGGING, go_on, lagging, run_case
from tests.support.tiny_model import make_tiny_model
from tests.support.training import figure_cases
from tests.support.training.figure_reference import assert_figures_of_the_log
from tests.support.training.rollout_rows import make_config

pytestmark = pytest.mark.timeout(400)
EXACT = [case for case in CASES if "bfloat16" not in case]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("policy"), scale=4.0)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the one rank leaves a checkpoint."""
    return tmp_path_factory.mktemp("alone") / "checkpoint"


@pytest.fixture(scope="module")
def alone(folder: Path, checkpoint: Path) -> tuple[dict[str, Any], torch.Tensor]:
    """Figures and gradient of one rank, without ZeRO."""
    trainer, figures, vector = run_case(folder, CASES["zero-0"])
    trainer.save(checkpoint, {})
    return figures, vector


@pytest.fixture(scope="module")
def together(
    folder: Path, alone: tuple[dict[str, Any], torch.Tensor], checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The results of two ranks in every case. Without a compiler: DeepSpeed must not need one."""
    out = tmp_path_factory.mktemp("cases")
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    words += ["-m", "tests.integration.learner.rank_cases", *map(str, (folder, checkpoint, out))]
    environment = {**os.environ, "CXX": "/nonexistent/c++", "CC": "/nonexistent/cc", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=360, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return out


@pytest.mark.parametrize("case", EXACT)
def test_two_ranks_make_the_gradient_of_one(
    together: Path, alone: tuple[dict[str, Any], torch.Tensor], case: str
) -> None:
    figures, expected = alone
    tensors = load_file(together / f"{case}.safetensors")
    assert (tensors["gradient"] - expected).norm() < 1e-5 * expected.norm()
    measured = json.loads((together / f"{case}.json").read_text())["figures"]
    assert measured.keys() == figures.keys()
    for name, value in figures.items():
        assert measured[name] == pytest.approx(value, rel=1e-4, abs=1e-7), name


@pytest.mark.parametrize("case", figure_cases.CASES)
def test_every_figure_of_two_ranks_follows_from_the_log(together: Path, folder: Path, case: str) -> None:
    """Also where a rank has less work than the other, and nothing that it can count in its place."""
    logged = json.loads((together / f"figures-{case}" / "figures.json").read_text())
    log = StepLog(together / f"figures-{case}").path(figure_cases.STEP)
    assert_figures_of_the_log(logged, log, folder, figure_cases.figure_config(folder, case))


def test_bfloat16_has_float32_masters_under_zero_3_too(
    together: Path, alone: tuple[dict[str, Any], torch.Tensor]
) -> None:
    _, expected = alone
    tensors = load_file(together / "zero-3-bfloat16.safetensors")
    assert 1e-4 * expected.norm() < (tensors["gradient"] - expected).norm() < 0.05 * expected.norm()
    # A step of 1e-3 on weights around 0.1 would vanish in bfloat16's 8 bits for many of them.
    weights = {name: tensor for name, tensor in tensors.items() if name.startswith("weights.")}
    assert all(tensor.dtype == torch.float32 for tensor in weights.values())
    assert any(not torch.equal(tensor, tensor.bfloat16().float()) for tensor in weights.values())


@pytest.mark.parametrize("case", CASES)
def test_what_is_not_finite_on_one_rank_is_left_out_on_all_and_a_resume_repeats_it(together: Path, case: str) -> None:
    result = json.loads((together / f"{case}.json").read_text())
    assert len(result["not_applied"]) == 1
    assert result["not_applied"][0].startswith("1: the loss is")
    assert result["same_after_a_resume"]


@pytest.fixture(scope="module")
def lagging_alone(folder: Path) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    return lagging(folder, CASES["zero-0"])


@pytest.mark.parametrize("case", LAGGING)
def test_two_ranks_measure_the_mismatch_of_an_earlier_version_as_one_does(
    together: Path, lagging_alone: tuple[dict[str, float], dict[str, torch.Tensor]], case: str
) -> None:
    """Both ranks score under the weights that are kept on the first, and each has its own again after it."""
    expected, policy = lagging_alone
    figures = json.loads((together / f"{case}-lagging.json").read_text())
    assert expected["sigma_token"] == pytest.approx(0.05, rel=0.2)
    assert figures.keys() == expected.keys()
    for name, value in expected.items():
        assert figures[name] == pytest.approx(value, rel=1e-3, abs=1e-6), name
    assert_close(load_file(together / f"{case}-lagging.safetensors"), policy)


def assert_close(tensors: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (tensors[name] - tensor).norm() < 1e-4 * tensor.norm(), name


def test_without_zero_a_run_goes_on_with_another_number_of_ranks(
    together: Path, folder: Path, alone: tuple[dict[str, Any], torch.Tensor], checkpoint: Path
) -> None:
    """From one to two, and from two to one."""
    assert_close(load_file(together / "gone-on.safetensors"), go_on(folder, checkpoint))
    trainer = Trainer(make_config(folder, algorithm=ALGORITHM), folder)
    trainer.load(together / "zero-0")
    written = load_file(together / "zero-0.safetensors")
    assert all(torch.equal(tensor, written[f"weights.{name}"]) for name, tensor in trainer.policy().items())


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_each_rank_wrote_its_part_of_needs_the_same_number(together: Path, folder: Path, stage: int) -> None:
    trainer = Trainer(make_config(folder, algorithm=ALGORITHM, learner={"zero_stage": stage}), folder)
    with pytest.raises(InputError) as caught:
        trainer.load(together / f"zero-{stage}")
    assert caught.value.where == "learner.ranks"
    assert "1 is not the number of ranks that wrote the checkpoint" in caught.value.rule
    assert f"2; under ZeRO {stage} (learner.zero_stage) each wrote its own part" in caught.value.rule
    assert caught.value.fix == "Start 2 ranks: only a run with zero_stage 0 can change their number"
