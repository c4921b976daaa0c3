"""Four ranks that share packed lines, in twos and all together, against one rank: figures, gradients, weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.integration.learner.line_cases import CASES, LINES, REPLAYS, SIZES, STEPS, make_models, replay_case
from tests.integration.learner.rank_cases import run_case
from tests.support.training.started_ranks import run_ranks

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    make_models(folder)
    return folder


@pytest.fixture(scope="module")
def together(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results of the four ranks."""
    out = tmp_path_factory.mktemp("lines")
    run_ranks(4, "tests.integration.learner.line_cases", models, out, timeout_s=360)
    return out


@pytest.fixture(scope="module")
def lines(together: Path) -> dict[str, Any]:
    results: dict[str, Any] = json.loads((together / "lines.json").read_text())
    return results


@pytest.mark.parametrize("num_ranks", SIZES)
@pytest.mark.parametrize("case", CASES)
def test_a_shared_line_has_the_figures_and_the_gradient_of_a_whole_one(
    lines: dict[str, Any], case: str, num_ranks: int
) -> None:
    """Also where positions do not divide, where a rank has none, and where ranks share a head of keys."""
    figure, gradient = (1e-3, 0.02) if case == "bfloat16" else (1e-4, 1e-5)
    measured = lines[f"{case}-{num_ranks}"]
    assert len(measured) == len(LINES)
    for lengths, (of_figures, of_gradient) in zip(LINES, measured, strict=True):
        assert of_figures < figure, lengths
        assert of_gradient < gradient, lengths


@pytest.mark.parametrize("num_ranks", SIZES)
def test_a_rank_keeps_its_part_of_the_activations(lines: dict[str, Any], num_ranks: int) -> None:
    """Four of them repeat the two heads of keys, which is little beside the rest."""
    kept = lines["kept_bytes"]
    assert 1 / num_ranks <= kept[str(num_ranks)] / kept["1"] < 1.1 / num_ranks


@pytest.fixture(scope="module")
def alone(models: Path) -> tuple[dict[str, Any], torch.Tensor, dict[str, torch.Tensor]]:
    trainer, figures, gradient = run_case(models / "dense", {})
    return figures, gradient, trainer.engine.policy()


@pytest.mark.parametrize("step", STEPS)
def test_a_step_on_shared_lines_makes_the_weights_of_one_rank(
    together: Path, alone: tuple[dict[str, Any], torch.Tensor, dict[str, torch.Tensor]], step: str
) -> None:
    figures, gradient, policy = alone
    tensors = load_file(together / f"{step}.safetensors")
    assert (tensors.pop("gradient") - gradient).norm() < 1e-5 * gradient.norm()
    assert tensors.keys() == policy.keys()
    for name, tensor in policy.items():
        assert (tensors[name] - tensor).norm() < 1e-4 * tensor.norm(), name
    measured = json.loads((together / f"{step}.json").read_text())
    assert measured.keys() == figures.keys()
    for name, value in figures.items():
        assert measured[name] == pytest.approx(value, rel=1e-4, abs=1e-7), name


@pytest.mark.parametrize("case", REPLAYS)
def test_ranks_replay_the_experts_that_others_recorded(together: Path, models: Path, case: str) -> None:
    """Most tokens would have other experts by then, so experts of other positions would make another step."""
    figures, policy = replay_case(models / "mixture", {})
    measured = json.loads((together / f"replay-{case}.json").read_text())
    assert figures["experts_changed"] > 0.3
    assert measured["experts_changed"] == pytest.approx(figures["experts_changed"], abs=0.02)
    assert measured["loss"] == pytest.approx(figures["loss"], rel=1e-3)
    tensors = load_file(together / f"replay-{case}.safetensors")
    for name, tensor in policy.items():
        assert (tensors[name] - tensor).norm() < 1e-3 * tensor.norm(), name


def test_a_model_with_attention_of_its_own_is_refused_on_all_ranks(lines: dict[str, Any]) -> None:
    where, rule = lines["refused"]
    assert where == "learner.sequence_ranks"
    assert "BloomForCausalLM would mix them, or attends in a way of its own" in rule
