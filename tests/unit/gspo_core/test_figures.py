"""What a step reports: sums that add up, mismatch sigmas, the noise share, rewards, ages."""

import math

import pytest
import torch

from gspo_core.figures import (
    age_stats,
    independent_sigma,
    mismatch_stats,
    noise_clip,
    noise_share,
    reward_stats,
    sequence_noise,
)
from gspo_core.loss import clip_sides
from gspo_core.stats import figures, mean_stats, merge, moment_stats

PAPER = {"pg_clip_low": 3e-4, "pg_clip_high": 4e-4}


def test_moments_by_hand():
    stats = moment_stats("x", torch.tensor([1.0, -5.0, 3.0, 99.0]), torch.tensor([1, 1, 1, 0]))
    assert figures(stats) == pytest.approx({"x_mean": -1 / 3, "x_std": math.sqrt(52 / 3), "x_max": 5.0})


def test_parts_merge_to_the_whole():
    x_N, mask_N = torch.randn(10), torch.arange(10) != 4
    whole = moment_stats("x", x_N, mask_N) | mean_stats("share", x_N > 0, mask_N)
    cuts = [slice(0, 3), slice(3, 3), slice(3, 10)]
    parts = [moment_stats("x", x_N[c], mask_N[c]) | mean_stats("share", x_N[c] > 0, mask_N[c]) for c in cuts]
    assert figures(merge(parts)) == pytest.approx(figures(whole))


def test_spread_of_small_log_ratios_is_not_lost_to_rounding():
    x_N = 1.0 + torch.tensor([-1e-4, 1e-4], dtype=torch.float64).repeat(500)
    assert figures(moment_stats("x", x_N, torch.ones(1000)))["x_std"] == pytest.approx(1e-4, rel=1e-3)


def test_mismatch_sigmas_by_hand():
    learner_BT = torch.tensor([[0.1, 0.3, 7.0], [-0.2, 7.0, 7.0]])
    mask_BT = torch.tensor([[1, 1, 0], [1, 0, 0]])
    reported = figures(mismatch_stats(learner_BT, torch.zeros(2, 3), mask_BT))
    assert reported["mismatch_std"] == pytest.approx(math.sqrt((0.1**2 + 0.3**2 + 0.2**2 - 0.2**2 / 3) / 2))
    assert reported["sequence_mismatch_std"] == pytest.approx(0.4 / math.sqrt(2))  # means 0.2 and -0.2


@pytest.mark.parametrize(("length", "share"), [(256, 0.64), (4096, 0.07)])
def test_noise_share_at_sigma_0012(length, share):
    sigma_B = independent_sigma(0.012, torch.tensor([length, length]))
    assert noise_share(sigma_B, **PAPER).item() == pytest.approx(share, abs=0.005)


def test_noise_share_is_the_mean_over_sequences_and_zero_without_noise():
    each = [noise_share(independent_sigma(0.012, torch.tensor([n])), **PAPER).item() for n in (256, 4096, 0)]
    together = noise_share(independent_sigma(0.012, torch.tensor([256, 4096, 0])), **PAPER).item()
    assert together == pytest.approx(sum(each) / 3)
    assert each[2] == 0.0
    assert noise_share(torch.tensor([]), **PAPER).item() == 0.0
    assert noise_share(torch.tensor([1e9]), **PAPER).item() == pytest.approx(1.0)
    assert noise_share(torch.tensor([0.5]), pg_clip_low=1.0, pg_clip_high=1e9).item() == pytest.approx(0.0)


def test_noise_share_agrees_with_drawn_noise():
    torch.manual_seed(0)
    log_s = torch.randn(200_000, dtype=torch.float64) * 3e-4
    outside = ((log_s.exp() < 1 - 3e-4) | (log_s.exp() > 1 + 4e-4)).double().mean()
    assert noise_share(torch.tensor([3e-4]), **PAPER).item() == pytest.approx(outside.item(), abs=5e-3)
    shifted = ((log_s - 4e-4).exp() < 1 - 3e-4) | ((log_s - 4e-4).exp() > 1 + 4e-4)
    share = noise_share(torch.tensor([3e-4]), **PAPER, mean=-4e-4).item()
    assert share == pytest.approx(shifted.double().mean().item(), abs=5e-3)


def test_the_noise_of_a_sequence_has_a_shared_part_and_one_of_each_token():
    """Means -0.1, 0.1 and 0.3 of two tokens each, +-0.02 around them, by hand."""
    learner_BT = torch.tensor([[-0.12, -0.08], [0.08, 0.12], [0.28, 0.32]], dtype=torch.float64)
    noise = sequence_noise(mismatch_stats(learner_BT, torch.zeros(3, 2), torch.ones(3, 2)))
    token = 6 * 0.02**2 / 3
    assert noise == pytest.approx((0.1, math.sqrt(0.04 - token / 2), math.sqrt(token)), rel=1e-5)
    assert noise.sigma(torch.tensor([2, 0])).tolist() == pytest.approx([0.2, 0.0], rel=1e-5)
    alone = sequence_noise(mismatch_stats(learner_BT[:, :1], torch.zeros(3, 1), torch.ones(3, 1)))
    assert (alone.shared, alone.token) == pytest.approx((0.0, 0.2), rel=1e-5)


@pytest.mark.parametrize("reference_length", [None, 4096])
def test_at_the_noise_clip_a_hundredth_is_outside(reference_length):
    length_B = torch.tensor([256, 4096])
    sigma_B = independent_sigma(0.012, length_B)
    side = noise_clip(sigma_B, length_B, pg_clip_reference_length=reference_length)
    low_B, high_B = clip_sides(length_B, side, side, reference_length)
    assert noise_share(sigma_B, pg_clip_low=low_B, pg_clip_high=high_B).item() == pytest.approx(0.01, rel=1e-4)
    if reference_length:  # both lengths have 1 %: 2.576 sigma
        assert side == pytest.approx(2.576 * 0.012 / 64, rel=1e-3)
    assert noise_clip(0 * sigma_B, length_B) == 0.0
    with pytest.raises(ValueError, match="share is 1"):
        noise_clip(sigma_B, length_B, share=1)


def test_reward_stats():
    reported = figures(reward_stats(torch.tensor([0.1, 1.0, 0.1, 0.0, 0.3]), torch.tensor([4, 2, 4, 2, 7])))
    assert reported["zero_spread_groups"] == pytest.approx(2 / 3)
    assert reported["reward_mean"] == pytest.approx(0.3)


def test_age_stats():
    reported = figures(age_stats(torch.tensor([[1, 3], [3, 0]]), torch.tensor([[1, 1], [1, 0]]), 4))
    assert reported["token_age_mean"] == pytest.approx(5 / 3)
    assert reported["token_age_max"] == 3
    assert reported["rollout_age_mean"] == 2.0
