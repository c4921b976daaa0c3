"""The objective against a float64 NumPy reference written from the formulas, over shapes, masks and extremes."""

import math

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo_core.loss import IMPORTANCE_SAMPLINGS, LOSS_AGG_MODES, policy_loss
from gspo_core.stats import figures


def reference_loss(logp, old, advantage, mask, kind, low, high, dual_clip, mode, max_response_length):
    per_sequence, total, num_tokens = [], 0.0, 0
    for i in range(len(logp)):
        steps = np.flatnonzero(mask[i])
        if len(steps) == 0:
            continue
        delta = logp[i, steps] - old[i, steps]
        ratio = np.exp(delta) if kind == "token" else np.full(len(steps), np.exp(delta.mean()))
        A = advantage[i, steps]
        loss = np.maximum(-ratio * A, -np.clip(ratio, 1 - low, 1 + high) * A)
        if dual_clip is not None:
            loss = np.where(A < 0, np.minimum(loss, -dual_clip * A), loss)
        per_sequence.append(loss)
        total += loss.sum()
        num_tokens += len(steps)
    if not per_sequence:
        return 0.0
    if mode == "token-mean":
        return total / num_tokens
    if mode == "seq-mean-token-mean":
        return float(np.mean([loss.mean() for loss in per_sequence]))
    scale = max_response_length if mode == "seq-mean-token-sum-norm" else 1
    return total / len(per_sequence) / scale


@st.composite
def batches(draw, largest_delta):
    B, T = draw(st.integers(1, 5)), draw(st.integers(1, 8))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    old = -rng.exponential(1.0, (B, T))
    logp = old + rng.normal(0, 1, (B, T)) * draw(st.sampled_from([0.0, 1e-4, 0.1, largest_delta]))
    return logp, old, rng.normal(0, 1, (B, T)), rng.random((B, T)) < draw(st.sampled_from([0.0, 0.5, 1.0]))


options = st.fixed_dictionaries(
    {
        "kind": st.sampled_from(IMPORTANCE_SAMPLINGS),
        "mode": st.sampled_from(LOSS_AGG_MODES),
        "clip": st.sampled_from([(3e-4, 4e-4), (0.2, 0.27), (0.0, 0.0)]),
        "dual_clip": st.sampled_from([None, 1.4, 3.0]),
    }
)


def run(batch, option, dtype):
    logp, old, advantage, mask = batch
    logp_BT = torch.tensor(logp, dtype=dtype).requires_grad_()
    result = policy_loss(
        logp_BT,
        torch.tensor(old, dtype=dtype),
        torch.tensor(advantage, dtype=dtype),
        torch.tensor(mask),
        importance_sampling=option["kind"],
        pg_clip_low=option["clip"][0],
        pg_clip_high=option["clip"][1],
        dual_clip=option["dual_clip"],
        loss_agg_mode=option["mode"],
        max_response_length=16,
    )
    result.loss.backward()
    return result, logp_BT.grad


@settings(max_examples=300, deadline=None)
@given(batches(largest_delta=3.0), options)
def test_value_equals_the_reference(batch, option):
    expected = reference_loss(*batch, option["kind"], *option["clip"], option["dual_clip"], option["mode"], 16)
    result, _ = run(batch, option, torch.float64)
    assert math.isclose(result.loss.item(), expected, rel_tol=1e-10, abs_tol=1e-12)


@settings(max_examples=200, deadline=None)
@given(batches(largest_delta=1e4), options, st.sampled_from([torch.float32, torch.bfloat16]))
def test_extreme_ratios_stay_finite(batch, option, dtype):
    result, grad_BT = run(batch, option, dtype)
    assert math.isfinite(result.loss.item())
    assert bool(torch.isfinite(grad_BT).all())
    assert not grad_BT[~torch.tensor(batch[3])].any()
    assert all(math.isfinite(value) for value in figures(result.stats).values())
