"""Advantages and losses of a run: the one place where its algorithm keys become the arguments of gspo_core.

The formulas are in gspo_core.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gspo.common.config.algorithm import AlgorithmConfig
from gspo.learner.model.batch import MicroBatch, StepBatch
from gspo_core.advantage import token_advantages
from gspo_core.correction import behavior_stats, behavior_weights
from gspo_core.kl import kl_divergence
from gspo_core.loss import aggregate_loss, policy_loss
from gspo_core.stats import Stats, mean_stats


@dataclass(frozen=True)
class StepTargets:
    """The values that a step's log-probs are compared with. All [B, T].

    Attributes:
        old_BT: Denominator of the ratio.
        reference_BT: Log-probs of the first policy; None if the algorithm does not need them.
        mask_BT: The tokens that count, without those that the behavior correction excludes.
        stats: Of that correction, over the whole step; empty without one.
    """

    old_BT: Tensor
    reference_BT: Tensor | None
    advantage_BT: Tensor
    mask_BT: Tensor
    stats: Stats


def step_targets(
    algorithm: AlgorithmConfig, batch: StepBatch, old_BT: Tensor, reference_BT: Tensor | None
) -> StepTargets:
    """Correct for stale behavior, penalise by KL, and place the advantages, over the whole step."""
    kind, level = algorithm.behavior_correction, algorithm.behavior_level
    compared = old_BT, batch.behavior_BT, batch.mask_BT
    # Truncation only caps: a lower bound would raise the weight of tokens that the policy has moved away from.
    lowest = algorithm.behavior_low if kind == "mask" else 0.0
    bounds = None if kind == "none" else (lowest, algorithm.behavior_high)
    weight_BT, keep_BT = behavior_weights(*compared, behavior_correction=kind, behavior_level=level, bounds=bounds)
    stats = {} if bounds is None else behavior_stats(*compared, behavior_level=level, bounds=bounds)
    mask_BT = batch.mask_BT & keep_BT
    penalty_BT = None
    if algorithm.add_token_level_kl and reference_BT is not None:
        penalty_BT = algorithm.kl_coef * kl_divergence(old_BT, reference_BT, "k1")
    advantage_BT = token_advantages(
        torch.tensor([row.advantage for row in batch.rows], dtype=torch.float64),
        mask_BT,
        token_penalty_BT=penalty_BT,
        gamma=algorithm.gamma,
        whiten_advantages=algorithm.whiten_advantages,
        advantage_clip=algorithm.advantage_clip,
    )
    return StepTargets(old_BT, reference_BT, (advantage_BT * weight_BT).float(), mask_BT, stats)


def has_gradient(algorithm: AlgorithmConfig, targets: StepTargets) -> Tensor:
    """The rollouts with a gradient, Bool [B]: without an advantage only a KL term has one."""
    if algorithm.use_kl_loss and algorithm.kl_loss_coef:
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
) -> tuple[Tensor, Stats]:
    """The clipped objective, and the KL term where it is asked for. N and M count the whole optimizer step.

    Loss and stats add up over the micro-batches and ranks of the step.
    """
    mask_RT = micro.take_mask(targets.mask_BT)
    low, high = algorithm.clip
    sizes: dict[str, Any] = {
        "loss_agg_mode": algorithm.loss_agg_mode,
        "num_sequences": num_sequences,
        "num_tokens": num_tokens,
        "max_response_length": algorithm.response_length,
    }
    policy = policy_loss(
        logp_RT,
        micro.take(targets.old_BT),
        micro.take(targets.advantage_BT),
        mask_RT,
        importance_sampling=algorithm.importance_sampling,
        pg_clip_low=low,
        pg_clip_high=high,
        dual_clip=algorithm.dual_clip,
        **sizes,
    )
    loss, stats = policy.loss, {**policy.stats, **mean_stats("entropy", entropy_RT, mask_RT)}
    if targets.reference_BT is not None:
        kl_RT = kl_divergence(logp_RT, micro.take(targets.reference_BT), algorithm.kl_kind)
        stats |= mean_stats("reference_kl", kl_RT, mask_RT)
        if algorithm.use_kl_loss:
            loss = loss + algorithm.kl_loss_coef * aggregate_loss(kl_RT, mask_RT, **sizes)
    return loss, stats
