"""The objective by hand: three ratios, four aggregations, both sides of the clip, dual clip, cuts, extremes."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from gspo_core.loss import LOSS_AGG_MODES, PolicyLoss, aggregate_loss, policy_loss, sequence_log_ratio
from gspo_core.packing import micro_batches
from gspo_core.stats import figures, merge
from gspo_core.token_losses import IMPORTANCE_SAMPLINGS, clip_sides
from tests.support.typed.gradients import backward, grad_of
from tests.unit.gspo_core.loss.objective_loss import objective_loss

WIDE: dict[str, Any] = {"pg_clip_low": 0.2, "pg_clip_high": 0.27}
SIDES: dict[str, Any] = {"low": 0.2, "high": 0.27}
# Row 0: delta 0.3, -0.1, so log s = 0.1. Row 1: -0.6, -0.3, -0.3, so log s = -0.4.
DELTA = torch.tensor([[0.3, -0.1, 9.0], [-0.6, -0.3, -0.3]])
MASK = torch.tensor([[1, 1, 0], [1, 1, 1]])
ADVANTAGE = torch.tensor([[2.0, 2.0, 2.0], [-1.0, -1.0, -1.0]])
OLD = torch.full((2, 3), -1.5)


def loss_of(delta_BT: Tensor, advantage_BT: Tensor, mask_BT: Tensor | None = None, **options: Any) -> PolicyLoss:
    mask_BT = torch.ones_like(delta_BT) if mask_BT is None else mask_BT
    return policy_loss(delta_BT, torch.zeros_like(delta_BT), advantage_BT, mask_BT, **options)


def clipped(delta_BT: Tensor, advantage_BT: Tensor, mask_BT: Tensor | None = None, **options: Any) -> PolicyLoss:
    """As `loss_of`, with the options that policy_loss does not have."""
    mask_BT = torch.ones_like(delta_BT) if mask_BT is None else mask_BT
    return objective_loss(delta_BT, torch.zeros_like(delta_BT), advantage_BT, mask_BT, **options)


def test_sequence_log_ratio() -> None:
    torch.testing.assert_close(sequence_log_ratio(OLD + DELTA, OLD, MASK), torch.tensor([0.1, -0.4]))


@pytest.mark.parametrize("kind", ["seq", "seq_token"])
@pytest.mark.parametrize(
    ("mode", "expected"),
    [  # l is -2 exp(0.1) = -2.2103418 on two tokens and, clipped at 0.8, 0.8 on three
        ("seq-mean-token-mean", (-2.2103418 + 0.8) / 2),
        ("seq-mean-token-sum", (2 * -2.2103418 + 3 * 0.8) / 2),
        ("token-mean", (2 * -2.2103418 + 3 * 0.8) / 5),
        ("seq-mean-token-sum-norm", (2 * -2.2103418 + 3 * 0.8) / 2 / 10),
    ],
)
def test_sequence_ratio_in_four_aggregations(kind: str, mode: str, expected: float) -> None:
    loss, _ = policy_loss(
        OLD + DELTA, OLD, ADVANTAGE, MASK, importance_sampling=kind, loss_agg_mode=mode, max_response_length=10, **WIDE
    )
    assert loss.item() == pytest.approx(expected, rel=1e-6)


def test_the_sides_of_the_clip_grow_with_the_root_of_a_shorter_length() -> None:
    low_B, high_B = clip_sides(torch.tensor([4096, 1024, 1, 0]), 3e-4, 4e-4, 4096)
    assert low_B.tolist() == pytest.approx([3e-4, 6e-4, 0.0192, 0.0192])
    assert high_B.tolist() == pytest.approx([4e-4, 8e-4, 0.0256, 0.0256])
    wide_B, _ = clip_sides(torch.tensor([16, 4]), 0.4, 0.4, 64)
    assert wide_B.tolist() == pytest.approx([0.8, 1.0])  # no ratio is below 0
    fixed_B, _ = clip_sides(torch.tensor([7, 70]), 0.2, 0.3, None)
    assert fixed_B.tolist() == [0.2, 0.2]


@pytest.mark.parametrize("kind", ["seq", "seq_token"])
def test_a_clip_for_a_reference_length_is_each_sequences_own(kind: str) -> None:
    """log s is 0.3 in both rows. For 9 tokens the side is 0.2: 0.6 for one token, 0.3 for four, and e^0.3 is 1.35."""
    delta_BT, mask_BT = torch.full((2, 4), 0.3), torch.tensor([[1, 0, 0, 0], [1, 1, 1, 1]])
    options: dict[str, Any] = {"importance_sampling": kind, "low": 0.2, "high": 0.2}
    loss, stats = clipped(delta_BT, torch.ones(2, 4), mask_BT, reference_length=9, **options)
    assert loss.item() == pytest.approx(-(math.exp(0.3) + 1.3) / 2)
    assert figures(stats)["clipped_high_sequences"] == 0.5
    fixed = figures(clipped(delta_BT, torch.ones(2, 4), mask_BT, **options).stats)
    assert fixed["clipped_high_sequences"] == 1.0


def test_such_a_clip_cuts_short_and_long_sequences_alike() -> None:
    """Independent noise of a token: the fixed clip cuts mostly short answers, the other an equal share."""
    torch.manual_seed(0)
    shares = {}
    for length in (16, 256):
        delta_BT = 0.02 * torch.randn(4000, length, dtype=torch.float64)
        for reference in (None, 256):
            sides: dict[str, Any] = {"low": 1.5e-3, "high": 1.5e-3, "reference_length": reference}
            stats = clipped(delta_BT, torch.ones_like(delta_BT), **sides).stats
            shares[length, reference] = figures(stats)["outside_clip_sequences"]
    assert shares[16, None] > 0.7 and shares[256, None] == pytest.approx(0.23, abs=0.03)
    assert shares[16, 256] == pytest.approx(shares[256, 256], abs=0.03)


@pytest.mark.parametrize(
    "options",
    [{"importance_sampling": "token"}, {"reference_length": 0.0}],
)
def test_a_reference_length_without_an_effect_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="reference_length is"):
        clipped(DELTA, ADVANTAGE, MASK, **{"reference_length": 4096, **options})


@pytest.mark.parametrize("kind", ["seq", "seq_token"])
def test_each_branch_has_a_ratio_and_the_rollout_one_weight(kind: str) -> None:
    """Rows 0 and 1 have branches of 1 and 2 tokens; e^0.3 is above 1.27, e^-0.1 and e^0.1 are within."""
    delta_BT = torch.tensor([[0.3, -0.3, 0.1], [0.1, 0.1, 0.1]])
    branch_BT, same_BT = torch.tensor([[0, 1, 1], [0, 1, 1]]), torch.zeros(2, 3).long()
    loss, stats = clipped(delta_BT, torch.ones(2, 3), importance_sampling=kind, branch_BT=branch_BT, **SIDES)
    assert loss.item() == pytest.approx(-((1.27 + 2 * math.exp(-0.1)) / 3 + math.exp(0.1)) / 2)
    reported = figures(stats)
    assert reported["clipped_high_sequences"] == 0.25 and reported["clipped_high_tokens"] == pytest.approx(1 / 6)
    assert reported["log_ratio_mean"] == pytest.approx((0.3 - 0.1 + 0.1 + 0.1) / 4)
    whole = clipped(delta_BT, torch.ones(2, 3), importance_sampling=kind, **SIDES).loss
    assert whole.item() == pytest.approx(-(math.exp(0.1 / 3) + math.exp(0.1)) / 2)
    alike = clipped(delta_BT, torch.ones(2, 3), importance_sampling=kind, branch_BT=same_BT, **SIDES).loss
    assert alike.item() == pytest.approx(whole.item())


def test_branches_need_a_ratio_of_sequences_and_the_shape_of_the_tokens() -> None:
    with pytest.raises(ValueError, match="branch_BT is set and importance_sampling 'token'"):
        clipped(DELTA, ADVANTAGE, MASK, importance_sampling="token", branch_BT=torch.zeros(2, 3).long())
    with pytest.raises(ValueError, match=r"branch_BT has shape \(2, 2\)"):
        clipped(DELTA, ADVANTAGE, MASK, branch_BT=torch.zeros(2, 2).long())


def test_turns_divide_a_sequence_and_a_turns_mean_length_the_step() -> None:
    """l is 1 a token. Conversations of 2 and 4 tokens in 1 and 3 turns: 6 tokens in 4 turns, 1.5 a turn."""
    l_BT, mask_BT = torch.ones(3, 4), torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]])
    options: dict[str, Any] = {"loss_agg_mode": "seq-mean-token-sum-turn-norm"}
    loss = aggregate_loss(l_BT, mask_BT, turns_B=torch.tensor([1, 3, 7]), **options)
    assert loss.item() == pytest.approx((2 / 1 + 4 / 3) / 2 / 1.5)
    step: dict[str, Any] = {"num_sequences": 2, "num_tokens": 6, "num_turns": 4}
    parts = [
        aggregate_loss(l_BT[[i]], mask_BT[[i]], turns_B=torch.tensor([turns]), **step, **options)
        for i, turns in enumerate([1, 3, 7])
    ]
    assert torch.stack(parts).sum().item() == pytest.approx(loss.item())
    one_turn_each = aggregate_loss(l_BT * 2, mask_BT, **options)
    assert one_turn_each.item() == pytest.approx(aggregate_loss(l_BT * 2, mask_BT, loss_agg_mode="token-mean").item())


def test_a_mean_over_turns_weighs_long_and_short_ones_alike() -> None:
    """Row 0 has turns of 1 and 3 tokens, row 1 one turn of 2, row 2 none that counts."""
    l_BT = torch.tensor([[6.0, 1, 2, 3], [5, 7, 9, 9], [1, 1, 1, 1]])
    mask_BT = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [0, 0, 0, 0]])
    turn_BT = torch.tensor([[0, 1, 1, 1], [0, 0, 1, 1], [0, 1, 1, 2]])
    options: dict[str, Any] = {"loss_agg_mode": "seq-mean-turn-mean-token-mean"}
    loss = aggregate_loss(l_BT, mask_BT, turn_BT=turn_BT, **options)
    assert loss.item() == pytest.approx(((6 + 2) / 2 + 6) / 2)
    parts = [
        aggregate_loss(l_BT[[i]], mask_BT[[i]], turn_BT=turn_BT[[i]], num_sequences=2, **options) for i in range(3)
    ]
    assert torch.stack(parts).sum().item() == pytest.approx(loss.item())
    one_turn_each = aggregate_loss(l_BT, mask_BT, **options)
    assert one_turn_each.item() == pytest.approx(aggregate_loss(l_BT, mask_BT).item())


def test_token_ratio() -> None:
    loss, stats = policy_loss(
        OLD + DELTA, OLD, ADVANTAGE, MASK, importance_sampling="token", loss_agg_mode="token-mean", **WIDE
    )
    # 1.27 (clipped from 1.35) and 0.9048374 at A 2; 0.5488 and 0.7408 clipped to 0.8 at A -1
    assert loss.item() == pytest.approx((-2.54 - 2 * 0.9048374 + 3 * 0.8) / 5, rel=1e-6)
    reported = figures(stats)
    assert reported["clipped_high_tokens"] == pytest.approx(1 / 5)
    assert reported["clipped_low_tokens"] == pytest.approx(3 / 5)


def test_the_default_clip_is_the_papers() -> None:
    for delta, A, expected in [(1e-3, 1.0, -1.0004), (-1e-3, -1.0, 0.9997), (3e-4, 1.0, -1.00030005)]:
        loss, _ = loss_of(torch.full((1, 4), delta), torch.full((1, 4), A))
        assert loss.item() == pytest.approx(expected, abs=2e-7)


@pytest.mark.parametrize("kind", IMPORTANCE_SAMPLINGS)
@pytest.mark.parametrize(
    ("log_ratio", "A", "has_gradient"),
    [(0.5, 1.0, False), (-0.5, 1.0, True), (0.5, -1.0, True), (-0.5, -1.0, False), (0.0, 1.0, True), (0.0, -1.0, True)],
)
def test_the_clip_takes_gradient_away_on_one_side_of_each_sign(
    kind: str, log_ratio: float, A: float, has_gradient: bool
) -> None:
    logp_BT = torch.full((1, 2), log_ratio, requires_grad=True)
    loss, stats = loss_of(logp_BT, torch.full((1, 2), A), importance_sampling=kind, **WIDE)
    backward(loss)
    expected = -A * math.exp(log_ratio) / 2 if has_gradient else 0.0
    assert grad_of(logp_BT).tolist()[0] == pytest.approx([expected, expected], rel=1e-6)
    reported = figures(stats)
    for unit in ("sequences", "tokens"):
        assert reported[f"clipped_high_{unit}"] == (1.0 if log_ratio > 0 and not has_gradient else 0.0)
        assert reported[f"clipped_low_{unit}"] == (1.0 if log_ratio < 0 and not has_gradient else 0.0)
    assert reported["outside_clip_sequences"] == (0.0 if log_ratio == 0 else 1.0)


@pytest.mark.parametrize("kind", IMPORTANCE_SAMPLINGS)
def test_descent_raises_what_was_good_and_lowers_what_was_bad(kind: str) -> None:
    logp_BT = torch.zeros(2, 3, requires_grad=True)
    loss, _ = loss_of(logp_BT, torch.tensor([[1.0], [-1.0]]).expand(2, 3), importance_sampling=kind)
    backward(loss)
    assert (grad_of(logp_BT)[0] < 0).all()
    assert (grad_of(logp_BT)[1] > 0).all()


@pytest.mark.parametrize(
    ("log_ratio", "A", "expected", "share"),
    [
        (1.0, -2.0, 2.8, 1.0),  # e * 2 = 5.4 is cut to 1.4 * 2
        (0.3, -2.0, 2 * math.exp(0.3), 0.0),  # 1.35 is below c
        (1.0, 2.0, -2 * 1.27, 0.0),  # never for A > 0
    ],
)
def test_dual_clip(log_ratio: float, A: float, expected: float, share: float) -> None:
    logp_BT = torch.full((1, 2), log_ratio, requires_grad=True)
    loss, stats = loss_of(logp_BT, torch.full((1, 2), A), dual_clip=1.4, **WIDE)
    backward(loss)
    assert loss.item() == pytest.approx(expected, rel=1e-6)
    assert figures(stats)["dual_clipped_tokens"] == share
    assert bool(grad_of(logp_BT).any()) == (log_ratio == 0.3)


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_seq_token_equals_seq_when_the_advantage_is_constant_in_a_sequence(mode: str) -> None:
    torch.manual_seed(0)
    mask_BT = torch.rand(6, 9) < 0.7
    delta_BT, A_B1 = torch.randn(6, 9, dtype=torch.float64) * 0.3, torch.randn(6, 1, dtype=torch.float64)
    results = []
    for kind in ("seq", "seq_token"):
        logp_BT = delta_BT.clone().requires_grad_()
        loss, _ = loss_of(
            logp_BT,
            A_B1.expand(6, 9),
            mask_BT,
            importance_sampling=kind,
            loss_agg_mode=mode,
            max_response_length=20,
            dual_clip=1.1,
            **WIDE,
        )
        backward(loss)
        results.append((loss, grad_of(logp_BT)))
    torch.testing.assert_close(results[0], results[1], rtol=1e-12, atol=1e-15)
    assert results[0][1].abs().sum() > 0


def test_seq_token_carries_a_gradient_per_token() -> None:
    logp_BT = torch.zeros(1, 2, requires_grad=True)
    backward(loss_of(logp_BT, torch.tensor([[1.0, -3.0]]), importance_sampling="seq_token").loss)
    assert grad_of(logp_BT).tolist() == [[-0.5, 1.5]]
    logp_BT.grad = None
    backward(loss_of(logp_BT, torch.tensor([[1.0, -3.0]]), importance_sampling="seq").loss)
    assert grad_of(logp_BT).tolist() == [[0.5, 0.5]]


def test_loss_does_not_depend_on_length_in_the_papers_aggregation() -> None:
    short, _ = loss_of(torch.full((1, 3), 0.1), torch.full((1, 3), 1.5), **WIDE)
    long, _ = loss_of(torch.full((1, 300), 0.1), torch.full((1, 300), 1.5), **WIDE)
    assert short.item() == pytest.approx(long.item(), rel=1e-6)


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@pytest.mark.parametrize("kind", IMPORTANCE_SAMPLINGS)
def test_gradient_does_not_depend_on_the_cut_into_micro_batches(kind: str, mode: str) -> None:
    torch.manual_seed(1)
    lengths = [0, 1, 7, 12, 3, 12, 5, 0, 9]
    mask_BT = torch.arange(12) < torch.tensor(lengths)[:, None]
    weight_D, features_BTD = torch.randn(4), torch.randn(9, 12, 4) * 0.1
    A_BT = torch.randn(9, 1).expand(9, 12)
    whole: dict[str, Any] = {"num_sequences": 7, "num_tokens": sum(lengths)}
    options: dict[str, Any] = {"importance_sampling": kind, "loss_agg_mode": mode, "max_response_length": 40, **WIDE}

    def step(batches: list[list[int]], **counts: Any) -> tuple[Tensor, Tensor, dict[str, float]]:
        w_D = weight_D.clone().requires_grad_()
        losses, stats = [], []
        for rows in batches:
            width = max(1, *(lengths[row] for row in rows))
            logp_BT = (features_BTD[rows, :width] * w_D).sum(-1)
            A_RT, mask_RT = A_BT[rows, :width], mask_BT[rows, :width]
            part = policy_loss(logp_BT, torch.zeros_like(logp_BT), A_RT, mask_RT, **options, **counts)
            backward(part.loss)
            losses.append(part.loss.detach())
            stats.append(part.stats)
        return torch.stack(losses).sum(), grad_of(w_D), figures(merge(stats))

    loss, grad_D, reported = step([list(range(9))])
    for batches in (micro_batches(lengths, 24), [[row] for row in range(9)]):
        cut_loss, cut_grad_D, cut_reported = step(batches, **whole)
        torch.testing.assert_close(cut_loss, loss, rtol=1e-5, atol=1e-7)
        assert torch.linalg.vector_norm(cut_grad_D - grad_D) < 1e-5 * torch.linalg.vector_norm(grad_D)
        assert cut_reported == pytest.approx(reported, rel=1e-5, abs=1e-9)


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@pytest.mark.parametrize("kind", IMPORTANCE_SAMPLINGS)
def test_gradient_against_finite_differences(kind: str, mode: str) -> None:
    """seq_token's gradient is no derivative of its value where A varies in a sequence, so A is constant here."""
    torch.manual_seed(2)
    logp_BT = (torch.randn(3, 4, dtype=torch.float64) * 0.2).requires_grad_()
    A_BT = torch.randn(3, 1, dtype=torch.float64).expand(3, 4)
    mask_BT = torch.tensor([[1, 1, 0, 1], [1, 0, 0, 0], [1, 1, 1, 1]])
    options: dict[str, Any] = {"importance_sampling": "seq" if kind == "seq_token" else kind, "loss_agg_mode": mode}
    options |= {"max_response_length": 8, **WIDE}
    numeric_BT = torch.zeros(3, 4, dtype=torch.float64)
    for i in range(3):
        for t in range(4):
            step_BT = torch.zeros(3, 4, dtype=torch.float64)
            step_BT[i, t] = 1e-6
            up = loss_of(logp_BT.detach() + step_BT, A_BT, mask_BT, **options).loss
            down = loss_of(logp_BT.detach() - step_BT, A_BT, mask_BT, **options).loss
            numeric_BT[i, t] = (up - down) / 2e-6
    backward(loss_of(logp_BT, A_BT, mask_BT, **options | {"importance_sampling": kind}).loss)
    torch.testing.assert_close(grad_of(logp_BT), numeric_BT, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@pytest.mark.parametrize("shape", [(0, 4), (2, 0), (2, 3)])
def test_nothing_to_count_gives_zero_and_no_nan(mode: str, shape: tuple[int, int]) -> None:
    logp_BT = torch.full(shape, -1.0, requires_grad=True)
    loss, stats = loss_of(logp_BT, torch.ones(shape), torch.zeros(shape), loss_agg_mode=mode, max_response_length=5)
    backward(loss)
    assert loss.item() == 0.0
    assert not grad_of(logp_BT).any()
    assert set(figures(stats).values()) == {0.0}


@pytest.mark.parametrize("kind", IMPORTANCE_SAMPLINGS)
def test_an_empty_sequence_adds_nothing(kind: str) -> None:
    delta_BT, A_BT = torch.full((1, 2), 0.1), torch.ones(1, 2)
    alone, _ = loss_of(delta_BT, A_BT, importance_sampling=kind, **WIDE)
    mask_BT = torch.tensor([[1, 1], [0, 0]])
    beside, _ = loss_of(delta_BT.repeat(2, 1), A_BT.repeat(2, 1), mask_BT, importance_sampling=kind, **WIDE)
    assert alone.item() == beside.item()


@pytest.mark.parametrize("kind", IMPORTANCE_SAMPLINGS)
def test_what_stands_on_padding_reaches_neither_loss_nor_gradient(kind: str) -> None:
    logp_BT = torch.tensor([[0.1, math.nan]], requires_grad=True)
    A_BT, mask_BT = torch.tensor([[1.0, math.inf]]), torch.tensor([[True, False]])
    loss, stats = loss_of(logp_BT, A_BT, mask_BT, importance_sampling=kind, **WIDE)
    backward(loss)
    assert loss.item() == pytest.approx(-math.exp(0.1))
    assert grad_of(logp_BT).tolist()[0] == pytest.approx([-math.exp(0.1), 0.0])
    assert all(math.isfinite(value) for value in figures(stats).values())


def test_only_logp_has_a_gradient() -> None:
    logp_BT, old_BT, A_BT = (torch.zeros(1, 2, requires_grad=True) for _ in range(3))
    loss, stats = policy_loss(logp_BT, old_BT, A_BT, torch.ones(1, 2))
    backward(loss)
    assert old_BT.grad is None
    assert A_BT.grad is None
    assert not any(value.requires_grad for value in stats.values())


def test_bf16_is_computed_in_float32() -> None:
    logp_BT = torch.tensor([[-1.0, -2.0]], dtype=torch.bfloat16, requires_grad=True)
    old_BT = torch.tensor([[-1.0001, -2.0003]])
    loss, _ = policy_loss(logp_BT, old_BT, torch.ones(1, 2), torch.ones(1, 2))
    backward(loss)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(-math.exp(2e-4), abs=2e-7)
    assert grad_of(logp_BT).dtype == torch.bfloat16


def test_reported_moments() -> None:
    reported = figures(policy_loss(OLD + DELTA, OLD, ADVANTAGE, MASK).stats)
    assert reported["log_ratio_mean"] == pytest.approx(-0.15)
    assert reported["log_ratio_std"] == pytest.approx(0.5 / math.sqrt(2))
    assert reported["log_ratio_max"] == pytest.approx(0.4)
    assert reported["token_log_ratio_mean"] == pytest.approx(-1.0 / 5)
    assert reported["k1"] == pytest.approx(1.0 / 5)
    k3 = [math.exp(d) - d - 1 for d in (0.3, -0.1, -0.6, -0.3, -0.3)]
    assert reported["k3"] == pytest.approx(sum(k3) / 5, rel=1e-5)
    assert reported["advantage_mean"] == pytest.approx(1 / 5)


def test_kl_penalty_is_aggregated_like_the_loss() -> None:
    l_BT = torch.tensor([[1.0, 3.0, 100.0], [5.0, 100.0, 100.0]])
    mask_BT = torch.tensor([[1, 1, 0], [1, 0, 0]])
    assert aggregate_loss(l_BT, mask_BT).item() == 3.5
    assert aggregate_loss(l_BT, mask_BT, num_sequences=7).item() == 1.0
    assert aggregate_loss(l_BT, mask_BT, loss_agg_mode="token-mean", num_tokens=18).item() == 0.5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"importance_sampling": "sequence"}, "importance_sampling is 'sequence'"),
        ({"loss_agg_mode": "mean"}, "loss_agg_mode is 'mean'"),
        ({"loss_agg_mode": "seq-mean-token-sum-norm"}, "max_response_length is None"),
        ({"pg_clip_low": -0.1}, r"pg_clip_low is -0\.1"),
        ({"pg_clip_high": math.inf}, "pg_clip_high is inf"),
        ({"dual_clip": 1.0}, r"dual_clip is 1\.0"),
        ({"num_sequences": -1}, "num_sequences is -1"),
    ],
)
def test_refusals(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        loss_of(torch.zeros(1, 2), torch.zeros(1, 2), **options)


def test_refuses_shapes_that_would_broadcast() -> None:
    with pytest.raises(ValueError, match=r"advantage_BT has shape \(2, 1\), logp_BT has \(2, 3\)"):
        policy_loss(OLD, OLD, torch.ones(2, 1), MASK)
    with pytest.raises(ValueError, match=r"must be \[B, T\]"):
        policy_loss(OLD[0], OLD[0], OLD[0], MASK[0])


@pytest.mark.parametrize("kind", ["seq", "token", "seq_token"])
def test_the_loss_is_finite_however_far_the_policy_has_moved(kind: str) -> None:
    logp_BT, old_BT = torch.tensor([[3000.0]], requires_grad=True), torch.tensor([[-1.0]])
    loss = policy_loss(logp_BT, old_BT, torch.tensor([[-1.0]]), torch.ones(1, 1), importance_sampling=kind).loss
    backward(loss)
    assert torch.isfinite(loss)
    assert torch.isfinite(grad_of(logp_BT)).all()
