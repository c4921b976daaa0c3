"""The objective against the float64 reference: values, gradients, cuts, bf16, over shapes, masks and extremes."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from gspo_core.correction import BEHAVIOR_LEVELS, behavior_weights
from gspo_core.kl import kl_divergence
from gspo_core.loss import LOSS_AGG_MODES, PolicyLoss
from gspo_core.stats import figures, merge
from gspo_core.token_losses import IMPORTANCE_SAMPLINGS
from tests.support.training import numpy_reference as reference
from tests.support.training.numpy_reference import Array
from tests.support.typed.gradients import backward, grad_of
from tests.unit.gspo_core.loss.objective_loss import OBJECTIVES, objective_loss

T_MAX = 16
Batch = Sequence[Array]


@st.composite
def batches(draw: st.DrawFn, largest_delta: float) -> Batch:
    """logp, old, advantage, mask, branch [B, T]: no row, no token, single tokens and whole rows among them.

    Rows have one branch, or several of one to three tokens.
    """
    B, T = draw(st.integers(0, 5)), draw(st.integers(0, 8))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    old = -rng.exponential(1.0, (B, T))
    logp = old + rng.normal(0, 1, (B, T)) * draw(st.sampled_from([0.0, 1e-4, 0.1, largest_delta]))
    advantage = rng.normal(0, 1, (B, draw(st.sampled_from([1, T])))) * np.ones((B, T))
    mask = rng.random((B, T)) < draw(st.sampled_from([0.0, 0.5, 1.0]))
    if draw(st.booleans()):
        mask &= mask.cumsum(1) == 1  # sequences of a single token
    branch = np.arange(T) * (np.arange(B) % 3)[:, None] // 3
    return logp, old, advantage, mask, branch


def fitting(option: dict[str, Any]) -> dict[str, Any]:
    """The option as its objective takes it: dppo has ratios of tokens, and only clip a dual clip."""
    kind = "token" if option["objective"].startswith("dppo") else option["kind"]
    clips = option["objective"] == "clip"
    dual_clip, length = (option[key] if clips else None for key in ("dual_clip", "reference_length"))
    by_branch = option["by_branch"] and kind != "token"
    of_sequences = {"reference_length": None if kind == "token" else length, "by_branch": by_branch}
    return {**option, "kind": kind, "dual_clip": dual_clip, **of_sequences}


options = st.fixed_dictionaries(
    {
        "objective": st.sampled_from(["clip", *OBJECTIVES]),
        "kind": st.sampled_from(IMPORTANCE_SAMPLINGS),
        "mode": st.sampled_from(LOSS_AGG_MODES),
        "clip": st.sampled_from([(3e-4, 4e-4), (0.2, 0.27), (0.0, 0.0), (1.0, 5.0)]),
        "dual_clip": st.sampled_from([None, 1.4, 3.0]),
        "reference_length": st.sampled_from([None, 2, 4096]),
        "by_branch": st.booleans(),
    }
).map(fitting)


# Sequences of several lengths far outside the clip: examples at random have few of them.
NORMAL_4BT = np.random.default_rng(0).normal(0, 1, (4, 5, 8))
FAR: Batch = (NORMAL_4BT[0], NORMAL_4BT[1], NORMAL_4BT[2], NORMAL_4BT[3] > 0, np.zeros((5, 8), dtype=int))
BY_LENGTH: dict[str, Any] = {
    "objective": "clip",
    "kind": "seq",
    "mode": "seq-mean-token-mean",
    "clip": (0.2, 0.27),
    "dual_clip": None,
    "reference_length": 2,
    "by_branch": False,
}


def branch_of(batch: Batch, option: dict[str, Any]) -> Array | None:
    return batch[4] if option["by_branch"] else None


def expected(batch: Batch, option: dict[str, Any], **counts: Any) -> tuple[float, Array]:
    clip, dual_clip = option["clip"], option["dual_clip"]
    logp, old, advantage, mask = batch[:4]
    return reference.loss_and_gradient(
        logp,
        old,
        advantage,
        mask,
        option["kind"],
        clip[0],
        clip[1],
        dual_clip,
        option["mode"],
        T_MAX,
        option["objective"],
        option["reference_length"],
        branch_of(batch, option),
        **counts,
    )


def bounded(batch: Batch, option: dict[str, Any], ratio: Array) -> tuple[Array, ...]:
    logp, old, advantage, mask, _ = batch
    return reference.bounded(
        option["objective"],
        ratio,
        logp,
        old,
        advantage,
        option["clip"][0],
        option["clip"][1],
        option["dual_clip"],
        mask,
        option["reference_length"],
        branch_of(batch, option),
    )


def size(batch: Batch, option: dict[str, Any]) -> float:
    """Sum of what is added up, without signs: rounding is relative to it where terms cancel. At least 1."""
    logp, old, _, mask, _ = batch
    ratio = reference.ratios(logp, old, mask, option["kind"], branch_of(batch, option))
    terms = bounded(batch, option, ratio)[0]
    return max(1.0, float(np.abs(terms * reference.token_weights(mask, option["mode"], T_MAX)).sum()))


def run(
    batch: Batch, option: dict[str, Any], dtype: torch.dtype = torch.float64, **counts: Any
) -> tuple[PolicyLoss, Tensor]:
    logp_BT, old_BT, A_BT = (torch.tensor(x, dtype=dtype) for x in batch[:3])
    own: dict[str, Any] = {} if option["objective"].startswith("dppo") else {"importance_sampling": option["kind"]}
    if option["objective"] == "clip":
        own |= {name: option[name] for name in ("dual_clip", "reference_length")}
    result = objective_loss(
        logp_BT.requires_grad_(),
        old_BT,
        A_BT,
        torch.tensor(batch[3]),
        objective=option["objective"],
        low=option["clip"][0],
        high=option["clip"][1],
        loss_agg_mode=option["mode"],
        max_response_length=T_MAX,
        branch_BT=torch.tensor(batch[4]) if option["by_branch"] else None,
        **own,
        **counts,
    )
    backward(result.loss)
    return result, grad_of(logp_BT)


@given(batches(largest_delta=3.0), options)
@example(FAR, BY_LENGTH)
def test_value_and_gradient_equal_the_reference(batch: Batch, option: dict[str, Any]) -> None:
    result, grad_BT = run(batch, option)
    loss, gradient = expected(batch, option)
    allowed = 1e-12 * size(batch, option)
    assert math.isclose(result.loss.item(), loss, rel_tol=1e-10, abs_tol=allowed)
    np.testing.assert_allclose(grad_BT.numpy(), gradient, rtol=1e-9, atol=allowed)


@given(batches(largest_delta=1.0), options)
def test_bf16_inputs_lose_nothing_but_their_own_rounding(batch: Batch, option: dict[str, Any]) -> None:
    *numbers, mask, branch = batch
    rounded = [torch.tensor(x, dtype=torch.bfloat16).double().numpy() for x in numbers]
    rounded += [mask, branch]
    result, grad_BT = run(batch, option, torch.bfloat16)
    loss, gradient = expected(rounded, option)
    allowed = 3e-6 * size(rounded, option)
    assert math.isclose(result.loss.item(), loss, rel_tol=1e-5, abs_tol=allowed)
    np.testing.assert_allclose(grad_BT.double().numpy(), gradient, rtol=1e-2, atol=allowed)


@given(batches(largest_delta=1.0), options, st.integers(0, 2**32 - 1))
def test_any_cut_into_micro_batches_adds_up_to_the_whole(batch: Batch, option: dict[str, Any], seed: int) -> None:
    """Rows in any order, any number a micro-batch, trimmed to its longest row; N and M are the step's."""
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(batch[0]))
    cuts = np.split(order, np.sort(rng.integers(0, len(order) + 1, 2)))
    counts: dict[str, Any] = {"num_sequences": int(batch[3].any(1).sum()), "num_tokens": int(batch[3].sum())}
    whole, whole_BT = run(batch, option)
    loss, parts, grad_BT = 0.0, [], torch.zeros_like(whole_BT)
    for rows in cuts:
        used = np.flatnonzero(batch[3][rows].any(0))
        width = used[-1] + 1 if len(used) else 0
        part, grad_RT = run(tuple(x[rows, :width] for x in batch), option, **counts)
        loss += part.loss.item()
        grad_BT[rows, :width] = grad_RT
        parts.append(part.stats)
    allowed = 1e-12 * size(batch, option)
    assert math.isclose(loss, whole.loss.item(), rel_tol=1e-10, abs_tol=allowed)
    torch.testing.assert_close(grad_BT, whole_BT, rtol=1e-10, atol=allowed)
    assert figures(merge(parts)) == pytest.approx(figures(whole.stats), rel=1e-9, abs=1e-7)


@given(batches(largest_delta=1e4), options, st.sampled_from([torch.float32, torch.bfloat16]))
def test_extreme_ratios_stay_finite(batch: Batch, option: dict[str, Any], dtype: torch.dtype) -> None:
    result, grad_BT = run(batch, option, dtype)
    assert math.isfinite(result.loss.item())
    assert bool(torch.isfinite(grad_BT).all())
    assert not grad_BT[~torch.tensor(batch[3])].any()
    assert all(math.isfinite(value) for value in figures(result.stats).values())


@given(batches(largest_delta=3.0), options)
def test_the_clipped_shares_are_those_of_the_reference(batch: Batch, option: dict[str, Any]) -> None:
    logp, old, _, mask, _ = batch
    branch = branch_of(batch, option)
    reported = figures(run(batch, option)[0].stats)
    below, above, *cut = bounded(batch, option, reference.ratios(logp, old, mask, option["kind"], branch))[2:]
    lost = {side: mask & tokens for side, tokens in zip(("low", "high"), cut, strict=True)}
    sequences, num_tokens = list(reference.sequences(mask, branch)), max(1, mask.sum())

    def share(chosen: Array) -> Any:
        return pytest.approx(sum(chosen[i, tokens].any() for i, tokens in sequences) / max(1, len(sequences)))

    for side, tokens in lost.items():
        assert reported[f"clipped_{side}_tokens"] == pytest.approx(tokens.sum() / num_tokens)
        assert reported[f"clipped_{side}_sequences"] == share(tokens)
    assert reported["outside_clip_sequences"] == share(below | above)
    log_s = [(logp[i] - old[i])[tokens].mean() for i, tokens in sequences]
    assert reported["log_ratio_mean"] == pytest.approx(np.mean(log_s) if log_s else 0.0, abs=1e-12)


@given(batches(largest_delta=30.0), st.sampled_from(["k1", "k2", "k3"]))
def test_kl_equals_the_reference(batch: Batch, kind: str) -> None:
    logp, ref, *_ = batch
    found_BT = kl_divergence(torch.tensor(logp), torch.tensor(ref), kind)
    np.testing.assert_allclose(found_BT.numpy(), reference.kl(logp, ref, kind), rtol=1e-10, atol=1e-12)


# Few examples have a weight beyond the bounds: of 30, a third of the runs has none.
@settings(max_examples=300)
@given(batches(largest_delta=4.0), st.sampled_from(BEHAVIOR_LEVELS))
def test_behavior_weights_equal_the_reference(batch: Batch, level: str) -> None:
    old, behavior, _, mask, _ = batch
    compared = tuple(torch.tensor(x) for x in (old, behavior, mask))
    expected_w = reference.behavior_weight(old, behavior, mask, level)
    capped_BT, _ = behavior_weights(*compared, behavior_correction="truncate", behavior_level=level, bounds=(0.0, 2.0))
    np.testing.assert_allclose(capped_BT.numpy(), np.minimum(expected_w, 2.0), rtol=1e-10)
    weight_BT, keep_BT = behavior_weights(
        *compared, behavior_correction="mask", behavior_level=level, bounds=(0.5, 2.0)
    )
    inside = (expected_w >= 0.5) & (expected_w <= 2.0)
    np.testing.assert_allclose(weight_BT.numpy(), np.where(inside, expected_w, 0.0), rtol=1e-10)
    assert (keep_BT.numpy() == inside).all()
