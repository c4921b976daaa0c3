"""What a step reports: sums that add up, mismatch sigmas, the noise share, rewards, ages."""

import math

import pytest
import torch

from gspo_core.figures import age_stats, independent_sigma, mismatch_stats, noise_share, reward_stats
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


def test_reward_stats():
    reported = figures(reward_stats(torch.tensor([0.1, 1.0, 0.1, 0.0, 0.3]), torch.tensor([4, 2, 4, 2, 7])))
    assert reported["zero_spread_groups"] == pytest.approx(2 / 3)
    assert reported["reward_mean"] == pytest.approx(0.3)


def test_age_stats():
    reported = figures(age_stats(torch.tensor([[1, 3], [3, 0]]), torch.tensor([[1, 1], [1, 0]]), 4))
    assert reported["token_age_mean"] == pytest.approx(5 / 3)
    assert reported["token_age_max"] == 3
    assert reported["rollout_age_mean"] == 2.0
