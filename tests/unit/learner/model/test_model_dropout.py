"""Dropout of a model's own config.json, and routers that draw their experts: engines sample without them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.learner.model_types import quiet, tiny_model
from gspo.learner.model.network import PolicyModel, can_be_packed, load_policy_model
from tests.support.training.rollout_rows import make_config

TOKENS = torch.arange(1, 25)[None] * 7 % 96


def logp(model: PolicyModel) -> torch.Tensor:
    logp_N: torch.Tensor = model(TOKENS, None, torch.arange(23), TOKENS[0, 1:])[0]
    return logp_N


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("kind", ["gpt2", "opt", "seed_oss", "phimoe"])
def test_training_scores_an_answer_as_it_was_sampled(tmp_path: Path, kind: str, checkpointing: bool) -> None:
    with quiet():
        tiny_model(kind).save_pretrained(tmp_path)
        model = load_policy_model(tmp_path, make_config(tmp_path, learner={"gradient_checkpointing": checkpointing}))
    assert model.training and model.causal_lm.is_gradient_checkpointing == checkpointing
    trained = logp(model)
    trained.sum().backward()  # type: ignore[no-untyped-call]
    assert all(weight.grad is None or weight.grad.isfinite().all() for weight in model.parameters())
    assert sum(weight.grad is not None for weight in model.parameters()) > 10
    torch.testing.assert_close(trained, logp(model.eval()), rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", ["gpt2", "opt", "seed_oss", "phimoe"])
def test_a_run_from_before_the_key_keeps_its_dropout(tmp_path: Path, kind: str) -> None:
    with quiet():
        tiny_model(kind).save_pretrained(tmp_path)
        model = load_policy_model(tmp_path, make_config(tmp_path, learner={"model_dropout": True}))
    assert (logp(model) - logp(model)).abs().max() > 1e-3
    assert torch.equal(logp(model.eval()), logp(model))


def test_checkpointing_that_begins_later_brings_no_dropout(tmp_path: Path) -> None:
    with quiet():
        tiny_model("opt").save_pretrained(tmp_path)
        model = load_policy_model(tmp_path, make_config(tmp_path))
    before = logp(model)
    model.checkpoint_activations(True)
    assert can_be_packed(model.causal_lm)  # a pass in evaluation, after which all is as before
    layer = model.causal_lm.model.decoder.layers[0]
    assert layer.training and not layer.self_attn.training
    assert torch.equal(logp(model), before)
    assert not any(module.training for module in model.eval().modules())
