"""The clipped policy objective of GSPO, GSPO-token and GRPO, in four aggregations, and its stats.

Not here: advantages, log-probs, coefficients, the backward pass. One call may see one micro-batch of a step.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from gspo_core.kl import kl_divergence
from gspo_core.shapes import at_least_float32, check_matrix
from gspo_core.stats import Stats, mean_stats, moment_stats

IMPORTANCE_SAMPLINGS = ("seq", "token", "seq_token")
LOSS_AGG_MODES = ("seq-mean-token-mean", "seq-mean-token-sum", "token-mean", "seq-mean-token-sum-norm")
# exp(60) = 1e26: sums of it over a batch stay finite in float32. No ratio that means anything is near it.
LOG_RATIO_LIMIT = 60.0


class PolicyLoss(NamedTuple):
    """`loss`: 0-dim, to be added up over the step's micro-batches. `stats`: sums for stats.merge and figures.

    clipped_{low,high}_{sequences,tokens}: share where the clip takes the gradient away: low is ratio < 1 - low
        with A < 0, high is ratio > 1 + high with A > 0; a sequence counts when any of its tokens does.
    outside_clip_sequences: share with a ratio outside the clip, whatever A; the one to hold against noise_share.
    dual_clipped_tokens: share cut by the dual clip.
    log_ratio, token_log_ratio: mean, std, max over sequences (log s_i) and over tokens (delta_it).
    k1, k3: KL(old || policy), mean over tokens. advantage: mean, std, max over tokens.
    """

    loss: Tensor
    stats: Stats


def sequence_log_ratio(logp_BT: Tensor, old_logp_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """log s_i = sum_t m_it (logp_it - old_it) / L_i, with the full gradient through the mean.

    All inputs [B, T]; returns [B] in float32 (float64 if an input is); 0 for an empty sequence.
    Source: arXiv 2507.18071, eq. 7. ValueError: shapes that differ.
    """
    check_matrix(logp_BT=logp_BT, old_logp_BT=old_logp_BT, mask_BT=mask_BT)
    return _sequence_mean(_delta(logp_BT, old_logp_BT, mask_BT), mask_BT)


def policy_loss(
    logp_BT: Tensor,
    old_logp_BT: Tensor,
    advantage_BT: Tensor,
    mask_BT: Tensor,
    *,
    importance_sampling: str = "seq",
    pg_clip_low: float = 3e-4,
    pg_clip_high: float = 4e-4,
    dual_clip: float | None = None,
    loss_agg_mode: str = "seq-mean-token-mean",
    num_sequences: float | None = None,
    num_tokens: float | None = None,
    max_response_length: int | None = None,
) -> PolicyLoss:
    """Aggregate of l_it = -min(ratio_it A_it, clip(ratio_it, 1 - pg_clip_low, 1 + pg_clip_high) A_it).

        seq        ratio_it = s_i = exp(sequence_log_ratio)          GSPO
        token      ratio_it = exp(logp_it - old_it)                  GRPO
        seq_token  ratio_it = sg[s_i] pi_it / sg[pi_it]              GSPO-token: value of s_i, gradient per token

    `dual_clip` c > 1: where A < 0, l = min(l, -c A). All tensors [B, T]; gradient in `logp_BT` alone.
    `loss_agg_mode`, `num_sequences`, `num_tokens`, `max_response_length`: see `aggregate_loss`.
    The loss and its gradient are finite for finite inputs: a log-ratio acts within +-60.
    Source: arXiv 2507.18071, eq. 5 and 13. ValueError: shapes, an unknown kind or mode, clip bounds.
    """
    check_matrix(logp_BT=logp_BT, old_logp_BT=old_logp_BT, advantage_BT=advantage_BT, mask_BT=mask_BT)
    _check_clip(pg_clip_low, pg_clip_high, dual_clip)
    delta_BT = _delta(logp_BT, old_logp_BT, mask_BT)
    A_BT = torch.where(mask_BT.bool(), advantage_BT.detach().to(delta_BT.dtype), 0.0)
    log_ratio_BT = _log_ratio(delta_BT, mask_BT, importance_sampling)
    ratio_BT = torch.exp(log_ratio_BT.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
    clipped_BT = ratio_BT.clamp(1 - pg_clip_low, 1 + pg_clip_high)
    l_BT = -torch.minimum(ratio_BT * A_BT, clipped_BT * A_BT)
    if dual_clip is not None:
        l_BT = torch.where(A_BT < 0, torch.minimum(l_BT, -dual_clip * A_BT), l_BT)
    loss = aggregate_loss(
        l_BT,
        mask_BT,
        loss_agg_mode=loss_agg_mode,
        num_sequences=num_sequences,
        num_tokens=num_tokens,
        max_response_length=max_response_length,
    )
    with torch.no_grad():
        stats = _policy_stats(delta_BT, ratio_BT, A_BT, mask_BT, (pg_clip_low, pg_clip_high), dual_clip)
    return PolicyLoss(loss, stats)


def aggregate_loss(
    l_BT: Tensor,
    mask_BT: Tensor,
    *,
    loss_agg_mode: str = "seq-mean-token-mean",
    num_sequences: float | None = None,
    num_tokens: float | None = None,
    max_response_length: int | None = None,
) -> Tensor:
    """One number from per-token losses l (the policy's, or a KL penalty), m the mask, L_i = sum_t m_it.

        seq-mean-token-mean      1/N sum_i 1/L_i sum_t m l
        seq-mean-token-sum       1/N sum_i sum_t m l
        token-mean               1/M sum_it m l
        seq-mean-token-sum-norm  1/N sum_i sum_t m l / T_max

    N = `num_sequences` and M = `num_tokens` count the sequences with L_i > 0 and the tokens of the WHOLE
    optimizer step, over all ranks and micro-batches; None: those of this call. With them, losses of micro-batches
    add up to the step's loss. T_max = `max_response_length`, the configured one. Nothing to count gives 0.
    `l_BT`, `mask_BT` [B, T]; returns 0-dim. ValueError: shapes, unknown mode, no T_max, N or M negative.
    """
    check_matrix(l_BT=l_BT, mask_BT=mask_BT)
    m_BT = mask_BT.bool()
    l_BT = torch.where(m_BT, l_BT, 0.0)
    if loss_agg_mode == "token-mean":
        return l_BT.sum() / _at_least_one("num_tokens", num_tokens, m_BT)
    L_B = m_BT.sum(-1)
    N = _at_least_one("num_sequences", num_sequences, L_B > 0)
    if loss_agg_mode == "seq-mean-token-mean":
        return (l_BT.sum(-1) / L_B.clamp(min=1)).sum() / N
    if loss_agg_mode == "seq-mean-token-sum":
        return l_BT.sum() / N
    if loss_agg_mode == "seq-mean-token-sum-norm":
        if max_response_length is None or max_response_length < 1:
            raise ValueError(
                f"max_response_length is {max_response_length}; seq-mean-token-sum-norm divides by the "
                "configured response length, at least 1"
            )
        return l_BT.sum() / max_response_length / N
    raise ValueError(f"loss_agg_mode is {loss_agg_mode!r}; it must be one of {', '.join(LOSS_AGG_MODES)}")


def _policy_stats(
    delta_BT: Tensor,
    ratio_BT: Tensor,
    A_BT: Tensor,
    mask_BT: Tensor,
    clip: tuple[float, float],
    dual_clip: float | None,
) -> Stats:
    m_BT = mask_BT.bool()
    valid_B = m_BT.any(-1)
    low_BT = m_BT & (ratio_BT < 1 - clip[0])
    high_BT = m_BT & (ratio_BT > 1 + clip[1])
    dual_BT = (A_BT < 0) & (ratio_BT > (math.inf if dual_clip is None else dual_clip))
    clipped_low_BT, clipped_high_BT = low_BT & (A_BT < 0), high_BT & (A_BT > 0)
    k1_BT, k3_BT = (kl_divergence(-delta_BT, torch.zeros_like(delta_BT), kind) for kind in ("k1", "k3"))
    return {
        **mean_stats("clipped_low_sequences", clipped_low_BT.any(-1), valid_B),
        **mean_stats("clipped_high_sequences", clipped_high_BT.any(-1), valid_B),
        **mean_stats("clipped_low_tokens", clipped_low_BT, m_BT),
        **mean_stats("clipped_high_tokens", clipped_high_BT, m_BT),
        **mean_stats("outside_clip_sequences", (low_BT | high_BT).any(-1), valid_B),
        **mean_stats("dual_clipped_tokens", dual_BT, m_BT),
        **moment_stats("log_ratio", _sequence_mean(delta_BT, mask_BT), valid_B),
        **moment_stats("token_log_ratio", delta_BT, m_BT),
        **mean_stats("k1", k1_BT, m_BT),
        **mean_stats("k3", k3_BT, m_BT),
        **moment_stats("advantage", A_BT, m_BT),
    }


def _delta(logp_BT: Tensor, old_logp_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """delta = logp - old, 0 outside the mask: what stands on padding, be it NaN, reaches no loss or gradient."""
    dtype = at_least_float32(logp_BT, old_logp_BT)
    return torch.where(mask_BT.bool(), logp_BT.to(dtype) - old_logp_BT.detach().to(dtype), 0.0)


def _sequence_mean(x_BT: Tensor, mask_BT: Tensor) -> Tensor:
    return x_BT.sum(-1) / mask_BT.bool().sum(-1).clamp(min=1)


def _log_ratio(delta_BT: Tensor, mask_BT: Tensor, importance_sampling: str) -> Tensor:
    if importance_sampling == "token":
        return delta_BT
    log_s_B1 = _sequence_mean(delta_BT, mask_BT)[:, None]
    if importance_sampling == "seq":
        return log_s_B1.expand_as(delta_BT)
    if importance_sampling == "seq_token":
        return log_s_B1.detach() + (delta_BT - delta_BT.detach())
    raise ValueError(
        f"importance_sampling is {importance_sampling!r}; it must be one of {', '.join(IMPORTANCE_SAMPLINGS)}"
    )


def _check_clip(pg_clip_low: float, pg_clip_high: float, dual_clip: float | None) -> None:
    if not 0 <= pg_clip_low <= 1:
        raise ValueError(f"pg_clip_low is {pg_clip_low}; it must be in [0, 1]")
    if not 0 <= pg_clip_high < math.inf:
        raise ValueError(f"pg_clip_high is {pg_clip_high}; it must be finite and at least 0")
    if dual_clip is not None and not 1 < dual_clip < math.inf:
        raise ValueError(f"dual_clip is {dual_clip}; it must be above 1, or None for no dual clip")


def _at_least_one(name: str, step_wide: float | None, counted: Tensor) -> Tensor | float:
    """The divisor: the step's count where it is given, this call's where not; 1 in place of 0, where all is 0."""
    if step_wide is None:
        return counted.sum().clamp(min=1)
    if not 0 <= step_wide < math.inf:
        raise ValueError(f"{name} is {step_wide}; it must be the step's count, finite and at least 0")
    return max(step_wide, 1)
