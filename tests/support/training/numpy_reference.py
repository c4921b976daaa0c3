"""The formulas of docs/gspo.md and docs/objectives.md in float64 NumPy, one loop at a time, without gspo_core.

Slow and plain on purpose: what is tested is written with tensors, this with loops.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def sequences(mask: Array, branch: Array | None = None) -> Iterator[tuple[int, Array]]:
    """(row, Bool [T]) of the counted tokens of each sequence that has any: of a row, or with `branch` of a branch."""
    for i, counted in enumerate(mask):
        numbers = [0] if branch is None else sorted(set(branch[i]))
        for tokens in (counted if branch is None else counted & (branch[i] == number) for number in numbers):
            if tokens.any():
                yield i, tokens


def ratios(logp: Array, old: Array, mask: Array, kind: str, branch: Array | None = None) -> Array:
    """[B, T]: each counted token's ratio; 1 elsewhere."""
    ratio = np.ones(logp.shape)
    for i, tokens in sequences(mask, branch):
        delta = (logp[i] - old[i])[tokens]
        ratio[i, tokens] = np.exp(delta) if kind == "token" else math.exp(math.fsum(delta) / len(delta))
    return ratio


def token_losses(ratio: Array, advantage: Array, low: float, high: float, dual_clip: float | None) -> Array:
    """l_it = -min(ratio A, clip(ratio) A), for A < 0 at most -dual_clip A."""
    loss: Array = -np.minimum(ratio * advantage, np.clip(ratio, 1 - low, 1 + high) * advantage)
    if dual_clip is not None:
        loss = np.where(advantage < 0, np.minimum(loss, -dual_clip * advantage), loss)
    return loss


def widened(side: float, mask: Array, reference_length: float, branch: Array | None = None) -> Array:
    """[B, T]: one side of the clip of each counted token, wider for shorter sequences."""
    sides = np.full(mask.shape, side, dtype=float)
    for i, tokens in sequences(mask, branch):
        sides[i, tokens] = side * math.sqrt(reference_length / tokens.sum())
    return sides


def bounded(
    objective: str,
    ratio: Array,
    logp: Array,
    old: Array,
    advantage: Array,
    low: float,
    high: float,
    dual_clip: float | None,
    mask: Array,
    reference_length: float | None = None,
    branch: Array | None = None,
) -> tuple[Array, ...]:
    """Losses, slopes, tokens below a bound, tokens above one, and those of either kind that it changes: [B, T] each.

    Token by token, as the papers write them. A slope is dl_it/dlogp_it if each token has its own ratio.
    """
    shape = ratio.shape
    loss, slope = np.zeros(shape), np.zeros(shape)
    below, above, cut_low, cut_high = (np.zeros(shape, dtype=bool) for _ in range(4))
    if reference_length is not None:
        sides = [widened(side, mask, reference_length, branch) for side in (low, high)]
    for at in np.ndindex(shape):
        if reference_length is not None:
            low, high = min(float(sides[0][at]), 1.0), float(sides[1][at])
        r, A, p, q = ratio[at], advantage[at], math.exp(min(float(logp[at]), 0)), math.exp(min(float(old[at]), 0))
        if objective == "clip":
            below[at], above[at] = r < 1 - low, r > 1 + high
            cut_low[at], cut_high[at] = below[at] and A < 0, above[at] and A > 0
            loss[at] = token_losses(r, A, low, high, dual_clip)
            is_free = (A > 0 and not above[at]) or (A < 0 and not below[at])
            is_free = is_free and not (dual_clip is not None and A < 0 and r > dual_clip)
            slope[at] = -A * r if is_free else 0.0
        elif objective == "cispo":  # MiniMax-M1, eq. 4 and 5: sg(clip(r)) A log pi
            weight = max(1 - low, min(1 + high, float(r)))
            below[at], above[at] = r < 1 - low, r > 1 + high
            cut_low[at], cut_high[at] = below[at], above[at]
            loss[at], slope[at] = -weight * A * logp[at], -weight * A
        else:  # arXiv 2602.04879, eq. 11 to 14: M r A
            far = abs(p - q) if objective == "dppo_tv" else _binary_kl(p, q)
            below[at], above[at] = r < 1 and far > low, r > 1 and far > high
            cut_low[at], cut_high[at] = below[at] and A < 0, above[at] and A > 0
            kept = not (cut_low[at] or cut_high[at])
            loss[at], slope[at] = -r * A * kept, -r * A * kept
    return loss, slope, below, above, cut_low, cut_high


def _binary_kl(p: float, q: float) -> float:
    p, q = min(p, 1 - 1e-12), min(q, 1 - 1e-12)
    return q * math.log(q / p) + (1 - q) * (math.log1p(-q) - math.log1p(-p))


def token_weights(
    mask: Array,
    mode: str,
    max_response_length: int,
    num_sequences: int | None = None,
    num_tokens: int | None = None,
    turns: Sequence[int] | None = None,
    turn: Array | None = None,
) -> Array:
    """[B, T]: what each token's loss is multiplied by in the sum that is the loss.

    `turns` of each conversation of a whole step; None: one each. `turn` [B, T] is each token's, None: the first.
    """
    length = mask.sum(1)
    num_sequences = max(1, (length > 0).sum() if num_sequences is None else num_sequences)
    num_tokens = max(1, mask.sum() if num_tokens is None else num_tokens)
    each = {
        "token-mean": np.full(len(mask), 1 / num_tokens),
        "seq-mean-token-mean": 1 / num_sequences / np.maximum(length, 1),
        "seq-mean-token-sum": np.full(len(mask), 1 / num_sequences),
        "seq-mean-token-sum-norm": np.full(len(mask), 1 / num_sequences / max_response_length),
        "seq-mean-token-sum-turn-norm": np.full(len(mask), 1 / num_tokens),
        "seq-mean-turn-mean-token-mean": np.full(len(mask), 1 / num_sequences),
    }[mode]
    if mode == "seq-mean-token-sum-turn-norm" and turns is not None:
        tokens_a_turn = mask.sum() / sum(turns[i] for i in range(len(mask)) if length[i])
        each = 1 / num_sequences / np.asarray(turns) / tokens_a_turn
    weights: Array = each[:, None] * mask
    if mode == "seq-mean-turn-mean-token-mean":
        turn = np.zeros(mask.shape, dtype=int) if turn is None else turn
        for i in range(len(mask)):
            of_turns = [np.flatnonzero(mask[i] & (turn[i] == k)) for k in np.unique(turn[i][mask[i] > 0])]
            for tokens in of_turns:
                weights[i, tokens] /= len(of_turns) * len(tokens)
    return weights


def loss_and_gradient(
    logp: Array,
    old: Array,
    advantage: Array,
    mask: Array,
    kind: str,
    low: float,
    high: float,
    dual_clip: float | None,
    mode: str,
    max_response_length: int,
    objective: str = "clip",
    reference_length: float | None = None,
    branch: Array | None = None,
    **counts: Any,
) -> tuple[float, Array]:
    """The loss and its gradient in logp, by the chain rule on paper.

    dl/dratio is -A where the bound lets it through, dratio/dlogp is the ratio: of the token itself under `token` and
    `seq_token`, spread as 1/L over the sequence under `seq`. Under cispo each log-prob has its own gradient. With the
    number of each token's `branch`, sequences are branches, and a token weighs as one of its row.
    """
    ratio = ratios(logp, old, mask, kind, branch)
    loss, slope, *_ = bounded(
        objective, ratio, logp, old, advantage, low, high, dual_clip, mask, reference_length, branch
    )
    weight = token_weights(mask, mode, max_response_length, **counts)
    through = slope * weight
    gradient = through.copy()
    if kind == "seq" and objective != "cispo":
        for i, tokens in sequences(mask, branch):
            gradient[i, tokens] = through[i, tokens].sum() / tokens.sum()
    return float((loss * weight)[mask].sum()), gradient


def normalized(
    reward: Sequence[float] | Array,
    group: Sequence[float] | Array,
    norm: str | None,
    shift: bool,
    scale: bool,
    clip: float | None,
    seen: Sequence[float] = (),
) -> Array:
    """Rewards after normalisation; `seen` are those of earlier batches, for the running kind."""
    result = np.array(reward, dtype=np.float64)
    if norm is not None:
        for i in range(len(reward)):
            if norm == "leave_one_out":
                others = [r for j, (r, g) in enumerate(zip(reward, group, strict=True)) if g == group[i] and j != i]
                result[i] = reward[i] - np.mean(others) if {*others, reward[i]} != {reward[i]} else 0.0
                continue
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


def advantages(
    reward: Sequence[float] | Array, mask: Array, penalty: Array, gamma: float, whiten: bool, clip: float | None
) -> Array:
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


def kl(logp: Array, ref: Array, kind: str) -> Array:
    """Schulman's estimators of KL(policy || reference) at tokens of the policy."""
    d: Array = ref - logp
    if kind == "k1":
        return -d
    return d**2 / 2 if kind == "k2" else np.clip(np.exp(np.minimum(d, 20.0)) - d - 1, -10, 10)


def behavior_weight(old: Array, behavior: Array, mask: Array, level: str) -> Array:
    """[B, T]: old over behavior, of each token, or of the mean or the sum of its sequence; 1 where there is nothing."""
    if level == "token":
        log_weight: Array = np.where(mask, old - behavior, 0.0)
    else:
        reduced = np.mean if level == "geometric" else np.sum
        rows = [reduced((o - b)[m]) if m.any() else 0.0 for o, b, m in zip(old, behavior, mask, strict=True)]
        log_weight = np.array(rows)[:, None] * np.ones(mask.shape)
    weights: Array = np.exp(log_weight)
    return weights
