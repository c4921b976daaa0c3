"""LoRA in the trainer: the trained and merged weights, the checkpoints, and the KL term against the first policy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from gspo.common.errors import InputError
from gspo.common.model.files import read_model_files
from gspo.common.model.trained_parameters import trained_size
from gspo.common.planning.memory import rank_memory
from gspo.common.weights.manifest import policy_digest
from gspo.learner.assembly.rows import Row
from gspo.learner.training import policy_engine
from gspo.learner.training.trainer import Trainer
from tests.support.tiny_model import make_tiny_model
from tests.support.training.rollout_rows import answer_logp, make_config, make_rows, train, with_behavior

LORA: dict[str, Any] = {"rank": 4, "alpha": 16, "target_modules": ["q_proj", "v_proj", "down_proj"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("policy"), scale=4.0)


def make_trainer(folder: Path, *, algorithm: dict[str, Any] | None = None, **learner: Any) -> Trainer:
    keys = {"lora": LORA, "learning_rate": 1e-2, **learner}
    return Trainer(make_config(folder, algorithm={"pg_clip": 0.5, **(algorithm or {})}, learner=keys), folder)


def digest(trainer: Trainer) -> str:
    weights = trainer.engine.policy()
    return policy_digest((name, str(w.dtype), tuple(w.shape), w.numpy()) for name, w in weights.items())


def test_before_training_the_policy_is_the_given_model_to_the_bit(folder: Path) -> None:
    initial = load_file(folder / "model.safetensors")
    policy = make_trainer(folder).engine.policy()
    assert policy.keys() == initial.keys()
    assert all(torch.equal(policy[name], initial[name]) for name in initial)


def test_only_the_chosen_layers_change_and_by_a_product_of_the_rank(folder: Path) -> None:
    initial = load_file(folder / "model.safetensors")
    trainer = make_trainer(folder)
    train(trainer, 1, make_rows(folder))
    for name, weight in trainer.engine.policy().items():
        change = weight - initial[name]
        if name.rpartition(".weight")[0].rpartition(".")[2] in LORA["target_modules"]:
            assert torch.linalg.matrix_rank(change, rtol=1e-3) == LORA["rank"], name
        else:
            assert not change.any(), name


def test_merging_is_what_peft_merges(folder: Path, tmp_path: Path) -> None:
    trainer = make_trainer(folder)
    train(trainer, 1, make_rows(folder))
    trainer.engine.export(tmp_path / "export")
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    merged = PeftModel.from_pretrained(base, tmp_path / "export" / "adapter").merge_and_unload().state_dict()
    for name, weight in trainer.engine.policy().items():
        assert torch.equal(weight, merged[name]), name


@pytest.mark.parametrize(
    ("learner", "tolerance"),
    [({}, 1e-5), ({"zero_stage": 2}, 1e-5), ({"gradient_checkpointing": True}, 1e-5), ({"dtype": "bfloat16"}, 0.05)],
)
def test_experts_and_routers_get_adapters_and_what_is_given_out_is_what_is_trained(
    tmp_path: Path, learner: dict[str, Any], tolerance: float
) -> None:
    folder = make_tiny_model(tmp_path / "mixture", scale=4.0, num_experts=4)
    initial = load_file(folder / "model.safetensors")
    lora = {"lora": {**LORA, "target_modules": ["all-linear"]}}
    trainer = make_trainer(folder, **lora, **learner)
    assert all(torch.equal(weight, initial[name]) for name, weight in trainer.engine.policy().items())
    train(trainer, 1, make_rows(folder))
    trainer.engine.save(tmp_path / "checkpoint", {"moments": {}})
    trainer.engine.export(tmp_path / "export")
    policy = trainer.engine.policy()
    if "gradient_checkpointing" in learner:
        plain = make_trainer(folder, **lora)
        train(plain, 1, make_rows(folder))
        assert all(
            (weight - policy[name]).norm() < 1e-3 * weight.norm() for name, weight in plain.engine.policy().items()
        )
    assert policy.keys() == initial.keys()
    # An expert's gate_proj and up_proj are one matrix with an adapter of twice the rank.
    for name, rank in (("experts.3.down_proj", 4), ("experts.0.gate_proj", 8), ("gate", 4), ("experts.1.up_proj", 8)):
        name = f"model.layers.1.mlp.{name}.weight"
        change = policy[name] - initial[name]
        assert 0 < torch.linalg.matrix_rank(change, rtol=1e-3) <= rank, name
    # The engines' log-probs would be those of the export, and the learner's are the same.
    rows = with_behavior(tmp_path / "export", make_rows(folder, step=2), 1.0, 0.0, np.random.default_rng(0))
    resumed = make_trainer(folder, **lora, **learner)
    resumed.engine.load(tmp_path / "checkpoint")
    assert digest(resumed) == digest(trainer)
    assert train(trainer, 2, rows).metrics["sigma_token"] < tolerance
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    adapted = PeftModel.from_pretrained(base, tmp_path / "export" / "adapter").eval()
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "export", dtype=torch.float32)
    with torch.inference_mode():
        ours, theirs = (answer_logp(model, rows[0], 1.0) for model in (exported, adapted))
    assert torch.allclose(ours, theirs, atol=1e-5)


def test_giving_the_policy_out_changes_nothing_in_training(folder: Path, tmp_path: Path) -> None:
    quiet, asked = make_trainer(folder), make_trainer(folder)
    for step in (1, 2):
        rows = make_rows(folder, step=step)
        train(quiet, step, rows)
        train(asked, step, rows)
        asked.engine.policy()
        asked.engine.export(tmp_path / "export")
    assert digest(quiet) == digest(asked)


@pytest.mark.parametrize("zero_stage", [0, 2, 3])
def test_a_resumed_run_makes_the_same_bits_from_the_adapters_alone(
    folder: Path, tmp_path: Path, zero_stage: int
) -> None:
    rows = [make_rows(folder, step=step) for step in (1, 2)]
    whole, first = make_trainer(folder, zero_stage=zero_stage), make_trainer(folder, zero_stage=zero_stage)
    train(whole, 1, rows[0])
    train(first, 1, rows[0])
    first.engine.save(tmp_path / "checkpoint", {"moments": {}})
    resumed = make_trainer(folder, zero_stage=zero_stage)
    resumed.engine.load(tmp_path / "checkpoint")
    assert digest(resumed) == digest(first)
    for trainer in (whole, resumed):
        train(trainer, 2, rows[1])
    assert digest(resumed) == digest(whole)
    kept = sum(file.stat().st_size for file in (tmp_path / "checkpoint").rglob("*.pt"))
    assert kept < (folder / "model.safetensors").stat().st_size, "the frozen weights are in the checkpoint"


@pytest.mark.parametrize("zero_stage", [0, 3])
def test_states_that_are_not_copied_to_float32_give_the_same_bits(folder: Path, zero_stage: int) -> None:
    digests = []
    for copies in (False, True):
        trainer = make_trainer(folder, dtype="bfloat16", zero_stage=zero_stage)
        for layer in trainer.engine.model.adapters._layers():  # type: ignore[union-attr]
            assert not layer.cast_input_dtype_enabled
            layer.cast_input_dtype_enabled = copies
        train(trainer, 1, make_rows(folder))
        digests.append(digest(trainer))
    assert digests[0] == digests[1]


def test_dropout_is_drawn_from_seed_and_step(folder: Path) -> None:
    lora = {**LORA, "dropout": 0.2}
    dropped = [make_trainer(folder, lora=lora) for _ in range(2)]
    for trainer in (*dropped, plain := make_trainer(folder)):
        train(trainer, 1, make_rows(folder))
    assert digest(dropped[0]) == digest(dropped[1]) != digest(plain)
    # The same rows as another step: only the dropout can differ.
    others = make_trainer(folder, lora=lora), make_trainer(folder)
    for trainer in others:
        train(trainer, 2, make_rows(folder))
    assert digest(others[0]) != digest(dropped[0]) and digest(others[1]) == digest(plain)


@pytest.mark.parametrize("learner", [{}, {"lora": {}}, {"zero_stage": 3}, {"lora": {}, "zero_stage": 3}])
def test_the_kl_term_compares_with_the_first_policy(folder: Path, tmp_path: Path, learner: dict[str, Any]) -> None:
    """k3 by hand after one step of training, with the frozen copy and with the base of LoRA."""
    algorithm = {"num_mini_batches": 1, "kl_loss_coef": 0.5, "kl_kind": "k3"}
    losses = {}
    for use_kl_loss in (False, True):
        trainer = make_trainer(folder, algorithm={**algorithm, "use_kl_loss": use_kl_loss}, **learner)
        train(trainer, 1, make_rows(folder, num_mini_batches=1, noise=0.0))
        if use_kl_loss:
            # The term has no gradient where the policy is the first one still.
            trainer.engine.export(tmp_path / "export")
        losses[use_kl_loss] = train(trainer, 2, make_rows(folder, step=2, num_mini_batches=1)).metrics["loss"]
    expected = 0.5 * mean_k3(folder, tmp_path / "export", make_rows(folder, step=2, num_mini_batches=1))
    assert expected > 1e-3
    assert losses[True] - losses[False] == pytest.approx(expected, rel=1e-3)


def mean_k3(first: Path, policy: Path, rows: list[Row]) -> float:
    """1/N sum_i 1/L_i sum_t exp(ref - logp) - (ref - logp) - 1."""
    models = [AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in (first, policy)]
    means = []
    for row in rows:
        with torch.inference_mode():
            ref_T, logp_T = (answer_logp(model, row, 1.0)[torch.as_tensor(row.mask)] for model in models)
        difference_T = ref_T - logp_T
        means.append(float((difference_T.exp() - difference_T - 1).mean()))
    return sum(means) / len(means)


@pytest.mark.parametrize(("lora", "num_experts"), [({"lora": LORA}, 0), ({"lora": LORA}, 4), ({}, 4)])
def test_what_is_frozen_is_stored_in_bfloat16_as_planned_with_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lora: dict[str, Any], num_experts: int
) -> None:
    """The base of adapters where its files are bfloat16, but for experts; the first policy of a KL term as a whole."""
    folder = make_tiny_model(tmp_path / "model", scale=4.0, num_experts=num_experts)
    AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(folder)
    algorithm = {"pg_clip": 0.5, "use_kl_loss": True}
    config = make_config(folder, algorithm=algorithm, learner={"dtype": "bfloat16", "learning_rate": 1e-2, **lora})
    trainer = Trainer(config, folder)
    planned = rank_memory(config, trained_size(config, read_model_files(folder, allow_pickle=False)), 1)
    reference = [] if lora else trainer.engine._reference_model.parameters()
    assert sum(weight.nbytes for weight in trainer.engine.model.parameters()) == planned.weights
    assert sum(weight.nbytes for weight in reference) == pytest.approx(planned.reference, rel=0.01)  # routers
    if lora:
        monkeypatch.setattr(policy_engine, "store_rounded", lambda *_: None)
        plain = Trainer(config, folder)
        rows = make_rows(folder)
        for either in (trainer, plain):
            train(either, 1, rows)
        assert digest(trainer) == digest(plain)


@pytest.mark.parametrize("num_experts", [0, 16])
@pytest.mark.parametrize("lora", [None, LORA])
def test_in_bfloat16_the_reference_is_the_first_policy_to_the_bit(
    tmp_path: Path, num_experts: int, lora: dict[str, Any] | None
) -> None:
    """Any difference would show: the coefficient is a million."""
    folder = make_tiny_model(tmp_path / "model", scale=4.0, num_experts=num_experts)
    learner = (
        {"dtype": "bfloat16"} if lora is None else {"dtype": "bfloat16", "lora": {**lora, "target_modules": ["q_proj"]}}
    )
    rows = make_rows(folder, num_mini_batches=1)
    losses = []
    for coefficient in (0.0, 1e6):
        algorithm = {"num_mini_batches": 1, "pg_clip": 0.5, "use_kl_loss": True, "kl_loss_coef": coefficient}
        trainer = Trainer(make_config(folder, algorithm=algorithm, learner=learner), folder)
        losses.append(train(trainer, 1, rows).metrics["loss"])
    assert losses[0] == losses[1]


def test_a_layer_that_is_none_is_an_error(folder: Path) -> None:
    with pytest.raises(InputError, match=r"learner\.lora\.target_modules: \['qproj'\]"):
        make_trainer(folder, lora={"rank": 4, "target_modules": ["qproj"]})
