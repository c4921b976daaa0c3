"""The trainer against a plain loop written here: same rows, full logits, torch's AdamW, no micro-batches."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from gspo.learner.assembly.rows import Row
from gspo.learner.model.attention import short_causal_attention
from gspo.learner.model.network import can_be_packed, load_policy_model
from gspo.learner.training.policy_engine import _allow_tf32
from gspo.learner.training.trainer import Trainer
from gspo.learner.training.trainer_api import NotFiniteError
from tests.support.tiny_model import make_tiny_model
from tests.support.training.rollout_rows import answer_logp, digest, make_config, make_rows, train, with_version
from tests.support.typed.gradients import backward

CLIP = 0.05
GSPO = {"pg_clip": CLIP}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("policy"), scale=4.0)


class PlainLoop:
    """GSPO as the paper writes it: one forward a row, one optimizer step a mini-batch."""

    def __init__(
        self, folder: Path, learning_rate: float = 1e-3, temperature: float | None = 1.0, max_grad_norm: float = 1.0
    ) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        weights = list(self.model.parameters())
        groups = [{"params": [weight for weight in weights if (weight.ndim > 1) is matrix]} for matrix in (True, False)]
        self.optimizer = torch.optim.AdamW(groups, lr=learning_rate, weight_decay=0.0)
        self.temperature, self.max_grad_norm = temperature, max_grad_norm

    def train(self, rows: Sequence[Row]) -> float:
        """Returns the mean of the mini-batches' losses."""
        losses = []
        for number in sorted({row.mini_batch for row in rows if row.mini_batch >= 0}):
            batch = [row for row in rows if row.mini_batch == number and row.skipped is None]
            loss = torch.stack([self._sequence_loss(row) for row in batch]).sum() / len(batch)
            self.optimizer.zero_grad()
            backward(loss)
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.max_grad_norm)
            self.optimizer.step()
            losses.append(float(loss.detach()))
        return sum(losses) / len(losses)

    def _logp(self, row: Row) -> torch.Tensor:
        return answer_logp(self.model, row, self.temperature or row.temperature)

    def _sequence_loss(self, row: Row) -> torch.Tensor:
        assert row.advantage is not None
        mask = torch.as_tensor(row.mask)
        delta = self._logp(row) - torch.as_tensor(row.logp)
        ratio = torch.exp(delta[mask].sum() / mask.sum())
        return -torch.minimum(ratio * row.advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * row.advantage)


def assert_same_weights(trainer: Trainer, expected: Mapping[str, torch.Tensor], tolerance: float = 1e-5) -> None:
    weights = trainer.engine.policy()
    for name, tensor in weights.items():
        difference = (tensor - expected[name].detach()).norm() / expected[name].detach().norm()
        assert difference < tolerance, (name, float(difference))


def test_losses_and_weights_are_those_of_a_plain_loop(folder: Path) -> None:
    trainer, plain = Trainer(make_config(folder, algorithm=GSPO), folder), PlainLoop(folder)
    for step in (1, 2, 3):
        rows = make_rows(folder, step=step)
        figures = train(trainer, step, rows).metrics
        assert figures["loss"] == pytest.approx(plain.train(rows), rel=1e-5, abs=1e-7)
    assert_same_weights(trainer, plain.model.state_dict())


def test_the_temperature_is_the_samplings(folder: Path) -> None:
    config = make_config(folder, algorithm=GSPO, sampling={"temperature": 0.7})
    trainer, plain = Trainer(config, folder), PlainLoop(folder, temperature=0.7)
    rows = make_rows(folder, temperature=0.7)
    assert train(trainer, 1, rows).metrics["loss"] == pytest.approx(plain.train(rows), rel=1e-5, abs=1e-7)
    assert_same_weights(trainer, plain.model.state_dict())


OF_AGENTS: dict[str, Any] = {"agent": {"external": True, "sampling": "client"}, "gateway": {"replicas": 1}}
OF_SOURCES: dict[str, Any] = {
    "data": {
        "sources": [
            {"name": name, "prompts": "prompts.jsonl", "temperature": temperature}
            for name, temperature in (("hot", 1.6), ("cold", 0.7))
        ]
    }
}


@pytest.mark.parametrize(("packing", "keys"), [(True, OF_AGENTS), (False, OF_AGENTS), (True, OF_SOURCES)])
def test_a_rollout_is_trained_at_its_own_temperature(folder: Path, packing: bool, keys: dict[str, Any]) -> None:
    """Half of them at one temperature and half at another, neither of them the run's."""
    config = make_config(folder, algorithm=GSPO, learner={"packing": packing}, **keys)
    hot, cold = make_rows(folder, temperature=1.6), make_rows(folder, temperature=0.7)
    rows = [(hot if row.number % 2 else cold)[place] for place, row in enumerate(hot)]
    trainer, plain = Trainer(config, folder), PlainLoop(folder, temperature=None)
    assert train(trainer, 1, rows).metrics["loss"] == pytest.approx(plain.train(rows), rel=1e-5, abs=1e-7)
    assert_same_weights(trainer, plain.model.state_dict())


@pytest.mark.parametrize("packing", [False, True])
def test_token_records_are_of_the_weights_before_the_update_and_change_nothing(folder: Path, packing: bool) -> None:
    keys: dict[str, Any] = {"packing": packing, "micro_batch_tokens": 128}
    rows, plain = make_rows(folder), PlainLoop(folder)
    algorithm = {**GSPO, "num_mini_batches": 1}
    rows = [replace(row, mini_batch=0) for row in rows]
    recording = Trainer(make_config(folder, algorithm=algorithm, learner={**keys, "token_records": True}), folder)
    silent = Trainer(make_config(folder, algorithm=algorithm, learner=keys), folder)
    records = {(record.group, record.number): record for record in train(recording, 1, rows).tokens}
    assert train(silent, 1, rows).tokens == ()
    assert_same_weights(recording, silent.engine.policy())
    assert set(records) == {(row.group, row.number) for row in rows}
    for row in rows:
        record = records[row.group, row.number]
        expected = answer_logp(plain.model, row, 1.0).detach().numpy()
        np.testing.assert_allclose(record.logp_T[row.mask], expected[row.mask], atol=2e-5)
        assert not record.logp_T[~row.mask].any()
        assert (record.entropy_T[row.mask] > 0).all()


def test_under_several_epochs_the_last_update_is_recorded(folder: Path) -> None:
    algorithm = {**GSPO, "num_mini_batches": 1, "ppo_epochs": 2}
    config = make_config(folder, algorithm=algorithm, learner={"token_records": True, "learning_rate": 1e-2})
    rows = [replace(row, mini_batch=0) for row in make_rows(folder)]
    plain = PlainLoop(folder, learning_rate=1e-2)
    plain.train(rows)
    for record, row in zip(train(Trainer(config, folder), 1, rows).tokens, rows, strict=True):
        expected = answer_logp(plain.model, row, 1.0).detach().numpy()
        np.testing.assert_allclose(record.logp_T[row.mask], expected[row.mask], atol=1e-3)


def test_the_cut_into_micro_batches_changes_nothing(folder: Path) -> None:
    rows = make_rows(folder)
    trainers = []
    for tokens in (128, 100_000):
        config = make_config(folder, algorithm=GSPO, learner={"micro_batch_tokens": tokens})
        trainers.append(Trainer(config, folder))
    losses = [train(trainer, 1, rows).metrics["loss"] for trainer in trainers]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5, abs=1e-7)
    assert_same_weights(trainers[0], trainers[1].engine.policy())


def test_skipped_rows_are_absent_and_not_zero(folder: Path) -> None:
    rows = make_rows(folder)
    # The values of a skipped row must not matter, so they are the worst ones.
    skipped = [
        replace(row, skipped="failed", advantage=None, reward=None, failure="it raised", mini_batch=-1)
        if row.number == 1
        else row
        for row in rows
    ]
    trainer, plain = Trainer(make_config(folder, algorithm=GSPO), folder), PlainLoop(folder)
    figures = train(trainer, 1, skipped).metrics
    assert figures["loss"] == pytest.approx(plain.train(skipped), rel=1e-5, abs=1e-7)
    assert (figures["sequences"], figures["skipped_failed"], figures["skipped_stale"]) == (24, 8, 0)
    assert_same_weights(trainer, plain.model.state_dict())


@pytest.mark.parametrize(
    ("zero_stage", "advantage", "reason"),
    [
        *((stage, math.inf, "the loss is") for stage in (0, 1, 2, 3)),
        # A finite loss whose squared gradients overflow; stage 3 adds them up in float64, where they do not.
        *((stage, 1e36, "the gradient norm is") for stage in (0, 1, 2)),
    ],
)
def test_a_mini_batch_that_is_not_finite_is_left_out_whole(
    folder: Path, zero_stage: int, advantage: float, reason: str
) -> None:
    config = make_config(folder, algorithm=GSPO, learner={"zero_stage": zero_stage})
    rows = [replace(row, advantage=advantage) if row.mini_batch == 1 else row for row in make_rows(folder)]
    trainer, replaying = (Trainer(config, folder) for _ in range(2))
    trained = train(trainer, 1, rows)
    assert [(update.update, update.mini_batch) for update in trained.not_applied] == [(1, 1)]
    assert reason in trained.not_applied[0].reason
    assert trained.metrics["mini_batches_not_applied"] == 1
    assert all(math.isfinite(value) for value in trained.metrics.values())
    # A replay with the recorded updates makes the same, and gradients and moments keep no trace of those not applied.
    assert [update.update for update in train(replaying, 1, rows, not_applied=[1]).not_applied] == [1]
    assert digest(trainer) == digest(replaying)
    for each in (trainer, replaying):
        assert not train(each, 2, make_rows(folder, step=2)).not_applied
    assert digest(trainer) == digest(replaying)


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_a_loss_that_is_not_finite_is_left_out_though_its_gradient_is(folder: Path, zero_stage: int) -> None:
    """An answer far outside the clip has no gradient; with so large an advantage its sum over tokens overflows."""
    rows = make_rows(folder)
    far = next(n for n, row in enumerate(rows) if row.mini_batch == 1 and row.mask.sum() > 3)
    rows[far] = replace(rows[far], advantage=3e38, logp=rows[far].logp - rows[far].mask)
    config = make_config(folder, algorithm=GSPO, learner={"zero_stage": zero_stage})
    trainer, replaying = (Trainer(config, folder) for _ in range(2))
    (update,) = train(trainer, 1, rows).not_applied
    assert (update.mini_batch, update.reason) == (1, "the loss is -inf")
    # A recorded update is not tried: with these rows it would be applied.
    train(replaying, 1, make_rows(folder), not_applied=[update.update])
    assert digest(trainer) == digest(replaying)


def test_three_in_a_row_end_the_run_also_over_steps(folder: Path) -> None:
    trainer = Trainer(make_config(folder, algorithm=GSPO), folder)
    spoilt = [replace(row, advantage=math.inf) if row.mini_batch >= 2 else row for row in make_rows(folder)]
    assert len(train(trainer, 1, spoilt).not_applied) == 2
    # One that is applied in between starts the count anew.
    first = [replace(row, advantage=math.inf) if row.mini_batch in (0, 2) else row for row in make_rows(folder, step=2)]
    with pytest.raises(NotFiniteError, match="step 2: 3 mini-batches in a row were not applied; of the last one the"):
        train(trainer, 2, first)
    trainer = Trainer(make_config(folder, algorithm=GSPO), folder)
    train(trainer, 1, spoilt)
    train(trainer, 2, make_rows(folder, step=2))
    assert len(train(trainer, 3, [replace(row, step=3) for row in spoilt]).not_applied) == 2


def test_a_step_of_which_nothing_is_applied_says_so_and_changes_nothing(folder: Path) -> None:
    trainer = Trainer(make_config(folder, algorithm=GSPO), folder)
    before = digest(trainer)
    rows = [replace(row, advantage=math.inf) for row in make_rows(folder, num_mini_batches=1)]
    figures = train(trainer, 1, rows).metrics
    assert figures["mini_batches_not_applied"] == 1 and "loss" not in figures
    assert digest(trainer) == before


def gradient(trainer: Trainer) -> torch.Tensor:
    """All of the first optimizer step's gradient: AdamW's first moment is a tenth of it."""
    optimizer = trainer.engine.deepspeed.optimizer
    return torch.cat(
        [optimizer.state[p]["exp_avg"].flatten() for group in optimizer.param_groups for p in group["params"]]
    )


@pytest.mark.parametrize("algorithm", [GSPO, {"preset": "grpo"}, {"use_kl_loss": True, **GSPO}])
def test_the_gradient_is_the_same_packed_and_padded_however_it_is_cut(folder: Path, algorithm: dict[str, Any]) -> None:
    """Rows without an advantage have no backward pass; half the groups are without one."""
    rows = [
        replace(row, advantage=0.0 if row.group % 2 else row.advantage) for row in make_rows(folder, num_mini_batches=1)
    ]
    results = {}
    for packing in (True, False):
        for tokens in (128, 100_000):
            learner = {"packing": packing, "micro_batch_tokens": tokens, "gradient_checkpointing": tokens == 128}
            trainer = Trainer(make_config(folder, algorithm=algorithm, learner=learner), folder)
            figures = train(trainer, 1, rows).metrics
            results[packing, tokens] = figures, gradient(trainer)
    figures, expected = results[False, 100_000]
    for case, (others, vector) in results.items():
        assert (vector - expected).norm() < 1e-5 * expected.norm(), case
        for name in ("loss", "grad_norm", "k3", "entropy", "log_ratio_max", "sigma_token"):
            assert others[name] == pytest.approx(figures[name], rel=1e-4, abs=1e-7), (case, name)


def test_a_packed_line_is_never_attended_to_as_a_whole(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its mask, and the scores, would be the square of all rollouts' tokens."""
    rows = make_rows(folder)
    trainer = Trainer(make_config(folder, algorithm=GSPO, learner={"micro_batch_tokens": 2048}), folder)
    widths = []

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float | None) -> torch.Tensor:
        widths.append(q.shape[2])
        return short_causal_attention(q, k, v, scaling)

    monkeypatch.setattr("gspo.learner.model.attention.short_causal_attention", attention)
    monkeypatch.setattr("gspo.learner.model.attention.sdpa_mask", None)
    train(trainer, 1, rows)
    # The longest rollout is 11 tokens of prompt and 39 of an answer.
    assert 0 < max(widths) <= 50


def test_a_model_that_would_mix_packed_rollouts_is_padded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_policy_model(folder, make_config(folder)).causal_lm
    assert can_be_packed(model)
    kinds = model.config.layer_types
    model.config.layer_types = ["linear_attention", *kinds[1:]]
    assert not can_be_packed(model)
    model.config.layer_types = kinds
    # One that attends its own way, and takes no positions.
    forward, kind = type(model.base_model).forward, type(model.base_model)
    monkeypatch.setattr(kind, "forward", lambda self, position_ids=None, **words: forward(self, **words))
    monkeypatch.setattr("gspo.learner.model.network.attend_to", lambda line: None)
    assert not can_be_packed(model)


@pytest.mark.parametrize("zero_stage", [1, 2, 3])
def test_every_zero_stage_makes_the_same_weights(folder: Path, zero_stage: int) -> None:
    plain = PlainLoop(folder)
    trainer = Trainer(make_config(folder, algorithm=GSPO, learner={"zero_stage": zero_stage}), folder)
    rows = make_rows(folder)
    figures = train(trainer, 1, rows).metrics
    assert figures["loss"] == pytest.approx(plain.train(rows), rel=1e-5, abs=1e-7)
    assert figures["grad_norm"] > 0
    assert_same_weights(trainer, plain.model.state_dict())


@pytest.mark.parametrize("zero_stage", [0, 2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_resumed_run_makes_the_same_bits(folder: Path, tmp_path: Path, dtype: str, zero_stage: int) -> None:
    config = make_config(
        folder, algorithm=GSPO, learner={"dtype": dtype, "schedule": "cosine", "zero_stage": zero_stage}
    )
    rows = {step: make_rows(folder, step=step) for step in (1, 2, 3)}
    through = Trainer(config, folder)
    for step in (1, 2, 3):
        train(through, step, rows[step])
    first = Trainer(config, folder)
    train(first, 1, rows[1])
    first.engine.save(tmp_path / "checkpoint", {"moments": {"count": 4, "mean": 0.25}})
    second = Trainer(config, folder)
    assert second.engine.load(tmp_path / "checkpoint") == {"moments": {"count": 4, "mean": 0.25}}
    assert digest(second) == digest(first) != digest(through)
    for step in (2, 3):
        train(second, step, rows[step])
    assert digest(second) == digest(through)


@pytest.mark.parametrize(("zero_stage", "norms_decay"), [*((stage, False) for stage in range(4)), (0, True), (3, True)])
def test_what_may_change_on_resume_takes_effect_on_resume(
    folder: Path, tmp_path: Path, zero_stage: int, norms_decay: bool
) -> None:
    """A checkpoint of DeepSpeed brings the old learning rate, weight decay and, under ZeRO 1 and 2, gradient clip.

    Norms decay in runs that began before learner.decay_matrices_only.
    """
    stage = {"zero_stage": zero_stage, "decay_matrices_only": not norms_decay}
    first = Trainer(make_config(folder, algorithm=GSPO, learner={**stage, "max_grad_norm": 1e-3}), folder)
    train(first, 1, make_rows(folder))
    first.engine.save(tmp_path / "checkpoint", {})
    changed = {"learning_rate": 5e-4, "weight_decay": 10.0, "max_grad_norm": 0.5}
    resumed = Trainer(make_config(folder, algorithm=GSPO, learner={**stage, **changed}), folder)
    resumed.engine.load(tmp_path / "checkpoint")
    train(resumed, 2, make_rows(folder, step=2))
    plain = PlainLoop(folder, max_grad_norm=1e-3)
    plain.train(make_rows(folder))
    for group, decay in zip(plain.optimizer.param_groups, (10.0, 10.0 * norms_decay), strict=True):
        group |= {"lr": 5e-4, "weight_decay": decay}
    plain.max_grad_norm = 0.5
    plain.train(make_rows(folder, step=2))
    assert_same_weights(resumed, plain.model.state_dict())


def test_the_moments_and_the_epsilon_of_adam_are_the_configurations(folder: Path) -> None:
    keys = {"adam_betas": [0.5, 0.8], "adam_eps": 0.1, "max_grad_norm": 0.5}
    trainer = Trainer(make_config(folder, algorithm=GSPO, learner={"learning_rate": 1e-3, **keys}), folder)
    train(trainer, 1, make_rows(folder))
    plain = PlainLoop(folder, max_grad_norm=0.5)
    for group in plain.optimizer.param_groups:
        group |= {"betas": (0.5, 0.8), "eps": 0.1}
    plain.train(make_rows(folder))
    assert_same_weights(trainer, plain.model.state_dict())


def test_a_rank_syncs_no_file_that_another_one_has_begun(folder: Path, tmp_path: Path) -> None:
    """safetensors renames a file once it is written: between a listing and the sync its name may go."""
    (tmp_path / ".tmpOfAnother").symlink_to(tmp_path / "gone")
    trainer = Trainer(make_config(folder, algorithm=GSPO), folder)
    trainer.engine.save(tmp_path, {"whole": True})
    assert Trainer(make_config(folder, algorithm=GSPO), folder).engine.load(tmp_path) == {"whole": True}


def test_without_a_checkpoint_there_is_nothing_to_load(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Trainer(make_config(folder), folder).engine.load(tmp_path)


def test_an_export_loads_like_any_model(folder: Path, tmp_path: Path) -> None:
    trainer = Trainer(make_config(folder, algorithm=GSPO), folder)
    (tmp_path / "export").mkdir()
    (tmp_path / "export" / "old").touch()
    train(trainer, 1, make_rows(folder))
    trainer.engine.export(tmp_path / "export")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    assert all(torch.equal(loaded.state_dict()[name], tensor) for name, tensor in trainer.engine.policy().items())
    messages = [{"role": "user", "content": "1+1="}]
    original, written = AutoTokenizer.from_pretrained(folder), AutoTokenizer.from_pretrained(tmp_path / "export")
    assert written.apply_chat_template(messages) == original.apply_chat_template(messages)
    assert [path.name for path in tmp_path.iterdir()] == ["export"]
    assert not (tmp_path / "export" / "old").exists()


@pytest.mark.parametrize(
    "algorithm",
    [
        {"preset": "grpo"},
        {"preset": "roll-gspo", "prompt_length": 64, "response_length": 64},
        {"preset": "gspo", "importance_sampling": "seq_token", "ppo_epochs": 2},
        {"loss_agg_mode": "seq-mean-token-sum-norm", "add_token_level_kl": True},
        {"old_logprobs": "recompute", "behavior_correction": "truncate"},
        {"old_logprobs": "recompute", "behavior_correction": "mask", "behavior_level": "token"},
    ],
)
def test_every_preset_trains_and_reports(folder: Path, algorithm: dict[str, Any]) -> None:
    trainer = Trainer(make_config(folder, algorithm=algorithm), folder)
    before = digest(trainer)
    figures = train(trainer, 1, make_rows(folder)).metrics
    assert digest(trainer) != before
    assert all(math.isfinite(value) for value in figures.values())
    assert figures["tokens"] == sum(row.mask.sum() for row in make_rows(folder))
    assert figures["groups"] == 8
    assert ("reference_kl" in figures) == ("roll-gspo" in algorithm.values() or "add_token_level_kl" in algorithm)
    # Behavior is the model's own plus noise of 0.01 a token.
    assert figures["sigma_token"] == pytest.approx(0.01, rel=0.15)
    assert figures["age_max"] == 0


@pytest.mark.parametrize(
    ("old_logprobs", "learner"),
    [
        ("inference", {}),
        ("recompute", {"zero_stage": 2}),
        ("inference", {"zero_stage": 3}),
        ("inference", {"dtype": "bfloat16", "zero_stage": 1}),
    ],
)
def test_with_a_lag_noise_is_measured_under_the_weights_that_sampled(
    folder: Path, old_logprobs: str, learner: dict[str, Any]
) -> None:
    """The rollouts of version 3 are trained one step late. Their noise of 0.05 is measured apart from that drift,
    and the trained weights do not change for it."""
    config = make_config(folder, algorithm={**GSPO, "old_logprobs": old_logprobs}, learner=learner)
    steps = {step: make_rows(folder, step=step, noise=0.05) for step in (4, 5)}
    lagging, fresh = Trainer(config, folder), Trainer(config, folder)
    first = train(lagging, 4, with_version(steps[4], 2)).metrics
    assert not {"sigma_token", "sigma_sequence", "noise_share", "noise_share_independent"} & first.keys()
    assert (first["age_mean"], first["age_max"]) == (1, 1)
    second = train(lagging, 5, with_version(steps[5], 3)).metrics
    assert second["sigma_token"] == pytest.approx(0.05, rel=0.2)
    assert 0 < second["mismatch_tokens"] <= 16 * 40
    train(fresh, 4, steps[4])
    drifted = train(fresh, 5, steps[5]).metrics
    assert drifted["sigma_token"] > 2 * second["sigma_token"]
    assert digest(lagging) == digest(fresh)


@pytest.mark.parametrize(("every", "measured"), [(0, []), (1, [5, 7, 9]), (3, [5, 9])])
def test_the_probe_has_a_period_and_a_switch_and_changes_no_weight(
    folder: Path, every: int, measured: list[int]
) -> None:
    """A probe keeps the weights in one step and measures in the next; in step 10 some tokens need none."""
    trainer = Trainer(make_config(folder, algorithm=GSPO, learner={"mismatch_every": every}), folder)
    rows = {step: with_version(make_rows(folder, step=step), step - 2) for step in range(4, 10)}
    results = {step: train(trainer, step, rows[step]) for step in rows}
    assert [step for step, result in results.items() if "sigma_token" in result.metrics] == measured
    assert trainer._probe._kept == [], "weights are kept after the measurement"
    assert all((result.probe_s > 0.001) == (step in measured) for step, result in results.items() if step % 2)
    fresh = train(trainer, 10, make_rows(folder, step=10))
    assert "sigma_token" in fresh.metrics
    without = Trainer(make_config(folder, algorithm=GSPO, learner={"mismatch_every": 0}), folder)
    for step in rows:
        train(without, step, rows[step])
    train(without, 10, make_rows(folder, step=10))
    assert digest(without) == digest(trainer)


def test_recompute_takes_the_step_s_first_weights_as_old(folder: Path) -> None:
    """With one mini-batch and no update before, every ratio is 1: the behavior noise is gone from it."""
    config = make_config(folder, algorithm={**GSPO, "old_logprobs": "recompute", "num_mini_batches": 1})
    figures = train(Trainer(config, folder), 1, make_rows(folder, num_mini_batches=1, noise=0.3)).metrics
    assert abs(figures["log_ratio_max"]) < 1e-6
    assert figures["sigma_token"] == pytest.approx(0.3, rel=0.15)


def test_masked_by_the_correction_means_absent(folder: Path) -> None:
    """Behavior that is off by e^3 puts a sequence outside the bounds; the rest is what trains."""
    rows = make_rows(folder, noise=0.0)
    off = [replace(row, logp=row.logp - 3 * row.mask) if row.number == 0 else row for row in rows]
    algorithm = {**GSPO, "old_logprobs": "recompute", "behavior_correction": "mask"}
    masked = Trainer(make_config(folder, algorithm=algorithm), folder)
    train(masked, 1, off)
    without = Trainer(make_config(folder, algorithm={**GSPO, "old_logprobs": "recompute"}), folder)
    train(without, 1, [replace(row, skipped="stale", mini_batch=-1) if row.number == 0 else row for row in rows])
    assert_same_weights(masked, without.engine.policy())


def test_a_token_masked_by_the_correction_is_absent_too(folder: Path) -> None:
    """Behavior that is off by e^3 at each answer's first token puts these out; an answer of one token leaves N."""
    rows = make_rows(folder, noise=0.0)
    first = [np.arange(len(row.mask)) == 0 for row in rows]
    off = [replace(row, logp=row.logp - 3 * at) for row, at in zip(rows, first, strict=True)]
    recompute = {**GSPO, "old_logprobs": "recompute"}
    algorithm = {**recompute, "behavior_correction": "mask", "behavior_level": "token"}
    masked = Trainer(make_config(folder, algorithm=algorithm), folder)
    figures = train(masked, 1, off).metrics
    without = Trainer(make_config(folder, algorithm=recompute), folder)
    expected = train(
        without, 1, [replace(row, mask=row.mask & ~at) for row, at in zip(rows, first, strict=True)]
    ).metrics
    assert_same_weights(masked, without.engine.policy(), tolerance=1e-4)
    assert (figures["tokens"], figures["sequences"]) == (expected["tokens"], expected["sequences"])
    assert figures["skipped_tokens_behavior"] == len(rows)
    assert figures["behavior_outside"] == pytest.approx(len(rows) / (len(rows) + figures["tokens"]))


def test_bfloat16_is_near_float32(folder: Path) -> None:
    rows = make_rows(folder)
    metrics_of = [
        train(Trainer(make_config(folder, algorithm=GSPO, learner={"dtype": dtype}), folder), 1, rows).metrics
        for dtype in ("float32", "bfloat16")
    ]
    assert metrics_of[1]["grad_norm"] == pytest.approx(metrics_of[0]["grad_norm"], rel=0.05)
    assert metrics_of[1]["entropy"] != metrics_of[0]["entropy"]


def test_under_bfloat16_no_rounded_copy_of_a_weight_outlives_its_product(folder: Path) -> None:
    """autocast's cache would hold one of every weight until the forward ends, also under gradient checkpointing."""
    kept = []
    model = load_policy_model(folder, make_config(folder, learner={"dtype": "bfloat16"}))
    last = model.causal_lm.base_model.layers[-1]
    last.register_forward_pre_hook(lambda *_: kept.append(torch.is_autocast_cache_enabled()))
    token_RS = torch.arange(8)[None]
    model(token_RS, None, torch.arange(7), token_RS[0, 1:])
    assert kept == [False]


def test_gradient_checkpointing_changes_nothing(folder: Path) -> None:
    rows = make_rows(folder)
    trainers = []
    for checkpointing in (False, True):
        config = make_config(folder, algorithm=GSPO, learner={"gradient_checkpointing": checkpointing})
        trainers.append(Trainer(config, folder))
        train(trainers[-1], 1, rows)
    assert_same_weights(trainers[0], trainers[1].engine.policy())


@pytest.mark.parametrize(
    ("dtype", "device", "precision"),
    [("float32", "cuda", "highest"), ("bfloat16", "cuda", "high"), ("bfloat16", "cpu", "highest")],
)
def test_only_bfloat16_on_a_gpu_rounds_what_is_left_of_float32(
    folder: Path, dtype: str, device: str, precision: str
) -> None:
    before = torch.get_float32_matmul_precision()
    try:
        _allow_tf32(make_config(folder, learner={"dtype": dtype}), torch.device(device), [])
        assert torch.get_float32_matmul_precision() == precision
    finally:
        torch.set_float32_matmul_precision(before)


def test_positions_are_never_rounded_to_tf32(folder: Path) -> None:
    """Some architectures multiply positions by frequencies as matrices, and TF32 rounds whole numbers above 2,048."""
    before = torch.get_float32_matmul_precision()
    seen: list[str] = []
    config = make_config(folder, learner={"dtype": "bfloat16"})
    model = load_policy_model(folder, config)
    (rotary,) = (module for module in model.modules() if type(module).__name__ == "Qwen3RotaryEmbedding")
    angles = rotary.forward

    def noted(*inputs: Any) -> Any:
        seen.append(torch.get_float32_matmul_precision())
        return angles(*inputs)

    rotary.forward = noted
    try:
        _allow_tf32(config, torch.device("cuda"), [model, None])
        model.causal_lm(input_ids=torch.ones(1, 4, dtype=torch.long))
        assert (seen, torch.get_float32_matmul_precision()) == (["highest"], "high")
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.long
def test_compiled_layers_make_the_same_steps(folder: Path) -> None:
    """Steps of several shapes. The old log-probs come from passes without gradients, and the first ratio is near 1."""
    results = []
    for learner in ({}, {"torch_compile": True}, {"torch_compile": True, "gradient_checkpointing": True}):
        config = make_config(folder, algorithm={**GSPO, "old_logprobs": "recompute"}, learner=learner)
        trainer = Trainer(config, folder)
        rows = make_rows(folder)
        steps = [train(trainer, 1, rows).metrics, train(trainer, 2, with_version(rows[:5], 1)).metrics]
        results.append((steps, trainer.engine.policy()))
    (plain, weights), *compiled = results
    for steps, own in compiled:
        for expected, figures in zip(plain, steps, strict=True):
            assert figures == pytest.approx(expected, rel=1e-3, abs=1e-5)
            assert figures["log_ratio_std_at_start"] < 1e-6
        assert all((own[name] - weight).norm() <= 1e-4 * weight.norm() for name, weight in weights.items())
