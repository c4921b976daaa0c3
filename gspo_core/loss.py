"""The policy loss: three ratios, the objectives of token_losses.py on them, five aggregations, and its stats.

Not here: advantages, log-probs, coefficients, the backward pass. One call may see one micro-batch of a step.

    clip     l_it = -min(ratio_it A_it, clipped_it A_it)
    cispo    l_it = -sg[clipped_it] A_it logp_it
    dppo_tv, dppo_kl    l_it = -ratio_it A_it, or 0

    clipped_it = clip(ratio_it, 1 - pg_clip_low, 1 + pg_clip_high)

    seq        ratio_it = s_i = exp(sequence_log_ratio)          GSPO
    token      ratio_it = exp(logp_it - old_it)                  GRPO
    seq_token  ratio_it = sg[s_i] pi_it / sg[pi_it]              GSPO-token: value of s_i, gradient per token

With branches, s_i becomes that of the token's branch k, over its L_ik tokens, and a token weighs the same in the
aggregation, which is of whole rollouts:

    s_ik = exp(sum_(t in k) m_it (logp_it - old_it) / L_ik)

token_losses.py has the losses in full. Under cispo, seq and seq_token are the same. The divergences of dppo are those
of tokens, and so is their ratio.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from gspo_core.branches import at_tokens, lengths_of_sequences, means_of_sequences
from gspo_core.kl import kl_divergence
from gspo_core.shapes import at_least_float32, check_matrix, check_rows
from gspo_core.stats import Stats, mean_stats, moment_stats
from gspo_core.token_losses import Bound, TokenLoss, token_losses

IMPORTANCE_SAMPLINGS = ("seq", "token", "seq_token")
LOSS_AGG_MODES = (
    "seq-mean-token-mean",
    "seq-mean-token-sum",
    "token-mean",
    "seq-mean-token-sum-norm",
    "seq-mean-turn-mean",
)
# exp(60) = 1e26: sums of it over a batch stay finite in float32. No ratio that means anything is near it.
LOG_RATIO_LIMIT = 60.0


class PolicyLoss(NamedTuple):
    """`loss`: 0-dim, to be added up over the step's micro-batches. `stats`: sums for stats.merge and figures.

    clipped_{low,high}_{sequences,tokens}: share that the objective's bound changes, on either side; a sequence counts
        when any of its tokens does. Under cispo the weight is bounded, under the others the gradient is 0.
    outside_clip_sequences: share beyond a bound for any A; the one to hold against noise_share.
    dual_clipped_tokens: share cut by the dual clip.
    log_ratio, token_log_ratio: mean, std, max over sequences (log s_i) and over tokens (delta_it).
    k1, k3: KL(old || policy), mean over tokens. advantage: mean, std, max over tokens.

    With `branch_BT` sequences are branches, and log s_i is log s_ik.
    """

    loss: Tensor
    stats: Stats


def sequence_log_ratio(logp_BT: Tensor, old_logp_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """log s_i = sum_t m_it (logp_it - old_it) / L_i, with the full gradient through the mean.

    All inputs [B, T]; returns [B] in float32 (float64 if an input is); 0 for an empty sequence.
    Source: arXiv 2507.18071, eq. 7. ValueError: shapes that differ.
    """
    check_matrix(logp_BT=logp_BT, old_logp_BT=old_logp_BT, mask_BT=mask_BT)
    return means_of_sequences(_delta(logp_BT, old_logp_BT, mask_BT), mask_BT, None)[:, 0]


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
    objective: str = "clip",
    turns_B: Tensor | None = None,
    num_turns: float | None = None,
    pg_clip_reference_length: float | None = None,
    branch_BT: Tensor | None = None,
) -> PolicyLoss:
    """Aggregate of the losses l_it that an objective gives to ratios and advantages; the module has the formulas.

    With `branch_BT`, the branch of each token from 0, a ratio is that of the token's branch. With
    `pg_clip_reference_length`, under clip and a sequence's ratio, the two sides are those of `clip_sides`. `dual_clip`
    c > 1, under clip alone: where A < 0, l = min(l, -c A). `loss_agg_mode` and its sizes: see `aggregate_loss`.
    All tensors [B, T]; gradient in `logp_BT` alone. The loss and its gradient are finite for finite inputs: a
    log-ratio acts within +-60.
    Source: arXiv 2507.18071, eq. 5 and 13. ValueError: shapes, an unknown kind or mode, bounds, dual_clip without
    clip, dppo without token, a reference length without clip or with token, branches with token.
    """
    check_matrix(logp_BT=logp_BT, old_logp_BT=old_logp_BT, advantage_BT=advantage_BT, mask_BT=mask_BT)
    _check_bounds(objective, importance_sampling, pg_clip_low, pg_clip_high, dual_clip)
    _check_branches(mask_BT, branch_BT, importance_sampling)
    delta_BT = _delta(logp_BT, old_logp_BT, mask_BT)
    bounds: tuple[Bound, Bound] = (pg_clip_low, pg_clip_high)
    if pg_clip_reference_length is not None:
        _check_reference_length(pg_clip_reference_length, objective, importance_sampling)
        L_BK = lengths_of_sequences(mask_BT, branch_BT)
        sides_BK = clip_sides(L_BK, pg_clip_low, pg_clip_high, pg_clip_reference_length)
        low_BT, high_BT = (at_tokens(side_BK.to(delta_BT.dtype), mask_BT, branch_BT) for side_BK in sides_BK)
        bounds = low_BT, high_BT
    A_BT = torch.where(mask_BT.bool(), advantage_BT.detach().to(delta_BT.dtype), 0.0)
    log_ratio_BT = _log_ratio(delta_BT, mask_BT, branch_BT, importance_sampling)
    ratio_BT = torch.exp(log_ratio_BT.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
    counted_BT, old_BT = (torch.where(mask_BT.bool(), x.to(A_BT.dtype), 0.0) for x in (logp_BT, old_logp_BT.detach()))
    of_tokens = token_losses(objective, ratio_BT, counted_BT, old_BT, A_BT, bounds=bounds, dual_clip=dual_clip)
    loss = aggregate_loss(
        of_tokens.l_BT,
        mask_BT,
        loss_agg_mode=loss_agg_mode,
        num_sequences=num_sequences,
        num_tokens=num_tokens,
        max_response_length=max_response_length,
        turns_B=turns_B,
        num_turns=num_turns,
    )
    with torch.no_grad():
        dual_BT = (A_BT < 0) & (ratio_BT > (math.inf if dual_clip is None else dual_clip))
        stats = _policy_stats(delta_BT, A_BT, mask_BT, branch_BT, of_tokens, dual_BT)
    return PolicyLoss(loss, stats)


def clip_sides(
    length_B: Tensor, pg_clip_low: float, pg_clip_high: float, pg_clip_reference_length: float | None
) -> tuple[Tensor, Tensor]:
    """(low_i, high_i): the two sides of the clip for sequences of L_i = `length_B` tokens, float64, of its shape.

        side_i = side sqrt(pg_clip_reference_length / L_i), low_i at most 1; the sides themselves where it is None

    log s_i is a mean over L_i tokens. If these move independently, its spread falls with 1 / sqrt(L_i). Such sides then
    clip an equal share of short and long sequences. An empty sequence has those of one token.
    """
    scale_B = clip_scale(length_B, pg_clip_reference_length)
    return (pg_clip_low * scale_B).clamp(max=1), pg_clip_high * scale_B


def clip_scale(length_B: Tensor, pg_clip_reference_length: float | None) -> Tensor:
    """The factor of `clip_sides` for sequences of `length_B` tokens, float64, of its shape; 1 without a reference."""
    if pg_clip_reference_length is None:
        return torch.ones_like(length_B, dtype=torch.float64)
    return (pg_clip_reference_length / length_B.clamp(min=1).double()).sqrt()


def ratio_stats(logp_BT: Tensor, old_logp_BT: Tensor, advantage_BT: Tensor, mask_BT: Tensor) -> Stats:
    """The stats of PolicyLoss that need no bound: log_ratio, token_log_ratio, k1, k3, advantage.

    All tensors [B, T]. ValueError: shapes that differ.
    """
    check_matrix(logp_BT=logp_BT, old_logp_BT=old_logp_BT, advantage_BT=advantage_BT, mask_BT=mask_BT)
    delta_BT = _delta(logp_BT.detach(), old_logp_BT, mask_BT)
    return _ratio_stats(delta_BT, advantage_BT.detach().to(delta_BT.dtype), mask_BT, None)


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
) -> Tensor:
    """One number from per-token losses l (the policy's, or a KL penalty), m the mask, L_i = sum_t m_it.

        seq-mean-token-mean      1/N sum_i 1/L_i sum_t m l
        seq-mean-token-sum       1/N sum_i sum_t m l
        token-mean               1/M sum_it m l
        seq-mean-token-sum-norm  1/N sum_i sum_t m l / T_max

        seq-mean-turn-mean       1/N sum_i 1/K_i sum_t m l / (M / K)

    N = `num_sequences` and M = `num_tokens` count the sequences with L_i > 0 and the tokens of the WHOLE
    optimizer step, over all ranks and micro-batches; None: those of this call. With them, losses of micro-batches
    add up to the step's loss. K = `num_turns` counts the turns of those sequences likewise.
    T_max = `max_response_length`, the configured one. K_i = `turns_B` [B] are the turns of a conversation, at
    least 1; None: 1 each, and then seq-mean-turn-mean is token-mean. Nothing to count gives 0.
    `l_BT`, `mask_BT` [B, T]; returns 0-dim. ValueError: shapes, unknown mode, no T_max, a negative count.
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
    if loss_agg_mode == "seq-mean-turn-mean":
        if turns_B is None:
            turns_B, num_turns = torch.ones_like(L_B), num_sequences
        check_rows(turns_B, mask_BT, "turns_B, mask_BT")
        M, K = _at_least_one("num_tokens", num_tokens, m_BT), _at_least_one("num_turns", num_turns, turns_B * (L_B > 0))
        return (l_BT.sum(-1) / turns_B.clamp(min=1)).sum() / N / M * K
    raise ValueError(f"loss_agg_mode is {loss_agg_mode!r}; it must be one of {', '.join(LOSS_AGG_MODES)}")


def _policy_stats(
    delta_BT: Tensor,
    A_BT: Tensor,
    mask_BT: Tensor,
    branch_BT: Tensor | None,
    of_tokens: TokenLoss,
    dual_BT: Tensor,
) -> Stats:
    m_BT = mask_BT.bool()
    valid_BK = _has_any(m_BT, branch_BT)
    outside_BT = m_BT & (of_tokens.below_BT | of_tokens.above_BT)
    cut_low_BT, cut_high_BT = m_BT & of_tokens.cut_low_BT, m_BT & of_tokens.cut_high_BT
    return {
        **mean_stats("clipped_low_sequences", _has_any(cut_low_BT, branch_BT), valid_BK),
        **mean_stats("clipped_high_sequences", _has_any(cut_high_BT, branch_BT), valid_BK),
        **mean_stats("clipped_low_tokens", cut_low_BT, m_BT),
        **mean_stats("clipped_high_tokens", cut_high_BT, m_BT),
        **mean_stats("outside_clip_sequences", _has_any(outside_BT, branch_BT), valid_BK),
        **mean_stats("dual_clipped_tokens", dual_BT, m_BT),
        **_ratio_stats(delta_BT, A_BT, mask_BT, branch_BT),
    }


def _ratio_stats(delta_BT: Tensor, A_BT: Tensor, mask_BT: Tensor, branch_BT: Tensor | None) -> Stats:
    m_BT = mask_BT.bool()
    k1_BT, k3_BT = (kl_divergence(-delta_BT, torch.zeros_like(delta_BT), kind) for kind in ("k1", "k3"))
    return {
        **moment_stats("log_ratio", means_of_sequences(delta_BT, mask_BT, branch_BT), _has_any(m_BT, branch_BT)),
        **moment_stats("token_log_ratio", delta_BT, m_BT),
        **mean_stats("k1", k1_BT, m_BT),
        **mean_stats("k3", k3_BT, m_BT),
        **moment_stats("advantage", A_BT, m_BT),
    }


def _has_any(x_BT: Tensor, branch_BT: Tensor | None) -> Tensor:
    """Whether x is true at any token of a sequence, Bool [B, K]."""
    return lengths_of_sequences(x_BT, branch_BT) > 0


def _delta(logp_BT: Tensor, old_logp_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """delta = logp - old, 0 outside the mask: values on padding, be they NaN, reach no loss or gradient."""
    dtype = at_least_float32(logp_BT, old_logp_BT)
    return torch.where(mask_BT.bool(), logp_BT.to(dtype) - old_logp_BT.detach().to(dtype), 0.0)


def _log_ratio(delta_BT: Tensor, mask_BT: Tensor, branch_BT: Tensor | None, importance_sampling: str) -> Tensor:
    if importance_sampling == "token":
        return delta_BT
    log_s_BT = at_tokens(means_of_sequences(delta_BT, mask_BT, branch_BT), mask_BT, branch_BT)
    if importance_sampling == "seq":
        return log_s_BT
    if importance_sampling == "seq_token":
        return log_s_BT.detach() + (delta_BT - delta_BT.detach())
    raise ValueError(
        f"importance_sampling is {importance_sampling!r}; it must be one of {', '.join(IMPORTANCE_SAMPLINGS)}"
    )


def _check_branches(mask_BT: Tensor, branch_BT: Tensor | None, importance_sampling: str) -> None:
    if branch_BT is None:
        return
    check_matrix(mask_BT=mask_BT, branch_BT=branch_BT)
    if importance_sampling == "token":
        raise ValueError("branch_BT is given and importance_sampling 'token', whose ratios are of tokens; leave it out")


def _check_bounds(
    objective: str, importance_sampling: str, pg_clip_low: float, pg_clip_high: float, dual_clip: float | None
) -> None:
    if objective.startswith("dppo") and importance_sampling != "token":
        raise ValueError(f"objective is {objective!r}, which bounds tokens; importance_sampling must be 'token'")
    if not 0 <= pg_clip_low <= 1:
        raise ValueError(f"pg_clip_low is {pg_clip_low}; it must be in [0, 1]")
    if not 0 <= pg_clip_high < math.inf:
        raise ValueError(f"pg_clip_high is {pg_clip_high}; it must be finite and at least 0")
    if dual_clip is not None and not 1 < dual_clip < math.inf:
        raise ValueError(f"dual_clip is {dual_clip}; it must be above 1, or None for no dual clip")


def _check_reference_length(reference_length: float, objective: str, importance_sampling: str) -> None:
    if not 0 < reference_length < math.inf:
        raise ValueError(f"pg_clip_reference_length is {reference_length}; it must be finite and above 0, or None")
    if objective != "clip" or importance_sampling == "token":
        raise ValueError(
            f"pg_clip_reference_length is {reference_length}, objective {objective!r} and importance_sampling "
            f"{importance_sampling!r}; it widens the clip of a sequence's ratio, under 'clip' with 'seq' or 'seq_token'"
        )


def _at_least_one(name: str, step_wide: float | None, counted: Tensor) -> Tensor | float:
    """The divisor: the step's count where it is given, this call's where not; 1 in place of 0, where all is 0."""
    if step_wide is None:
        return counted.sum().clamp(min=1)
    if not 0 <= step_wide < math.inf:
        raise ValueError(f"{name} is {step_wide}; it must be the step's count, finite and at least 0")
    return max(step_wide, 1)
