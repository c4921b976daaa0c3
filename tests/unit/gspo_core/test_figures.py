"""What a step reports: sums that add up, mismatch sigmas, the noise share, rewards, ages."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from gspo_core.figures import (
    independent_sigma,
    mismatch_stats,
    noise_clip,
    noise_stats,
    normal_noise_share,
    reward_stats,
)
from gspo_core.stats import figures, mean_stats, merge, moment_stats

PAPER: dict[str, Any] = {"pg_clip_low": 3e-4, "pg_clip_high": 4e-4}


def test_moments_by_hand() -> None:
    stats = moment_stats("x", torch.tensor([1.0, -5.0, 3.0, 99.0]), torch.tensor([1, 1, 1, 0]))
    assert figures(stats) == pytest.approx({"x_mean": -1 / 3, "x_std": math.sqrt(52 / 3), "x_max": 5.0})


def test_parts_merge_to_the_whole() -> None:
    x_N, mask_N = torch.randn(10), torch.arange(10) != 4
    whole = moment_stats("x", x_N, mask_N) | mean_stats("share", x_N > 0, mask_N)
    cuts = [slice(0, 3), slice(3, 3), slice(3, 10)]
    parts = [moment_stats("x", x_N[c], mask_N[c]) | mean_stats("share", x_N[c] > 0, mask_N[c]) for c in cuts]
    assert figures(merge(parts)) == pytest.approx(figures(whole))


def test_spread_of_small_log_ratios_is_not_lost_to_rounding() -> None:
    x_N = 1.0 + torch.tensor([-1e-4, 1e-4], dtype=torch.float64).repeat(500)
    assert figures(moment_stats("x", x_N, torch.ones(1000)))["x_std"] == pytest.approx(1e-4, rel=1e-3)


def test_mismatch_sigmas_by_hand() -> None:
    learner_BT = torch.tensor([[0.1, 0.3, 7.0], [-0.2, 7.0, 7.0]])
    mask_BT = torch.tensor([[1, 1, 0], [1, 0, 0]])
    reported = figures(mismatch_stats(learner_BT, torch.zeros(2, 3), mask_BT))
    assert reported["mismatch_std"] == pytest.approx(math.sqrt((0.1**2 + 0.3**2 + 0.2**2 - 0.2**2 / 3) / 2))
    assert reported["sequence_mismatch_std"] == pytest.approx(0.4 / math.sqrt(2))  # means 0.2 and -0.2


@pytest.mark.parametrize(("length", "share"), [(256, 0.64), (4096, 0.07)])
def test_normal_noise_at_sigma_0012(length: int, share: float) -> None:
    sigma_B = independent_sigma(0.012, torch.tensor([length, length]))
    assert normal_noise_share(sigma_B, **PAPER).item() == pytest.approx(share, abs=0.005)


def test_normal_noise_is_the_mean_over_sequences_and_zero_without_noise() -> None:
    each = [normal_noise_share(independent_sigma(0.012, torch.tensor([n])), **PAPER).item() for n in (256, 4096, 0)]
    together = normal_noise_share(independent_sigma(0.012, torch.tensor([256, 4096, 0])), **PAPER).item()
    assert together == pytest.approx(sum(each) / 3)
    assert each[2] == 0.0
    assert normal_noise_share(torch.tensor([]), **PAPER).item() == 0.0
    assert normal_noise_share(torch.tensor([1e9]), **PAPER).item() == pytest.approx(1.0)
    assert normal_noise_share(torch.tensor([0.5]), pg_clip_low=1.0, pg_clip_high=1e9).item() == pytest.approx(0.0)


def test_normal_noise_agrees_with_drawn_noise() -> None:
    torch.manual_seed(0)
    log_s = torch.randn(200_000, dtype=torch.float64) * 3e-4
    outside = ((log_s.exp() < 1 - 3e-4) | (log_s.exp() > 1 + 4e-4)).double().mean()
    assert normal_noise_share(torch.tensor([3e-4]), **PAPER).item() == pytest.approx(outside.item(), abs=5e-3)
    shifted = ((log_s - 4e-4).exp() < 1 - 3e-4) | ((log_s - 4e-4).exp() > 1 + 4e-4)
    share = normal_noise_share(torch.tensor([3e-4]), **PAPER, mean=-4e-4).item()
    assert share == pytest.approx(shifted.double().mean().item(), abs=5e-3)


def noise_of(
    noise_BT: Tensor, num_counted: int | None = None, *, mask_BT: Tensor | None = None, level: str = "seq", **keys: Any
) -> dict[str, Tensor]:
    """The stats of sequences of `num_counted` tokens, whose first ones have this mismatch; all of them by default."""
    mask_BT = torch.ones_like(noise_BT).bool() if mask_BT is None else mask_BT
    width = max(noise_BT.shape[1], num_counted or 0)
    wide = [torch.nn.functional.pad(value, (0, width - noise_BT.shape[1])) for value in (noise_BT, mask_BT)]
    counted = wide[1] if num_counted is None else torch.arange(width).expand(len(noise_BT), width) < num_counted
    return noise_stats(wide[0], 0 * wide[0], wide[1], counted, importance_sampling=level, **PAPER, **keys)


def test_noise_is_counted_where_it_is_outside_the_clip() -> None:
    """Means of 0.00039, 0.00041, -0.00029 and -0.00031: the clip is 3e-4 below and 4e-4 above."""
    mean_B = torch.tensor([3.9e-4, 4.1e-4, -2.9e-4, -3.1e-4], dtype=torch.float64)
    around_BT = mean_B[:, None] + torch.tensor([-0.1, 0.1, 0.0], dtype=torch.float64)
    stats = noise_of(around_BT)
    assert figures(stats)["noise_share"] == 0.5
    assert 4.1e-4 <= noise_clip(stats) <= 4.1e-4 * 1.024
    assert 3.9e-4 <= noise_clip(stats, share=0.25) <= 3.9e-4 * 1.024
    with pytest.raises(ValueError, match="share is 1"):
        noise_clip(stats, share=1)
    assert figures(noise_of(around_BT, level="token"))["noise_share"] == 1.0 - 2 / 12  # 0.00039 and -0.00029 themselves
    assert noise_clip(noise_of(0 * around_BT)) == 0.0
    halves = [noise_of(part) for part in torch.split(around_BT, 2)]
    assert noise_clip(merge(halves)) == noise_clip(stats)


def test_a_part_of_a_sequence_stands_for_all_of_it() -> None:
    """Four of sixteen tokens with a mean of 0.0006: that of all is half as large, and the clip of 0.0004 holds it."""
    part_BT = torch.full((3, 4), 6e-4, dtype=torch.float64)
    assert figures(noise_of(part_BT, 16))["noise_share"] == 0.0
    assert figures(noise_of(part_BT, 8))["noise_share"] == 1.0
    assert 3e-4 <= noise_clip(noise_of(part_BT, 16)) <= 3e-4 * 1.024
    mask_BT = torch.tensor([[True] * 4, [False] * 4, [False] * 4])
    assert float(noise_of(part_BT, 16, mask_BT=mask_BT)["noise_share.count"]) == 1  # the others were not compared
    # With a length of reference, both are wider for the shorter one: sqrt(64 / 16).
    scaled = noise_of(2 * part_BT, 16, pg_clip_reference_length=64)
    assert figures(scaled)["noise_share"] == 0.0
    assert 3e-4 <= noise_clip(scaled) <= 3e-4 * 1.024


def test_few_tokens_with_nearly_all_of_the_noise() -> None:
    """A peaked policy: one token in 2,000 has a mismatch. Normal noise of this spread would be outside far oftener."""
    torch.manual_seed(0)
    noise_BT = torch.randn(20_000, 200, dtype=torch.float64) * (torch.rand(20_000, 200) < 0.0005) * 0.5
    moved_B = torch.expm1(noise_BT.mean(-1))
    outside = ((moved_B < -3e-4) | (moved_B > 4e-4)).double().mean().item()
    stats = noise_of(noise_BT)
    normal = normal_noise_share(independent_sigma(float(noise_BT.std()), torch.tensor([200])), **PAPER).item()
    assert figures(stats)["noise_share"] == pytest.approx(outside, abs=1e-9)
    assert outside < 0.1 < 0.6 < normal
    assert (moved_B.abs() > noise_clip(stats)).double().mean().item() == pytest.approx(0.01, abs=0.002)


def test_reward_stats() -> None:
    reported = figures(reward_stats(torch.tensor([0.1, 1.0, 0.1, 0.0, 0.3]), torch.tensor([4, 2, 4, 2, 7])))
    assert reported["zero_spread_groups"] == pytest.approx(2 / 3)
    assert reported["reward_mean"] == pytest.approx(0.3)
