"""Advantages and losses of a run: the one place where its algorithm keys become the arguments of gspo_core.

The formulas are in gspo_core.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from gspo.common.config.algorithm import AlgorithmConfig
from gspo.learner.model.batch import MicroBatch, StepBatch
from gspo.learner.objective.own_loss import LossBatch, OwnLoss
from gspo.learner.objective.teacher_kl import TeacherKl
from gspo_core.advantage import token_advantages
from gspo_core.correction import behavior_stats, behavior_weights
from gspo_core.kl import kl_divergence
from gspo_core.loss import aggregate_loss, policy_stats, ratio_stats
from gspo_core.stats import Stats, mean_stats
from gspo_core.token_losses import SampledTokens, TokenLoss, cispo_loss, clip_loss, dppo_loss


@dataclass(frozen=True)
class StepTargets:
    """The values that a step's log-probs are compared with. All [B, T].

    Attributes:
        old_BT: Denominator of the ratio.
        reference_BT: Log-probs of the first policy; None if the algorithm does not need them.
        mask_BT: The tokens that count, without those that the behavior correction excludes.
        turns_B: The turns of each rollout, 1 unless it is a conversation. [B]
        stats: Of that correction, over the whole step; empty without one.
        branch_BT: As in the batch.
        teacher: The teacher's log-probs; None without one.
    """

    old_BT: Tensor
    reference_BT: Tensor | None
    advantage_BT: Tensor
    mask_BT: Tensor
    turns_B: Tensor
    stats: Stats
    branch_BT: Tensor | None
    teacher: TeacherKl | None = None


def step_targets(
    algorithm: AlgorithmConfig,
    batch: StepBatch,
    old_BT: Tensor,
    reference_BT: Tensor | None,
    teacher: TeacherKl | None = None,
) -> StepTargets:
    """Correct for stale behavior, penalise by KL, and place the advantages, over the whole step."""
    # Under `inference` old is behavior: there each update's own log-probs are compared (_without_outliers).
    is_compared = algorithm.old_logprobs == "recompute"
    kind, level = algorithm.behavior_correction if is_compared else "none", algorithm.behavior_level
    compared = old_BT, batch.behavior_BT, batch.mask_BT
    bounds = algorithm.behavior_bounds if is_compared else None
    weight_BT, keep_BT = behavior_weights(*compared, behavior_correction=kind, behavior_level=level, bounds=bounds)
    stats = {} if bounds is None else behavior_stats(*compared, behavior_level=level, bounds=bounds)
    mask_BT = batch.mask_BT & keep_BT
    penalties = []
    if algorithm.add_token_level_kl and reference_BT is not None:
        penalties.append(algorithm.kl_coef * kl_divergence(old_BT, reference_BT, "k1"))
    if teacher is not None and not teacher.is_loss:
        penalties.append(teacher.penalty_BT(old_BT))
    advantage_BT = token_advantages(
        torch.tensor([row.advantage for row in batch.rows], dtype=torch.float64),
        mask_BT,
        token_penalty_BT=torch.stack(penalties).sum(0) if penalties else None,
        gamma=algorithm.gamma,
        whiten_advantages=algorithm.whiten_advantages,
        advantage_clip=algorithm.advantage_clip,
    )
    turns_B = torch.tensor([row.num_turns for row in batch.rows], dtype=torch.long)
    weighted_BT = (advantage_BT * weight_BT).float()
    return StepTargets(old_BT, reference_BT, weighted_BT, mask_BT, turns_B, stats, batch.branch_BT, teacher)


def has_gradient(algorithm: AlgorithmConfig, targets: StepTargets) -> Tensor:
    """The rollouts with a gradient, Bool [B]: without an advantage only a KL term or an entropy bonus has one.

    A loss of the user's own may have one for an advantage of 0 too, so all rollouts that count are in it.
    """
    has_loss_beside = algorithm.has_own_loss or (targets.teacher is not None and targets.teacher.is_loss)
    if has_loss_beside or algorithm.entropy_coef or (algorithm.use_kl_loss and algorithm.kl_loss_coef):
        return targets.mask_BT.any(-1)
    return (targets.mask_BT & (targets.advantage_BT != 0)).any(-1)


def micro_batch_loss(
    algorithm: AlgorithmConfig,
    micro: MicroBatch,
    logp_RT: Tensor,
    entropy_RT: Tensor,
    targets: StepTargets,
    *,
    num_sequences: int,
    num_tokens: int,
    num_turns: int,
    own_loss: OwnLoss | None = None,
) -> tuple[Tensor, Stats]:
    """The policy's loss, with KL terms and an entropy bonus if the keys ask for them.

    Loss and stats add up over the micro-batches and ranks of the optimizer step, which N, M and K count.

    Args:
        entropy_RT: Of the policy's distribution at each token; with a gradient if there is a bonus.
        own_loss: In place of the keys' objective.

    Raises:
        InputError: The user's own loss raised, or returned no losses.
    """
    mask_RT = micro.take_mask(targets.mask_BT)
    aggregate = partial(
        aggregate_loss,
        mask_BT=mask_RT,
        loss_agg_mode=algorithm.loss_agg_mode,
        num_sequences=num_sequences,
        num_tokens=num_tokens,
        max_response_length=algorithm.response_length,
        turns_B=targets.turns_B[micro.row_R].to(mask_RT.device),
        num_turns=num_turns,
    )
    old_RT, advantage_RT = micro.take(targets.old_BT), micro.take(targets.advantage_BT)
    advantage_RT, mask_stats = _without_outliers(algorithm, logp_RT, old_RT, advantage_RT, mask_RT)
    reference_RT = None if targets.reference_BT is None else micro.take(targets.reference_BT)
    branch_RT = None if targets.branch_BT is None else micro.take(targets.branch_BT)
    tokens = SampledTokens.of(logp_RT, old_RT, advantage_RT, mask_RT, branch_RT)
    if own_loss is None:
        of_tokens = _keys_loss(algorithm, tokens)
        loss, stats = aggregate(of_tokens.l_BT), policy_stats(tokens, of_tokens)
    else:
        inputs = LossBatch(logp_RT, old_RT, advantage_RT, mask_RT, entropy_RT.detach(), reference_RT)
        l_RT, stats = own_loss(inputs.counted())
        loss, stats = aggregate(l_RT), stats | ratio_stats(tokens)
    stats |= {**mask_stats, **mean_stats("entropy", entropy_RT, mask_RT)}
    if algorithm.entropy_coef:
        loss = loss - algorithm.entropy_coef * aggregate(entropy_RT)
    if reference_RT is not None:
        kl_RT = kl_divergence(logp_RT, reference_RT, algorithm.kl_kind)
        stats |= mean_stats("reference_kl", kl_RT, mask_RT)
        if algorithm.use_kl_loss:
            loss = loss + algorithm.kl_loss_coef * aggregate(kl_RT)
    if targets.teacher is not None:
        teacher_RT = micro.take(targets.teacher.logp_BT)
        stats |= mean_stats("teacher_kl", kl_divergence(logp_RT, teacher_RT, "k1"), mask_RT)
        if targets.teacher.is_loss:
            loss = loss + aggregate(targets.teacher.loss_RT(logp_RT, teacher_RT))
    return loss, stats


def _keys_loss(algorithm: AlgorithmConfig, tokens: SampledTokens) -> TokenLoss:
    """The objective of gspo_core that the keys select."""
    if algorithm.bounds_divergence:
        return dppo_loss(tokens, *algorithm.clip, divergence=algorithm.objective)
    if algorithm.objective == "cispo":
        return cispo_loss(tokens, *algorithm.clip, importance_sampling=algorithm.importance_sampling)
    return clip_loss(
        tokens,
        *algorithm.clip,
        importance_sampling=algorithm.importance_sampling,
        dual_clip=algorithm.dual_clip,
        reference_length=algorithm.pg_clip_reference_length,
    )


def _without_outliers(
    algorithm: AlgorithmConfig, logp_RT: Tensor, behavior_RT: Tensor, advantage_RT: Tensor, mask_RT: Tensor
) -> tuple[Tensor, Stats]:
    """Advantages, 0 at tokens that a mask under `old_logprobs: inference` takes out, and the figures of its weights.

    The mask is known only after the forward pass, so its tokens stay in L_i, N and M, as clipped ones do.
    """
    bounds = algorithm.behavior_bounds
    if bounds is None or algorithm.old_logprobs != "inference":
        return advantage_RT, {}
    compared, level = (logp_RT.detach(), behavior_RT, mask_RT), algorithm.behavior_level
    _, keep_RT = behavior_weights(*compared, behavior_correction="mask", behavior_level=level, bounds=bounds)
    stats = behavior_stats(*compared, behavior_level=level, bounds=bounds)
    return torch.where(keep_RT, advantage_RT, 0.0), stats
