"""That every key of the algorithm reaches the loss: step and micro-batches against the formulas in plain NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from gspo.common.config.algorithm import AlgorithmConfig
from gspo.common.config.teacher import TeacherConfig
from gspo.learner.model.batch import StepBatch, rank_micro_batches
from gspo.learner.objective.objective import OLD, REFERENCE, TEACHER, Objective, StepTargets
from tests.support.training.numpy_reference import (
    advantages,
    behavior_weight,
    kl,
    loss_and_gradient,
    token_weights,
)
from tests.support.training.rollout_rows import row_of
from tests.support.typed.gradients import backward

RESPONSE_LENGTH = 32
REINFORCE = {"adv_estimator": "reinforce", "reward_norm": "batch"}
RECOMPUTE = {"old_logprobs": "recompute", "behavior_high": 1.05}
CASES: list[dict[str, Any]] = [
    {},
    {"preset": "grpo"},
    {"importance_sampling": "seq_token"},
    {"loss_agg_mode": "seq-mean-token-sum"},
    {"loss_agg_mode": "seq-mean-token-sum-norm"},
    {"loss_agg_mode": "token-mean"},
    {"loss_agg_mode": "seq-mean-token-sum-turn-norm"},
    {
        "loss_agg_mode": "seq-mean-token-sum-turn-norm",
        "importance_sampling": "token",
        "use_kl_loss": True,
        "kl_loss_coef": 0.2,
    },
    {"loss_agg_mode": "seq-mean-turn-mean-token-mean"},
    {"loss_agg_mode": "seq-mean-turn-mean-token-mean", "ratio_of": "branch", "use_kl_loss": True, "kl_loss_coef": 0.2},
    {"pg_clip": 0.05},
    {"pg_clip": 0.05, "pg_clip_reference_length": 3},
    {"pg_clip": 0.05, "pg_clip_reference_length": 3, "importance_sampling": "seq_token"},
    {"pg_clip": 0.05, "ratio_of": "branch"},
    {"pg_clip": 0.05, "ratio_of": "branch", "importance_sampling": "seq_token", "pg_clip_reference_length": 3},
    {"ratio_of": "branch", "objective": "cispo", "loss_agg_mode": "seq-mean-token-sum-turn-norm"},
    {"importance_sampling": "token", "dual_clip_loss": 1.1},
    {"objective": "cispo"},
    {"objective": "cispo", "importance_sampling": "token", "pg_clip_low": 0.1, "pg_clip_high": 0.1},
    {"objective": "dppo_tv", "importance_sampling": "token", "pg_clip": 0.02},
    {"objective": "dppo_kl", "importance_sampling": "token", "pg_clip": 0.002},
    {**REINFORCE, "gamma": 0.9},
    {**REINFORCE, "whiten_advantages": True},
    {**REINFORCE, "advantage_clip": 0.5},
    {**REINFORCE, "add_token_level_kl": True, "kl_coef": 0.3},
    *({"use_kl_loss": True, "kl_loss_coef": 0.2, "kl_kind": kind} for kind in ("k1", "k2", "k3")),
    {"use_kl_loss": True, "kl_loss_coef": 0.2, "loss_agg_mode": "token-mean"},
    {**RECOMPUTE, "behavior_correction": "truncate"},
    {**REINFORCE, **RECOMPUTE, "behavior_correction": "truncate", "advantage_clip": 0.5},
    {**RECOMPUTE, "behavior_correction": "mask", "behavior_low": 0.95},
    {**RECOMPUTE, "behavior_correction": "mask", "behavior_low": 0.9, "behavior_level": "token"},
    {**RECOMPUTE, "behavior_correction": "mask", "behavior_low": 0.9, "behavior_level": "product"},
    {**RECOMPUTE, "behavior_correction": "truncate", "behavior_low": 0.9, "behavior_level": "product"},
    {"behavior_correction": "mask", "behavior_low": 0.95, "behavior_high": 1.05},
    {"behavior_correction": "mask", "behavior_low": 0.8, "behavior_high": 1.2, "behavior_level": "token"},
    {"behavior_correction": "mask", "behavior_low": 0.8, "behavior_high": 1.2, "behavior_level": "product"},
]


def random_batch(rng: np.random.Generator, *, by_branch: bool = False) -> StepBatch:
    """Twelve conversations of 1 to 9 tokens, some with a token that is not the policy's, long ones in two branches."""
    rows = []
    for number in range(12):
        length = int(rng.integers(1, 10))
        mask = np.arange(length) != 2
        starts = [4] if length > 5 and number % 2 else []
        mask[starts] = False
        rows.append(
            row_of(
                step=1,
                group=number // 4,
                number=number % 4,
                prompt_token_ids=np.array([5, 6], dtype=np.int32),
                token_ids=rng.integers(3, 90, length).astype(np.int32),
                mask=mask,
                version=np.where(mask, 0, -1).astype(np.int32),
                logp=rng.normal(-1.5, 0.3, length).astype(np.float32),
                advantage=float(rng.normal()) if number else 0.0,
                reward=0.0,
                mini_batch=0,
                temperature=1.0,
                num_turns=1 + number % 3,
                branch_starts=np.array(starts, dtype=np.int32),
            )
        )
    assert any(len(row.branch_starts) for row in rows)
    return StepBatch.from_rows(rows, by_branch=by_branch)


@pytest.mark.parametrize("keys", CASES, ids=str)
def test_loss_and_gradient_are_those_of_the_formulas_with_these_keys(keys: dict[str, Any]) -> None:
    rng = np.random.default_rng(0)
    values = {"response_length": RESPONSE_LENGTH, "rollout_batch_size": 3, "num_return_sequences_in_group": 4, **keys}
    algorithm = AlgorithmConfig.model_validate(values)
    batch = random_batch(rng, by_branch=algorithm.ratio_of == "branch")
    behavior, mask = batch.behavior_BT.double().numpy(), batch.mask_BT.numpy()
    # Weights that are truncated are below the default of the lower bound too.
    drift = 1.0 if algorithm.behavior_correction == "truncate" else 0.1
    old = behavior + (rng.normal(0, drift, mask.shape) if "old_logprobs" in keys else 0)
    logp, ref = (values + rng.normal(0, 0.2, mask.shape) for values in (old, old))

    loss, gradient, targets = in_parts(algorithm, batch, logp, old, ref if algorithm.needs_reference else None)
    expected, slope, kept = by_the_formulas(algorithm, batch, logp, old, ref)
    assert (targets.mask_BT.numpy() == kept).all()
    assert float(loss) == pytest.approx(expected, rel=1e-5, abs=1e-7)
    assert np.abs(gradient - slope)[kept].max() < 1e-6
    assert not gradient[~kept].any()
    # The rollouts without a backward pass are exactly those that have no gradient but for the clip.
    moves = (slope != 0).any(1)
    assert not (moves & ~targets.moving_B.numpy()).any()


@pytest.mark.parametrize("mode", ["seq-mean-token-mean", "token-mean"])
def test_the_entropy_bonus_is_aggregated_like_the_loss_and_lifts_every_counted_token(mode: str) -> None:
    rng = np.random.default_rng(0)
    batch = random_batch(rng)
    entropy_BT = torch.tensor(rng.exponential(size=batch.mask_BT.shape), requires_grad=True)
    each = token_weights(batch.mask_BT.numpy(), mode, RESPONSE_LENGTH)
    losses = {}
    for coef in (0.0, 0.3):
        algorithm = AlgorithmConfig.model_validate({"entropy_coef": coef, "loss_agg_mode": mode})
        objective = objective_of(algorithm)
        targets = objective.targets(batch, {})
        assert bool(targets.moving_B.all()) == (coef > 0)  # one advantage is 0
        (micro,) = rank_micro_batches(batch, range(len(batch)), 1000, rank=0, num_ranks=1, packing=True)
        sizes = {"num_sequences": len(batch), "num_tokens": int(batch.mask_BT.sum()), "num_turns": len(batch)}
        logp_RT, entropy_RT = micro.take(batch.behavior_BT), micro.take(entropy_BT)
        losses[coef], _ = objective.loss(micro, logp_RT, entropy_RT, targets, sizes)
    assert not losses[0.0].requires_grad
    expected = -0.3 * (each * entropy_BT.detach().numpy()).sum()
    assert float((losses[0.3] - losses[0.0]).detach()) == pytest.approx(expected, rel=1e-5)
    backward(losses[0.3])
    assert entropy_BT.grad is not None
    np.testing.assert_allclose(entropy_BT.grad.numpy(), -0.3 * each, rtol=1e-6, atol=0)


def test_the_penalties_of_reference_and_teacher_add_up() -> None:
    rng = np.random.default_rng(0)
    batch = random_batch(rng)
    old, ref, taught = (rng.normal(-1.5, 0.3, batch.mask_BT.shape) for _ in range(3))
    algorithm = AlgorithmConfig.model_validate({**REINFORCE, "add_token_level_kl": True, "kl_coef": 0.3})
    objective = Objective(algorithm, TeacherConfig(path="larger", coef=0.5))
    columns = {OLD: old, REFERENCE: ref, TEACHER: taught}
    targets = objective.targets(batch, {name: torch.tensor(logp) for name, logp in columns.items()})
    penalty = 0.3 * (old - ref) + 0.5 * (old - taught)
    rewards = np.array([row.advantage for row in batch.rows])
    expected = advantages(rewards, batch.mask_BT.numpy(), penalty, gamma=1.0, whiten=False, clip=None)
    np.testing.assert_allclose(targets.advantage_BT.numpy(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("discount", [0.0, 0.5, 1.0])
def test_the_kl_to_a_teacher_has_a_discount_of_its_own(discount: float) -> None:
    """Rewards keep gamma, here 0.9."""
    rng = np.random.default_rng(0)
    batch = random_batch(rng)
    algorithm = AlgorithmConfig.model_validate({**REINFORCE, "gamma": 0.9})
    old, taught = (rng.normal(-1.5, 0.3, batch.mask_BT.shape) for _ in range(2))
    objective = Objective(algorithm, TeacherConfig(path="larger", coef=0.5, kl_discount=discount))
    targets = objective.targets(batch, {OLD: torch.tensor(old), TEACHER: torch.tensor(taught)})
    mask, rewards = batch.mask_BT.numpy(), np.array([row.advantage for row in batch.rows])
    ours = advantages(rewards, mask, np.zeros(mask.shape), gamma=0.9, whiten=False, clip=None)
    theirs = advantages(0 * rewards, mask, 0.5 * (old - taught), gamma=discount, whiten=False, clip=None)
    np.testing.assert_allclose(targets.advantage_BT.numpy(), ours + theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("discount", [0.0, 1.0])
def test_the_gradient_of_distillation_is_that_of_the_kl_it_names(discount: float) -> None:
    """A policy of three tokens and two positions, whose nine answers count by their probability.

    Discount 0 is the KL at each position, over the policy's own prefixes (Thinking Machines). Discount 1 is that of
    whole answers (MiniLLM): the first token answers for the second one's KL too.
    """
    torch.manual_seed(0)
    first_V, second_VV = torch.randn(3, dtype=torch.float64), torch.randn(3, 3, dtype=torch.float64)
    logits = [first_V.requires_grad_(), second_VV.requires_grad_()]
    p1_V, p2_VV = first_V.log_softmax(-1), second_VV.log_softmax(-1)
    t1_V, t2_VV = (torch.randn(shape, dtype=torch.float64).log_softmax(-1) for shape in ((3,), (3, 3)))
    answers = [(a, b) for a in range(3) for b in range(3)]
    logp_BT, taught_BT = (torch.stack([torch.stack([x[a], y[a, b]]) for a, b in answers])
                          for x, y in ((p1_V, p2_VV), (t1_V, t2_VV)))  # fmt: skip
    old_BT = logp_BT.detach()
    fields: dict[str, Any] = {
        "step": 1,
        "group": 0,
        "mini_batch": 0,
        "temperature": 1.0,
        "advantage": 0.0,
        "reward": 0.0,
    }
    fields |= {"prompt_token_ids": np.array([5], np.int32), "mask": np.ones(2, bool), "version": np.zeros(2, np.int32)}
    rows = [
        row_of(number=i, token_ids=np.array(answer, np.int32), logp=old_BT[i].numpy(), **fields)
        for i, answer in enumerate(answers)
    ]
    teacher = TeacherConfig(path="larger", kl_discount=discount)
    keys = {"importance_sampling": "token", "loss_agg_mode": "seq-mean-token-sum"}
    targets = Objective(AlgorithmConfig.model_validate(keys), teacher).targets(
        StepBatch.from_rows(rows), {OLD: old_BT, TEACHER: taught_BT}
    )
    probability_B = old_BT.sum(-1).exp()
    ratio_BT = (logp_BT - old_BT).exp()
    ours = torch.autograd.grad(
        -(probability_B[:, None] * ratio_BT * targets.advantage_BT).sum(), logits, retain_graph=True
    )
    at_second_V = (p2_VV.exp() * (p2_VV - t2_VV)).sum(-1)
    weight_V = p1_V.exp() if discount else p1_V.exp().detach()
    whole = (p1_V.exp() * (p1_V - t1_V)).sum() + (weight_V * at_second_V).sum()
    torch.testing.assert_close(ours, torch.autograd.grad(whole, logits), rtol=1e-5, atol=1e-7)


def objective_of(algorithm: AlgorithmConfig) -> Objective:
    return Objective(algorithm, TeacherConfig())


def in_parts(
    algorithm: AlgorithmConfig, batch: StepBatch, logp: Any, old: Any, ref: Any
) -> tuple[torch.Tensor, Any, StepTargets]:
    """Loss, gradient and targets as the learner makes them, in micro-batches of a few rollouts."""
    logp_BT = torch.tensor(logp, requires_grad=True)
    objective = objective_of(algorithm)
    columns = {OLD: torch.tensor(old)} | ({} if ref is None else {REFERENCE: torch.tensor(ref)})
    targets = objective.targets(batch, columns)
    sizes = targets.sizes(torch.ones(len(batch), dtype=torch.bool))
    total = torch.zeros((), dtype=torch.float64)
    for micro in rank_micro_batches(batch, range(len(batch)), 24, rank=0, num_ranks=1, packing=True):
        logp_RT = micro.take(logp_BT)
        part, _ = objective.loss(micro, logp_RT, torch.zeros_like(logp_RT), targets, sizes)
        total = total + part
    backward(total)
    assert logp_BT.grad is not None
    return total.detach(), logp_BT.grad.numpy(), targets


def branch_numbers(batch: StepBatch) -> Any:
    """[B, T]: the branch of each token, of which a rollout has one or two."""
    places = np.arange(batch.mask_BT.shape[1])
    return np.array([(places >= row.branch_starts[0]) if len(row.branch_starts) else 0 * places for row in batch.rows])


def turn_numbers(batch: StepBatch) -> Any:
    """[B, T]: the turn of each token: one more behind every token that is not the policy's, and in a new branch."""
    num_before = np.cumsum([[not it for it in mask] for mask in batch.mask_BT.tolist()], axis=1)
    return 2 * num_before + branch_numbers(batch)


def by_the_formulas(
    algorithm: AlgorithmConfig, batch: StepBatch, logp: Any, old: Any, ref: Any
) -> tuple[float, Any, Any]:
    """Loss, gradient in logp, and the mask after the correction."""
    kept, mask = batch.mask_BT.numpy().copy(), batch.mask_BT.numpy()
    weight, (least, most) = np.ones(kept.shape), algorithm.behavior_bounds or (0.0, np.inf)
    if algorithm.behavior_correction != "none" and algorithm.old_logprobs == "inference":
        present = behavior_weight(logp, old, mask, algorithm.behavior_level)
        weight = ((present >= least) & (present <= most)).astype(float)
        assert 0 < weight[kept].mean() < 1, "nothing or everything is masked: the case shows nothing"
    elif algorithm.behavior_correction != "none":
        weight = behavior_weight(old, batch.behavior_BT.double().numpy(), mask, algorithm.behavior_level)
        inside = (weight >= least) & (weight <= most)
        if algorithm.behavior_correction == "mask":
            assert (kept & ~inside).any(), "nothing is masked: the case shows nothing"
            kept &= inside
        else:
            assert (weight[mask] < 0.9).any() and (weight[mask] > most).any()
            weight = np.clip(weight, least, most)
    penalty = algorithm.kl_coef * kl(old, ref, "k1") if algorithm.add_token_level_kl else np.zeros(kept.shape)
    row_advantages = np.array([row.advantage for row in batch.rows])
    advantage = advantages(
        row_advantages, kept, penalty, algorithm.gamma, algorithm.whiten_advantages, algorithm.advantage_clip
    )
    turns, turn = [row.num_turns for row in batch.rows], turn_numbers(batch)
    low, high = algorithm.clip
    loss, gradient = loss_and_gradient(
        logp,
        old,
        advantage * weight * kept,
        kept,
        algorithm.importance_sampling,
        low,
        high,
        algorithm.dual_clip,
        algorithm.loss_agg_mode,
        RESPONSE_LENGTH,
        algorithm.objective,
        algorithm.pg_clip_reference_length,
        branch_numbers(batch) if algorithm.ratio_of == "branch" else None,
        turns=turns,
        turn=turn,
    )
    if algorithm.use_kl_loss:
        d, each = ref - logp, token_weights(kept, algorithm.loss_agg_mode, RESPONSE_LENGTH, turns=turns, turn=turn)
        slope = {"k1": np.ones(d.shape), "k2": -d, "k3": 1 - np.exp(d)}[algorithm.kl_kind]
        loss += float((algorithm.kl_loss_coef * kl(logp, ref, algorithm.kl_kind) * each)[kept].sum())
        gradient = gradient + algorithm.kl_loss_coef * slope * each
    return loss, gradient, kept
