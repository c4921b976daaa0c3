"""A teacher beside the policy: it scores, and is never trained. Formulas: test_figures_reference.py."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from gspo.learner.assembly.rows import Row
from gspo.learner.training.trainer import Trainer
from tests.support.tiny_model import make_tiny_model
from tests.support.training.rollout_rows import digest, make_config, make_rows, train


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("policy"), scale=4.0)


@pytest.fixture(scope="module")
def larger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("teacher"), hidden_size=96, layers=3, seed=1, scale=4.0)


def start(policy: Path, teacher: Path, *, learner: dict[str, Any] | None = None, **keys: Any) -> Trainer:
    """A trainer whose rewards count for nothing."""
    # One cut for scoring and training, so that both sum in the same order.
    algorithm: dict[str, Any] = {"num_mini_batches": 1}
    if keys.get("kl_in") != "loss":  # else nothing is compared with old log-probs
        algorithm["old_logprobs"] = "recompute"
    section = {"path": str(teacher), "alone": True, **keys}
    learner = {"micro_batch_tokens": 100_000, "gradient_checkpointing": False, **(learner or {})}
    return Trainer(make_config(policy, algorithm=algorithm, teacher=section, learner=learner), policy)


def unrewarded(policy: Path) -> list[Row]:
    return [replace(row, advantage=0.0) for row in make_rows(policy, num_mini_batches=1)]


@pytest.mark.parametrize("kl_in", ["advantage", "loss"])
def test_a_policy_that_is_its_own_teacher_has_no_kl_and_stays(policy: Path, kl_in: str) -> None:
    trainer = start(policy, policy, kl_in=kl_in)
    before = digest(trainer)
    figures = train(trainer, 1, unrewarded(policy)).metrics
    assert (figures["teacher_kl"], figures["loss"], figures["grad_norm"]) == (0.0, 0.0, 0.0)
    assert digest(trainer) == before


@pytest.mark.parametrize(
    ("kl_in", "learner"),
    [("advantage", {}), ("loss", {"dtype": "bfloat16"}), ("loss", {"lora": {"rank": 8}})],
    ids=str,
)
def test_a_larger_teacher_pulls_the_policy_and_stays_as_it_is(
    policy: Path, larger: Path, kl_in: str, learner: dict[str, Any]
) -> None:
    """Also in bfloat16, where its linear layers are rounded once, and beside adapters, which it has none of."""
    trainer = start(policy, larger, kl_in=kl_in, learner={"learning_rate": 3e-3, **learner})
    before, rows = digest(trainer), unrewarded(policy)
    losses = [train(trainer, step, rows).metrics["loss"] for step in (1, 2, 3)]
    assert digest(trainer) != before
    assert losses[-1] < 0.97 * losses[0] or kl_in == "advantage"
    assert trainer.engine.teacher is not None
    expected = dict(AutoModelForCausalLM.from_pretrained(larger, dtype=torch.float32).named_parameters())
    for name, weight in trainer.engine.teacher.model.causal_lm.named_parameters():
        assert torch.equal(weight.float(), expected[name].to(weight.dtype).float()), name
        assert not weight.requires_grad and weight.grad is None
        assert (weight.dtype == torch.bfloat16) == ("proj" in name and learner.get("dtype") == "bfloat16")
