"""Our loss and gradient against TRL's own code, and against verl's formula, on equal settings.

TRL's trainer computes its loss in one method; it is called here on a stand-in that has the method's settings and hands
it our log-probs. verl cannot be installed beside our engines, so its GSPO loss is written out from its documentation.
"""

from collections import defaultdict
from collections.abc import Callable
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from gspo_core.advantage import normalize_rewards
from gspo_core.kl import kl_divergence
from gspo_core.loss import aggregate_loss, policy_loss
from gspo_core.stats import figures
from tests.unit.gspo_core.loss.objective_loss import objective_loss

T_MAX = 20
CLIPS = [(3e-4, 4e-4), (0.2, 0.27)]


@pytest.fixture(scope="module")
def trl_loss() -> Callable[..., Any]:
    """TRL's loss as a function of its trainer's settings and its inputs."""
    with pytest.MonkeyPatch.context() as patch:
        # With vLLM in sight TRL imports it, which takes longer than everything else here.
        patch.setattr(import_module("trl.import_utils"), "is_vllm_available", lambda *args, **kwargs: False)
        GRPOTrainer = import_module("trl.trainer.grpo_trainer").GRPOTrainer

    def loss(
        logp_BT: Tensor, inputs: dict[str, Tensor], entropy_BT: Tensor | None = None, **settings: Any
    ) -> tuple[Tensor, dict[str, Any]]:
        entropy_BT = torch.zeros_like(logp_BT) if entropy_BT is None else entropy_BT
        trainer = SimpleNamespace(
            _get_per_token_logps_and_entropies=lambda *args, **kwargs: (logp_BT, entropy_BT, None),
            _metrics={"train": defaultdict(list)},
            _entropy_bonus_enabled="entropy_coef" in settings,
            accelerator=SimpleNamespace(
                gather=lambda x: x, reduce=lambda x, reduction: x, num_processes=1, sync_gradients=True
            ),
            args=SimpleNamespace(
                delta=settings.pop("delta", None), steps_per_generation=1, use_bias_correction_kl=False
            ),
            aux_loss_enabled=False,
            current_gradient_accumulation_steps=1,
            max_completion_length=T_MAX,
            model=SimpleNamespace(training=True),
            off_policy_mask_threshold=None,
            top_entropy_quantile=1.0,
            use_adaptive_entropy=False,
            use_vllm=False,
            **{"beta": 0.0, "importance_sampling_level": "sequence", "loss_type": "grpo"} | settings,
        )
        ids = torch.zeros(logp_BT.shape, dtype=torch.long)
        prompt = {"prompt_ids": ids[:, :1], "prompt_mask": ids[:, :1] + 1, "completion_ids": ids}
        result = GRPOTrainer._compute_loss(trainer, None, {**prompt, **inputs})
        return result, {name: values[-1] for name, values in trainer._metrics["train"].items()}

    return loss


def case(spread: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Seven answers of unlike length, one advantage each, log-probs that moved by `spread` a token."""
    torch.manual_seed(0)
    mask_BT = (torch.arange(9) < torch.tensor([9, 1, 4, 7, 2, 9, 5])[:, None]).float()
    old_BT = -torch.rand(7, 9, dtype=torch.float64) * 3
    logp_BT = (old_BT + torch.randn(7, 9, dtype=torch.float64) * spread).requires_grad_()
    return logp_BT, old_BT, torch.randn(7, dtype=torch.float64), mask_BT


def gradient(loss: Tensor, logp_BT: Tensor) -> Tensor:
    return torch.autograd.grad(loss, logp_BT)[0]


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("spread", [1e-3, 0.5])
@pytest.mark.parametrize(("level", "kind"), [("sequence", "seq"), ("sequence", "seq_token"), ("token", "token")])
@pytest.mark.parametrize(
    ("loss_type", "mode"),
    [
        ("grpo", "seq-mean-token-mean"),
        ("bnpo", "token-mean"),
        ("dr_grpo", "seq-mean-token-sum-norm"),
        ("luspo", "seq-mean-token-sum"),
    ],
)
def test_trl(
    trl_loss: Callable[..., Any],
    loss_type: str,
    mode: str,
    level: str,
    kind: str,
    spread: float,
    clip: tuple[float, float],
) -> None:
    logp_BT, old_BT, A_B, mask_BT = case(spread)
    inputs = {"advantages": A_B, "completion_mask": mask_BT, "old_per_token_logps": old_BT}
    settings = {"loss_type": loss_type, "importance_sampling_level": level}
    theirs, metrics = trl_loss(logp_BT, inputs, epsilon_low=clip[0], epsilon_high=clip[1], **settings)
    ours, stats = policy_loss(
        logp_BT,
        old_BT,
        A_B[:, None].expand_as(old_BT),
        mask_BT,
        importance_sampling=kind,
        pg_clip_low=clip[0],
        pg_clip_high=clip[1],
        loss_agg_mode=mode,
        max_response_length=T_MAX,
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(gradient(ours, logp_BT), gradient(theirs, logp_BT), rtol=1e-10, atol=1e-14)
    unit = "tokens" if level == "token" else "sequences"
    for side in ("low", "high"):
        assert figures(stats)[f"clipped_{side}_{unit}"] == pytest.approx(metrics[f"clip_ratio/{side}_mean"])


@pytest.mark.parametrize("spread", [1e-3, 0.9])
@pytest.mark.parametrize(("level", "kind"), [("token", "token"), ("sequence", "seq"), ("sequence", "seq_token")])
def test_trl_s_cispo(trl_loss: Callable[..., Any], level: str, kind: str, spread: float) -> None:
    """TRL's epsilon_high is the largest weight itself; it has no lower bound, and divides by the step's tokens."""
    logp_BT, old_BT, A_B, mask_BT = case(spread)
    inputs = {"advantages": A_B[:, None], "completion_mask": mask_BT, "old_per_token_logps": old_BT}
    inputs |= {"num_items_in_batch": mask_BT.sum()}
    theirs, _ = trl_loss(logp_BT, inputs, loss_type="cispo", epsilon_high=1.5, importance_sampling_level=level)
    ours, stats = objective_loss(
        logp_BT,
        old_BT,
        A_B[:, None].expand_as(old_BT),
        mask_BT,
        objective="cispo",
        importance_sampling=kind,
        low=1.0,
        high=0.5,
        loss_agg_mode="token-mean",
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(gradient(ours, logp_BT), gradient(theirs, logp_BT), rtol=1e-10, atol=1e-14)
    assert (figures(stats)["clipped_high_tokens"] > 0) == (spread > 0.5)


def test_trl_with_kl_and_dual_clip(trl_loss: Callable[..., Any]) -> None:
    logp_BT, old_BT, A_B, mask_BT = case(0.7)
    ref_BT = old_BT + torch.randn(7, 9, dtype=torch.float64) * 0.3
    inputs = {"advantages": A_B, "completion_mask": mask_BT, "old_per_token_logps": old_BT}
    inputs["ref_per_token_logps"] = ref_BT
    theirs, _ = trl_loss(logp_BT, inputs, epsilon_low=0.2, epsilon_high=0.27, beta=0.04, delta=1.4)
    ours, stats = policy_loss(
        logp_BT, old_BT, A_B[:, None].expand_as(old_BT), mask_BT, pg_clip_low=0.2, pg_clip_high=0.27, dual_clip=1.4
    )
    ours = ours + 0.04 * aggregate_loss(kl_divergence(logp_BT, ref_BT, "k3"), mask_BT)
    assert figures(stats)["dual_clipped_tokens"] > 0
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(gradient(ours, logp_BT), gradient(theirs, logp_BT), rtol=1e-10, atol=1e-14)


def test_trl_s_advantages_have_another_epsilon_and_no_other_difference() -> None:
    """(r - mean) / (std + 1e-4), std unbiased, in TRL; 1e-6 here."""
    rewards_B = torch.tensor([0.0, 1.0, 1.0, 0.25], dtype=torch.float64)
    theirs_B = (rewards_B - rewards_B.mean()) / (rewards_B.std() + 1e-4)
    ours_B = normalize_rewards(rewards_B, torch.zeros(4, dtype=torch.long), reward_norm="group")
    torch.testing.assert_close(ours_B, theirs_B, rtol=5e-4, atol=0)


def test_trl_s_entropy_bonus_is_a_mean_over_tokens(trl_loss: Callable[..., Any]) -> None:
    logp_BT, old_BT, A_B, mask_BT = case(0.1)
    entropy_BT = torch.rand(7, 9, dtype=torch.float64).requires_grad_()
    inputs = {"advantages": A_B, "completion_mask": mask_BT, "old_per_token_logps": old_BT}
    settings = {"loss_type": "bnpo", "epsilon_low": 0.2, "epsilon_high": 0.27}
    plain, _ = trl_loss(logp_BT, inputs, entropy_BT=entropy_BT, **settings)
    theirs, _ = trl_loss(logp_BT, inputs, entropy_BT=entropy_BT, entropy_coef=0.3, **settings)
    ours = -0.3 * aggregate_loss(entropy_BT, mask_BT, loss_agg_mode="token-mean")
    torch.testing.assert_close(ours, theirs - plain, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("failed", [None, 1])
def test_trl_s_rloo_advantage(failed: int | None) -> None:
    """The mean of the others that have a score, as trl 1.16's RLOOTrainer: (sum - r) / (count - 1), NaN left out."""
    rewards_B = torch.tensor([0.0, 1.0, 1.0, 0.25], dtype=torch.float64)
    theirs_B, kept_B = rewards_B.clone(), torch.arange(4) != (-1 if failed is None else failed)
    theirs_B[~kept_B] = torch.nan
    theirs_B = theirs_B - (torch.nansum(theirs_B) - theirs_B) / (kept_B.sum() - 1)
    ours_B = normalize_rewards(rewards_B[kept_B], torch.zeros(int(kept_B.sum())), reward_norm="leave_one_out")
    torch.testing.assert_close(ours_B, theirs_B[kept_B], rtol=1e-12, atol=1e-14)


def verl_gspo_loss(old_BT: Tensor, logp_BT: Tensor, A_BT: Tensor, mask_BT: Tensor, low: float, high: float) -> Tensor:
    """verl's: the GSPO-token form, its log-ratio at most 10, aggregated as seq-mean-token-mean."""
    length_B = mask_BT.sum(-1).clamp(min=1)
    log_s_B1 = (((logp_BT - old_BT) * mask_BT).sum(-1) / length_B).detach()[:, None]
    ratio_BT = (logp_BT - logp_BT.detach() + log_s_B1).clamp(max=10.0).exp()
    l_BT = torch.maximum(-A_BT * ratio_BT, -A_BT * ratio_BT.clamp(1 - low, 1 + high))
    return ((l_BT * mask_BT).sum(-1) / length_B).sum() / (mask_BT.sum(-1) > 0).sum()


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("spread", [1e-3, 0.5])
@pytest.mark.parametrize("kind", ["seq", "seq_token"])
def test_verl(kind: str, spread: float, clip: tuple[float, float]) -> None:
    logp_BT, old_BT, A_B, mask_BT = case(spread)
    mask_BT[3] = 0  # verl leaves empty sequences out of its mean, as we do
    A_BT = A_B[:, None].expand_as(old_BT)
    theirs = verl_gspo_loss(old_BT, logp_BT, A_BT, mask_BT, *clip)
    ours, _ = policy_loss(
        logp_BT, old_BT, A_BT, mask_BT, importance_sampling=kind, pg_clip_low=clip[0], pg_clip_high=clip[1]
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(gradient(ours, logp_BT), gradient(theirs, logp_BT), rtol=1e-10, atol=1e-14)


def test_verl_with_an_advantage_for_each_token() -> None:
    logp_BT, old_BT, _, mask_BT = case(0.5)
    A_BT = torch.randn(7, 9, dtype=torch.float64)
    theirs = verl_gspo_loss(old_BT, logp_BT, A_BT, mask_BT, 0.2, 0.27)
    options: dict[str, Any] = {"importance_sampling": "seq_token", "pg_clip_low": 0.2, "pg_clip_high": 0.27}
    ours, _ = policy_loss(logp_BT, old_BT, A_BT, mask_BT, **options)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(gradient(ours, logp_BT), gradient(theirs, logp_BT), rtol=1e-10, atol=1e-14)


def verl_bounded_loss(
    kind: str, old_BT: Tensor, logp_BT: Tensor, A_BT: Tensor, mask_BT: Tensor, low: float, high: float
) -> Tensor:
    """verl's cispo, dppo_tv and dppo_kl, with a mean over tokens: -sg[w] A logp, w bounded, or 0 by divergence."""
    ratio_BT, p_BT, q_BT = (logp_BT - old_BT).exp().detach(), logp_BT.exp().detach(), old_BT.exp()
    if kind == "cispo":
        w_BT = ratio_BT.clamp(1 - low, 1 + high)
    elif kind == "dppo_tv":
        w_BT = ratio_BT * torch.where(A_BT > 0, p_BT - q_BT <= high, p_BT - q_BT >= -low)
    else:
        far_BT = q_BT * (q_BT / p_BT).log() + (1 - q_BT) * ((1 - q_BT) / (1 - p_BT)).log()
        w_BT = ratio_BT * torch.where(A_BT > 0, (far_BT <= high) | (p_BT <= q_BT), (far_BT <= low) | (p_BT >= q_BT))
    return -(w_BT * A_BT * logp_BT * mask_BT).sum() / mask_BT.sum()


@pytest.mark.parametrize(
    ("kind", "bounds"), [("cispo", (0.2, 0.3)), ("dppo_tv", (0.05, 0.1)), ("dppo_kl", (0.02, 0.05))]
)
def test_verl_s_bounds_by_weight_and_divergence(kind: str, bounds: tuple[float, float]) -> None:
    """Gradients: verl writes DPPO's loss with -sg[ratio] logp in place of -ratio, another value of the same slope."""
    logp_BT, old_BT, _, mask_BT = case(0.5)
    logp_BT = logp_BT.detach().clamp(max=-1e-3).requires_grad_()
    A_BT = torch.randn(7, 9, dtype=torch.float64)
    theirs = verl_bounded_loss(kind, old_BT, logp_BT, A_BT, mask_BT, *bounds)
    sampling: dict[str, Any] = {"importance_sampling": "token"} if kind == "cispo" else {}
    sides: dict[str, Any] = {"low": bounds[0], "high": bounds[1]}
    ours, stats = objective_loss(
        logp_BT, old_BT, A_BT, mask_BT, objective=kind, loss_agg_mode="token-mean", **sides, **sampling
    )
    torch.testing.assert_close(gradient(ours, logp_BT), gradient(theirs, logp_BT), rtol=1e-9, atol=1e-14)
    reported = figures(stats)
    assert 0 < reported["clipped_low_tokens"] < 0.5
    assert 0 < reported["clipped_high_tokens"] < 0.5


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_trl_s_distillation_in_the_mean_over_sampled_tokens(temperature: float) -> None:
    """GKD's reverse KL of whole distributions. Weighted by the policy, k1 has its value, and k2 and an advantage of
    -k1 have its gradient."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(import_module("trl.import_utils"), "is_vllm_available", lambda *args, **kwargs: False)
        whole = import_module("trl.experimental.gkd.gkd_trainer").GKDTrainer.generalized_jsd_loss
    torch.manual_seed(0)
    student_1V, teacher_1V = torch.randn(2, 1, 30, dtype=torch.float64)
    student_1V.requires_grad_()
    theirs = whole(student_1V[None], teacher_1V[None], beta=1.0, temperature=temperature, reduction="sum")
    # Each token of the vocabulary is an answer of its own.
    logp_V1, teacher_V1 = ((it / temperature).log_softmax(-1).T for it in (student_1V, teacher_1V))
    p_V1 = logp_V1.detach().exp()
    k1_V1 = kl_divergence(logp_V1.detach(), teacher_V1, "k1")
    torch.testing.assert_close((p_V1 * k1_V1).sum(), theirs.detach(), rtol=1e-10, atol=1e-12)
    expected = torch.autograd.grad(theirs, student_1V, retain_graph=True)[0]
    ones_V1 = torch.ones_like(p_V1)
    as_advantage = policy_loss(logp_V1, logp_V1.detach(), -30 * p_V1 * k1_V1, ones_V1, importance_sampling="token").loss
    for ours in ((p_V1 * kl_divergence(logp_V1, teacher_V1, "k2")).sum(), as_advantage):
        gradient_1V = torch.autograd.grad(ours, student_1V, retain_graph=True)[0]
        torch.testing.assert_close(gradient_1V, expected, rtol=1e-9, atol=1e-12)
