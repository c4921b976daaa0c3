"""The policy loss: the token losses of an objective added up in one of six ways.

token_losses.py has the objectives and their ratios, figures.py the stats.
Not here: advantages, log-probs, coefficients, the backward pass.
One call may see one micro-batch of a step. The aggregation is of whole rollouts, whose branches weigh alike.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from gspo_core.figures import policy_stats
from gspo_core.shapes import checked_shapes
from gspo_core.stats import Stats
from gspo_core.token_losses import SampledTokens, clip_loss, lengths_of_sequences, means_of_sequences

LOSS_AGG_MODES = (
    "seq-mean-token-mean",
    "seq-mean-token-sum",
    "token-mean",
    "seq-mean-token-sum-norm",
    "seq-mean-token-sum-turn-norm",
    "seq-mean-turn-mean-token-mean",
)


class PolicyLoss(NamedTuple):
    """`loss`: 0-dim, to be added up over the step's micro-batches. `stats`: sums of `policy_stats`."""

    loss: Tensor
    stats: Stats


def sequence_log_ratio(logp_BT: Tensor, old_logp_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """log s_i = sum_t m_it (logp_it - old_it) / L_i, with the full gradient through the mean.

    All inputs [B, T]; returns [B] in float32 (float64 if an input is). An empty sequence has 0.
    Source: arXiv 2507.18071, eq. 7. ValueError: shapes that differ.
    """
    tokens = SampledTokens.of(logp_BT, old_logp_BT, torch.zeros_like(old_logp_BT), mask_BT)
    return means_of_sequences(tokens.delta_BT, mask_BT, None)[:, 0]


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
    """`clip_loss`, aggregated: GSPO with the paper's clip by default.

    All tensors [B, T]; gradient in `logp_BT` alone. The loss and its gradient are finite for finite inputs.
    `loss_agg_mode` and its sizes: see `aggregate_loss`.
    ValueError: as `clip_loss` and `aggregate_loss`, and shapes that differ.
    """
    tokens = SampledTokens.of(logp_BT, old_logp_BT, advantage_BT, mask_BT)
    of_tokens = clip_loss(
        tokens, pg_clip_low, pg_clip_high, importance_sampling=importance_sampling, dual_clip=dual_clip
    )
    loss = aggregate_loss(
        of_tokens.l_BT,
        mask_BT,
        loss_agg_mode=loss_agg_mode,
        num_sequences=num_sequences,
        num_tokens=num_tokens,
        max_response_length=max_response_length,
    )
    return PolicyLoss(loss, policy_stats(tokens, of_tokens))


@checked_shapes
def aggregate_loss(
    l_BT: Tensor,
    mask_BT: Tensor,
    *,
    loss_agg_mode: str = "seq-mean-token-mean",
    num_sequences: float | None = None,
    num_tokens: float | None = None,
    max_response_length: int | None = None,
    turns_B: Tensor | None = None,
    num_turns: float | None = None,
    turn_BT: Tensor | None = None,
) -> Tensor:
    """One number from per-token losses l (the policy's, or a KL penalty), m the mask, L_i = sum_t m_it.

        seq-mean-token-mean      1/N sum_i 1/L_i sum_t m l
        seq-mean-token-sum       1/N sum_i sum_t m l
        token-mean               1/M sum_it m l
        seq-mean-token-sum-norm  1/N sum_i sum_t m l / T_max

        seq-mean-token-sum-turn-norm    1/N sum_i 1/K_i sum_t m l / (M / K)
        seq-mean-turn-mean-token-mean   1/N sum_i 1/K_i sum_k 1/L_ik sum_(t in k) m l

    N = `num_sequences` and M = `num_tokens` count the sequences with L_i > 0 and the tokens of the WHOLE
    optimizer step, over all ranks and micro-batches; None: those of this call. With them, losses of micro-batches
    add up to the step's loss. K = `num_turns` counts the turns of those sequences likewise.
    T_max = `max_response_length`, the configured one. K_i = `turns_B` [B] are the turns of a conversation, at
    least 1; None: 1 each, and then seq-mean-token-sum-turn-norm is token-mean. Nothing to count gives 0.

    In the last mode, k is the turn of a token, `turn_BT` [B, T] from 0, and L_ik counts the tokens of turn k. K_i
    counts the turns in which a token counts. None: one turn, and then it is seq-mean-token-mean.
    `l_BT`, `mask_BT` [B, T]; returns 0-dim. ValueError: shapes, unknown mode, no T_max, a negative count.
    """
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
    if loss_agg_mode == "seq-mean-turn-mean-token-mean":
        turns_B = (lengths_of_sequences(m_BT, turn_BT) > 0).sum(-1)
        return (means_of_sequences(l_BT, m_BT, turn_BT).sum(-1) / turns_B.clamp(min=1)).sum() / N
    if loss_agg_mode == "seq-mean-token-sum-turn-norm":
        if turns_B is None:
            turns_B, num_turns = torch.ones_like(L_B), num_sequences
        M, K = _at_least_one("num_tokens", num_tokens, m_BT), _at_least_one("num_turns", num_turns, turns_B * (L_B > 0))
        return (l_BT.sum(-1) / turns_B.clamp(min=1)).sum() / N / M * K
    raise ValueError(f"loss_agg_mode is {loss_agg_mode!r}; it must be one of {', '.join(LOSS_AGG_MODES)}")


def _at_least_one(name: str, step_wide: float | None, counted: Tensor) -> Tensor | float:
    """The divisor: the step's count where it is given, this call's where not; 1 in place of 0, where all is 0."""
    if step_wide is None:
        return counted.sum().clamp(min=1)
    if not 0 <= step_wide < math.inf:
        raise ValueError(f"{name} is {step_wide}; it must be the step's count, finite and at least 0")
    return max(step_wide, 1)
