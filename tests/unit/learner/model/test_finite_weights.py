"""A checkpoint with NaN or infinity is refused by these words, wherever the value stands."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.learner.model_types import quiet, tiny_model
from gspo.common.errors import InputError
from gspo.learner.model.network import load_policy_model
from tests.support.service_process import make_run
from tests.support.tiny_model import make_tiny_model


@pytest.mark.parametrize(
    ("names", "value", "problem"),
    [
        (["model.layers.0.mlp.up_proj.weight"], math.nan, "has NaN in model.layers.0.mlp.up_proj.weight. Give"),
        # A row of a token that no test of the architecture reads.
        (["model.embed_tokens.weight"], math.inf, "has infinity in model.embed_tokens.weight. Give"),
        (["model.norm.weight", "model.layers.1.mlp.up_proj.weight"], math.nan, ", and 1 more tensors have such values"),
    ],
)
def test_it_is_named(tmp_path: Path, names: list[str], value: float, problem: str) -> None:
    folder = tmp_path / "model"
    make_tiny_model(folder)
    tensors = load_file(folder / "model.safetensors")
    for name in names:
        tensors[name].view(-1)[-1] = value
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(InputError, match=problem) as refused:
        load_policy_model(folder, make_run(tmp_path, folder))
    assert refused.value.where == "model.path"


def test_memory_before_the_load_is_not_read_as_weights(tmp_path: Path) -> None:
    # XLNet's code allocates weights on the CPU under every default device; this mode fills such memory with NaN.
    with quiet():
        tiny_model("xlnet").save_pretrained(tmp_path / "model")
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(InputError, match="changes its logits after the output layer"):
            load_policy_model(tmp_path / "model", make_run(tmp_path, tmp_path / "model"))
    finally:
        torch.use_deterministic_algorithms(False)
