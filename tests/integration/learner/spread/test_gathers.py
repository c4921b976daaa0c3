"""Under ZeRO 3 and bfloat16 passes gather bfloat16, and every bit is that of float32 gathers."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from gspo.common.model.trained_parameters import TrainedSize
from gspo.common.planning.memory import rank_memory
from gspo.learner.model.network import load_policy_model
from gspo.learner.model.profile import profile
from gspo.learner.model.rounded_weights import rounded_weights
from tests.integration.learner.spread.gather_cases import CASES
from tests.support.tiny_model import make_tiny_model
from tests.support.training.rollout_rows import make_config
from tests.support.training.started_ranks import run_ranks

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]
BYTES = {"torch.float32": 4, "torch.bfloat16": 2}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {
        "tied": make_tiny_model(folder / "tied", scale=4.0),
        "untied": make_tiny_model(folder / "untied", scale=4.0, tie_word_embeddings=False),
        "mixture": make_tiny_model(folder / "mixture", scale=4.0, num_experts=4),
    }


@pytest.fixture(scope="module")
def trained(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results of two ranks in every case, with the gathers of a run and with float32 gathers."""
    out = tmp_path_factory.mktemp("gathers")
    words = [f"{name}={path}" for name, path in models.items()]
    run_ranks(2, "tests.integration.learner.spread.gather_cases", out, *words, timeout_s=560)
    return out


def facts(trained: Path, case: str, *, rounded: bool) -> dict[str, Any]:
    results: dict[str, Any] = json.loads((trained / f"{case}-{rounded}.json").read_text())
    return results


@pytest.mark.parametrize("case", CASES)
def test_rounded_gathers_give_the_bits_of_float32_gathers(trained: Path, case: str) -> None:
    """Figures of every loss and log-prob, gradients, and the float32 weights after steps and a mismatch probe."""
    assert facts(trained, case, rounded=True)["figures"] == facts(trained, case, rounded=False)["figures"]
    tensors, expected = (load_file(trained / f"{case}-{rounded}.safetensors") for rounded in (True, False))
    assert tensors.keys() == expected.keys()
    assert [name for name, it in expected.items() if not torch.equal(tensors[name], it)] == []
    assert any(not torch.equal(it, it.bfloat16().float()) for it in tensors.values())


@pytest.mark.parametrize("case", CASES)
def test_passes_gather_half_the_bytes(trained: Path, case: str) -> None:
    """But for embeddings, norms and output layer, a tenth of this model, and a reference, which is bfloat16 anyway."""
    elements, expected = (facts(trained, case, rounded=rounded)["elements"] for rounded in (True, False))
    assert sum(elements.values()) == sum(expected.values())
    if case == "float32":
        assert elements == expected
        assert elements.keys() == {"torch.float32"}
        return
    num_bytes, before = (sum(BYTES[name] * num for name, num in it.items()) for it in (elements, expected))
    assert 0.5 <= num_bytes / before < 0.67


@pytest.mark.parametrize("case", ["float32", "tied", "mixture"])
def test_passes_gather_the_counted_bytes(trained: Path, models: dict[str, Path], case: str) -> None:
    """As a part of those that float32 gathers would have, for all passes."""
    elements = facts(trained, case, rounded=True)["elements"]
    counted = profile(models[CASES[case][0]])
    # Linear layers and experts come in the dtype of the products, other weights in float32.
    num_rounded = 0 if case == "float32" else counted.num_rounded
    planned = (4 * counted.num_parameters - 2 * num_rounded) / (4 * counted.num_parameters)
    gathered = sum(BYTES[name] * num for name, num in elements.items()) / (4 * sum(elements.values()))
    assert gathered == pytest.approx(planned, rel=0.05)


@pytest.mark.parametrize("case", ["float32", "tied", "mixture"])
def test_a_rank_holds_the_planned_states(trained: Path, models: dict[str, Path], case: str) -> None:
    """ZeRO updates the float32 weights themselves."""
    measured = facts(trained, case, rounded=True)
    config = make_config(models[CASES[case][0]], learner={"zero_stage": 3})
    size = TrainedSize(measured["num_parameters"], measured["num_parameters"])
    assert measured["state_bytes"] == pytest.approx(rank_memory(config, size, 2, on_gpu=False).states, rel=0.01)


def test_weights_that_a_model_uses_unrounded_are_gathered_in_float32(models: dict[str, Path]) -> None:
    causal_lm = load_policy_model(models["tied"], make_config(models["tied"])).causal_lm
    # Seven linear layers in each of two.
    assert len(rounded_weights(causal_lm, torch.bfloat16, nullcontext)) == 14
    layer = causal_lm.model.layers[0].mlp.down_proj

    def in_float32(hidden: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return torch.nn.functional.linear(hidden.float(), layer.weight)

    layer.forward = in_float32
    assert rounded_weights(causal_lm, torch.bfloat16, nullcontext) == []


def test_experts_with_adapters_are_gathered_in_float32(models: dict[str, Path]) -> None:
    """peft adds the two in float32, also while the adapters add nothing yet."""
    config = make_config(models["mixture"], learner={"lora": {"rank": 4}})
    assert rounded_weights(load_policy_model(models["mixture"], config).causal_lm, torch.bfloat16, nullcontext) == []
