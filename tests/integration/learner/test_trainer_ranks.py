"""Two ranks against one: the same gradient, figures and weights under every ZeRO stage, offload and cut."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from gspo.common.model.files import read_model_files
from gspo.learner.storage.step_log import StepLog
from gspo.learner.training.trainer import Trainer
from tests.integration.learner.rank_cases import (
    CASES,
    LAGGING,
    OTHERS,
    SELDOM,
    STEP,
    case_config,
    go_on,
    lagging,
    run_case,
)
from tests.support.card.cases import figures_of, make_models
from tests.support.training import figure_cases
from tests.support.training.figure_reference import assert_figures_of_the_log
from tests.support.training.rollout_rows import make_rows, train
from tests.support.training.started_ranks import run_ranks

pytestmark = pytest.mark.timeout(400)
# Of tests/support/card/cases.py; on one rank all of them: test_card.py.
ON_CARDS = ("lagging", "mixture", "equal")
ZERO_STAGES = ("zero-0", "zero-1", "zero-2", "zero-3")
EXACT = [case for case in CASES if "bfloat16" not in case]


def nightly_cases(cases: Iterable[str]) -> list[Any]:
    """The cases, those of the nightly tests as long ones."""
    return [pytest.param(case, marks=pytest.mark.long) if case in SELDOM else case for case in cases]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_models(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the one rank leaves a checkpoint."""
    return tmp_path_factory.mktemp("alone") / "checkpoint"


@pytest.fixture(scope="module")
def alone(folder: Path, checkpoint: Path) -> tuple[dict[str, Any], torch.Tensor]:
    """Figures and gradient of one rank, without ZeRO."""
    trainer, figures, vector = run_case(folder, CASES["zero-0"])
    trainer.engine.save(checkpoint, {})
    return figures, vector


def of_ranks(num_ranks: int, folder: Path, checkpoint: Path, out: Path, *cases: str) -> Path:
    """The results of several ranks. Without a compiler: DeepSpeed must not need one."""
    compilers = {"CXX": "/nonexistent/c++", "CC": "/nonexistent/cc"}
    run_ranks(
        num_ranks, "tests.integration.learner.rank_cases", folder, checkpoint, out, *cases, timeout_s=360, **compilers
    )
    return out


@pytest.fixture(scope="module")
def together(
    folder: Path, alone: tuple[dict[str, Any], torch.Tensor], checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    cases = [case for case in CASES if case not in SELDOM]
    return of_ranks(2, folder, checkpoint, tmp_path_factory.mktemp("cases"), OTHERS, *cases)


@pytest.fixture(scope="module")
def at_night(
    folder: Path, alone: tuple[dict[str, Any], torch.Tensor], checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    return of_ranks(2, folder, checkpoint, tmp_path_factory.mktemp("seldom"), *SELDOM)


@pytest.fixture
def results(request: pytest.FixtureRequest, case: str) -> Path:
    """Those of a case."""
    folder: Path = request.getfixturevalue("at_night" if case in SELDOM else "together")
    return folder


@pytest.mark.parametrize("case", nightly_cases(EXACT))
def test_two_ranks_make_the_gradient_of_one(
    results: Path, alone: tuple[dict[str, Any], torch.Tensor], case: str
) -> None:
    figures, expected = alone
    tensors = load_file(results / f"{case}.safetensors")
    assert (tensors["gradient"] - expected).norm() < 1e-5 * expected.norm()
    measured = json.loads((results / f"{case}.json").read_text())["figures"]
    assert measured.keys() == figures.keys()
    for name, value in figures.items():
        assert measured[name] == pytest.approx(value, rel=1e-4, abs=1e-7), name


@pytest.mark.parametrize("case", nightly_cases(CASES))
def test_the_shares_of_two_ranks_are_the_version_of_one(results: Path, case: str) -> None:
    facts = json.loads((results / f"{case}.json").read_text())
    whole, shared = facts["digests"]
    assert shared == whole
    weights = load_file(results / f"{case}.safetensors").keys() - {"gradient"}
    assert 0 < len(facts["owned"]) < len(weights)


@pytest.fixture(scope="module")
def of_four(
    folder: Path, alone: tuple[dict[str, Any], torch.Tensor], checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    return of_ranks(4, folder, checkpoint, tmp_path_factory.mktemp("four"), *ZERO_STAGES)


@pytest.mark.long
@pytest.mark.parametrize("case", ZERO_STAGES)
def test_four_ranks_make_the_gradient_and_the_version_of_one(
    of_four: Path, alone: tuple[dict[str, Any], torch.Tensor], case: str
) -> None:
    gradient = load_file(of_four / f"{case}.safetensors")["gradient"]
    assert (gradient - alone[1]).norm() < 1e-5 * alone[1].norm()
    whole, shared = json.loads((of_four / f"{case}.json").read_text())["digests"]
    assert shared == whole


@pytest.fixture(scope="module")
def on_cards(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results of two ranks on a device that refuses a mix of devices."""
    out = tmp_path_factory.mktemp("cards")
    run_ranks(2, "tests.support.card.cases", folder, out, "gspo", *ON_CARDS, timeout_s=300)
    return out


@pytest.mark.parametrize("case", figure_cases.CASES)
def test_every_figure_of_two_ranks_follows_from_the_log(together: Path, folder: Path, case: str) -> None:
    """Also where a rank has less work than the other, and nothing that it can count in its place."""
    assert_figures(together / f"figures-{case}", folder, case)


@pytest.mark.long
def test_every_figure_of_two_ranks_on_cards_follows_from_the_log(on_cards: Path, folder: Path) -> None:
    assert_figures(on_cards / "gspo", folder, "gspo")


def assert_figures(out: Path, folder: Path, case: str) -> None:
    log = StepLog(out).path(figure_cases.STEP)
    logged = json.loads((out / "figures.json").read_text())
    assert_figures_of_the_log(logged, log, folder, figure_cases.figure_config(folder, case))


@pytest.mark.long
@pytest.mark.parametrize("case", ON_CARDS)
def test_two_ranks_on_cards_have_the_figures_of_one_on_a_cpu(on_cards: Path, folder: Path, case: str) -> None:
    figures, expected = json.loads((on_cards / f"{case}.json").read_text()), figures_of(case, folder)
    assert figures.keys() == expected.keys()
    for name, value in expected.items():
        assert figures[name] == pytest.approx(value, rel=2e-3, abs=1e-5), name


def test_every_rank_is_a_card_with_a_measured_peak(together: Path) -> None:
    cards = json.loads((together / "zero-3.json").read_text())["cards"]
    assert cards.keys() == {"CPU of rank 0", "CPU of rank 1"}
    assert all(1e9 < peak < 1e14 for peak in cards.values())


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


@pytest.mark.parametrize("case", nightly_cases(CASES))
def test_what_is_not_finite_on_one_rank_is_left_out_on_all_and_a_resume_repeats_it(results: Path, case: str) -> None:
    """Also where the states were in host memory in between, as on cards that generators share."""
    result = json.loads((results / f"{case}.json").read_text())
    assert len(result["not_applied"]) == 1
    assert result["not_applied"][0].startswith("1: the loss is")
    assert result["same_after_a_resume_and_a_move"]


@pytest.mark.parametrize(("case", "num_floats"), [("zero-0", 2), ("zero-2", 2), ("zero-3", 2.5)])
def test_each_rank_moves_its_states_to_host_memory(together: Path, folder: Path, case: str, num_floats: float) -> None:
    """Floats of each parameter: two moments, under ZeRO 2 half of these and all weights. Under ZeRO 3 it is half of
    all, with reference, gradients and teacher. Weights in a mapped file do not move.
    """
    result = json.loads((together / f"{case}.json").read_text())
    tensors = load_file(together / f"{case}.safetensors")
    num_parameters = sum(tensor.numel() for name, tensor in tensors.items() if name.startswith("weights."))
    teacher = read_model_files(folder / figure_cases.TEACHER, allow_pickle=False).num_parameters
    kept = num_floats * num_parameters + (teacher / 2 if case == "zero-3" else 0)
    assert result["moved_bytes"] == pytest.approx([4 * kept] * 2, rel=0.01)


@pytest.fixture(scope="module")
def lagging_alone(folder: Path) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    return lagging(folder, CASES["zero-0"])


@pytest.mark.parametrize("case", LAGGING)
def test_two_ranks_measure_the_mismatch_of_an_earlier_version_as_one_does(
    together: Path, lagging_alone: tuple[dict[str, float], dict[str, torch.Tensor]], case: str
) -> None:
    """Both ranks score under the kept weights, and each has its own again after it."""
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


@pytest.mark.parametrize("case", nightly_cases(["zero-0", "zero-1", "zero-2-offload", "zero-3", "zero-3-offload-all"]))
def test_two_ranks_go_on_from_the_checkpoint_of_one(
    results: Path, folder: Path, alone: tuple[dict[str, Any], torch.Tensor], checkpoint: Path, case: str
) -> None:
    assert_close(load_file(results / f"{case}-gone-on.safetensors"), go_on(folder, checkpoint, CASES["zero-0"]))


@pytest.mark.parametrize("case", nightly_cases(["zero-0", "zero-1", "zero-2", "zero-3", "zero-3-offload"]))
def test_one_rank_goes_on_from_the_checkpoint_of_two(
    results: Path, folder: Path, alone: tuple[dict[str, Any], torch.Tensor], checkpoint: Path, case: str
) -> None:
    """With the weights of the two to the bit, and with their moments."""
    trainer = Trainer(case_config(folder, CASES[case]), folder)
    trainer.engine.load(results / case)
    written = load_file(results / f"{case}.safetensors")
    assert all(torch.equal(tensor, written[f"weights.{name}"]) for name, tensor in trainer.engine.policy().items())
    train(trainer, STEP + 1, make_rows(folder, step=STEP + 1))
    assert_close(trainer.engine.policy(), go_on(folder, checkpoint, CASES["zero-0"]))
