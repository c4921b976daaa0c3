"""The formulas of docs/gspo.md in float64 NumPy, one loop at a time, without a line of gspo_core.

Slow and plain on purpose: what is tested is written with tensors, this with loops.
"""

from __future__ import annotations

import math

import numpy as np

MODES = ("seq-mean-token-mean", "seq-mean-token-sum", "token-mean", "seq-mean-token-sum-norm")


def ratios(logp, old, mask, kind):
    """[B, T]: each counted token's ratio; 1 elsewhere."""
    ratio = np.ones(logp.shape)
    for i, counted in enumerate(mask):
        delta = (logp[i] - old[i])[counted]
        if len(delta):
            ratio[i, counted] = np.exp(delta) if kind == "token" else math.exp(math.fsum(delta) / len(delta))
    return ratio


def token_losses(ratio, advantage, low, high, dual_clip):
    """l_it = -min(ratio A, clip(ratio) A), for A < 0 at most -dual_clip A."""
    loss = -np.minimum(ratio * advantage, np.clip(ratio, 1 - low, 1 + high) * advantage)
    if dual_clip is not None:
        loss = np.where(advantage < 0, np.minimum(loss, -dual_clip * advantage), loss)
    return loss


def token_weights(mask, mode, max_response_length, num_sequences=None, num_tokens=None):
    """[B, T]: what each token's loss is multiplied by in the sum that is the loss."""
    length = mask.sum(1)
    num_sequences = max(1, (length > 0).sum() if num_sequences is None else num_sequences)
    num_tokens = max(1, mask.sum() if num_tokens is None else num_tokens)
    each = {
        "token-mean": np.full(len(mask), 1 / num_tokens),
        "seq-mean-token-mean": 1 / num_sequences / np.maximum(length, 1),
        "seq-mean-token-sum": np.full(len(mask), 1 / num_sequences),
        "seq-mean-token-sum-norm": np.full(len(mask), 1 / num_sequences / max_response_length),
    }[mode]
    return each[:, None] * mask


def loss_and_gradient(logp, old, advantage, mask, kind, low, high, dual_clip, mode, max_response_length, **counts):
    """The loss and its gradient in logp, by the chain rule on paper.

    dl/dratio is -A where the clip lets it through, dratio/dlogp is the ratio: of the token itself under `token` and
    `seq_token`, spread as 1/L over the sequence under `seq`.
    """
    ratio = ratios(logp, old, mask, kind)
    loss = token_losses(ratio, advantage, low, high, dual_clip)
    weight = token_weights(mask, mode, max_response_length, **counts)
    passes = (advantage > 0) & (ratio <= 1 + high) | (advantage < 0) & (ratio >= 1 - low)
    if dual_clip is not None:
        passes &= (advantage > 0) | (ratio <= dual_clip)
    through = np.where(passes, -advantage * ratio, 0.0) * weight
    gradient = through.copy()
    if kind == "seq":
        for i, counted in enumerate(mask):
            gradient[i] = counted * through[i].sum() / max(1, counted.sum())
    return float((loss * weight)[mask].sum()), gradient


def normalized(reward, group, norm, shift, scale, clip, seen=()):
    """Rewards after normalisation; `seen` are those of earlier batches, for the running kind."""
    result = np.array(reward, dtype=np.float64)
    if norm is not None:
        for i in range(len(reward)):
            if norm == "group":
                population = np.array([r for r, g in zip(reward, group, strict=True) if g == group[i]])
            else:
                population = np.array([*(seen if norm == "running" else ()), *reward])
            if population.max() == population.min():
                result[i] = 0.0
                continue
            mean = 0.0 if scale else population.mean()
            std = 1.0 if shift else population.std(ddof=1) + 1e-6
            result[i] = (reward[i] - mean) / std
    return result if clip is None else np.clip(result, -clip, clip)


def advantages(reward, mask, penalty, gamma, whiten, clip):
    """[B, T]: the return from each policy token on, whitened and clipped."""
    result = np.zeros(mask.shape)
    for i in range(len(reward)):
        steps = np.flatnonzero(mask[i])
        for place, t in enumerate(steps):
            later = steps[place:]
            earned = [-penalty[i, u] + (reward[i] if u == steps[-1] else 0.0) for u in later]
            result[i, t] = math.fsum(gamma**k * r for k, r in enumerate(earned))
    if whiten and mask.any():
        values = result[mask]
        spread = values.max() != values.min()
        result[mask] = (values - values.mean()) / np.sqrt(values.var(ddof=1) + 1e-8) if spread else 0.0
    return result if clip is None else np.clip(result, -clip, clip)


def kl(logp, ref, kind):
    """Schulman's estimators of KL(policy || reference) at tokens of the policy."""
    d = ref - logp
    if kind == "k1":
        return -d
    return d**2 / 2 if kind == "k2" else np.clip(np.exp(np.minimum(d, 20.0)) - d - 1, -10, 10)


def behavior_weight(old, behavior, mask, level):
    """[B, T]: old over behavior, of each token or of the mean of its sequence; 1 where there is nothing."""
    if level == "token":
        return np.exp(np.where(mask, old - behavior, 0.0))
    return np.exp(
        np.array([(o - b)[m].mean() if m.any() else 0.0 for o, b, m in zip(old, behavior, mask, strict=True)])
    )[:, None] * np.ones(mask.shape)
