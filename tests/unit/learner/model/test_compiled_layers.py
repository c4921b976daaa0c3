"""Compiled layers: one compilation serves all layers of a kind, so a deep model starts as soon as a flat one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters
from transformers.modeling_layers import GradientCheckpointingLayer

from gspo.learner.model.network import load_policy_model
from gspo.learner.model.rounded_weights import rounded_once, take_rounded
from tests.support.tiny_model import make_tiny_model
from tests.support.training.rollout_rows import make_config


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("rounds", [False, True])
def test_all_layers_share_what_the_first_one_compiles(tmp_path: Path, rounds: bool) -> None:
    model = make_tiny_model(tmp_path / "model", layers=4)
    causal_lm = load_policy_model(model, make_config(model)).causal_lm
    if rounds:
        take_rounded(causal_lm)
    layers = [module for module in causal_lm.modules() if isinstance(module, GradientCheckpointingLayer)]
    for layer in layers:
        layer.compile(backend="eager", dynamic=True)
    with rounded_once(causal_lm, torch.bfloat16), torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        states, graphs = torch.randn(1, 7, causal_lm.config.hidden_size), []
        angles = causal_lm.model.rotary_emb(states, torch.arange(7)[None])
        for layer in layers:
            states = layer(states, position_embeddings=angles, attention_mask=None)
            graphs.append(counters["stats"]["unique_graphs"])
    assert len(layers) == 4 and graphs[0] > 0
    # The second layer has another dtype of states than the first; after it, nothing is new.
    assert len(set(graphs[1:])) == 1, graphs
