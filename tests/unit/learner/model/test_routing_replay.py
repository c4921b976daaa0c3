"""Experts are recorded and replayed: router by router, position by position, and over a step of the trainer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from benchmarks.learner.model_types import quiet, tiny_model
from gspo.common.errors import InputError
from gspo.common.model.mixtures import UNREPLAYED_TYPES
from gspo.learner.assembly.rows import Row
from gspo.learner.model.batch import StepBatch, rank_micro_batches
from gspo.learner.model.network import EXPERTS, PolicyModel, load_policy_model
from gspo.learner.model.routing_replay import Routers, RoutingReplay
from gspo.learner.training.trainer import Trainer
from tests.support.tiny_model import make_tiny_model
from tests.support.training.rollout_rows import make_config, make_rows, train

REPLAY = {"pg_clip": 0.05, "old_logprobs": "recompute", "routing_replay": "learner"}
CPU = torch.device("cpu")


def few_rows(folder: Path, **sizes: Any) -> list[Row]:
    return make_rows(folder, num_groups=4, **sizes)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("mixture"), scale=4.0, num_experts=8)


@pytest.fixture
def policy(folder: Path) -> PolicyModel:
    return load_policy_model(folder, make_config(folder)).eval()


def states(causal_lm: Any, token_RS: Tensor) -> Tensor:
    hidden: Tensor = causal_lm.base_model(input_ids=token_RS, use_cache=False).last_hidden_state
    return hidden


def routers_of(causal_lm: nn.Module) -> list[nn.Parameter]:
    return [weight for name, weight in causal_lm.named_parameters() if name.endswith("mlp.gate.weight")]


@torch.no_grad()
def move_routers(causal_lm: nn.Module) -> None:
    """Far enough that most tokens would have other experts."""
    for weight in routers_of(causal_lm):
        weight.copy_(weight.roll(1, 0) + 0.01)


@pytest.mark.parametrize(
    "kind",
    [
        "qwen3_moe",
        # A softmax over the chosen logits alone.
        "gpt_oss",
        # A bias that counts in the choice and not in the weight, and groups of experts, which topk chooses too.
        "deepseek_v3",
        "deepseek_v2",
    ],
)
@torch.no_grad()
def test_every_kind_of_router_takes_other_experts(kind: str) -> None:
    with quiet():
        model = tiny_model(kind)
    model.set_experts_implementation(EXPERTS)
    token_RS = (torch.arange(24) * 7 % 90).view(2, 12)
    expected = states(model, token_RS)
    routers = Routers(model)
    with routers.recording() as recorded:
        assert torch.equal(states(model, token_RS), expected)
    expert_NC = recorded()
    with routers.replaying(expert_NC) as changed_N:
        assert torch.equal(states(model, token_RS), expected)
    assert not changed_N.any()
    with routers.replaying((expert_NC + 1) % routers.num_experts) as changed_N:
        assert not torch.allclose(states(model, token_RS), expected)
    assert changed_N.any()
    assert torch.equal(states(model, token_RS), expected), "it goes on after the block"


@pytest.mark.parametrize("kind", ["phimoe", "jetmoe", "llama"])
def test_a_model_whose_experts_cannot_be_replayed_is_refused(kind: str) -> None:
    with quiet():
        model = tiny_model(kind)
    with pytest.raises(InputError, match=r"algorithm\.routing_replay: learner, but") as caught:
        Routers(model)
    assert caught.value.fix == "Set it to none"
    assert (kind in UNREPLAYED_TYPES) == (kind != "llama")


@torch.no_grad()
def test_the_weights_are_those_of_the_present_router(policy: PolicyModel) -> None:
    """Qwen3-MoE's: the softmax over all experts, at the recorded ones, divided by its sum."""
    lm, token_RS = policy.causal_lm, torch.arange(3, 15)[None]
    routers = Routers(lm)
    with routers.recording() as recorded:
        states(lm, token_RS)
    move_routers(lm)
    inputs: list[Tensor] = []
    used: list[tuple[Tensor, Tensor]] = []
    block = lm.base_model.layers[0].mlp
    block.gate.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    block.experts.register_forward_pre_hook(lambda _, args: used.append(args[1:]))
    with routers.replaying(recorded()) as changed_N:
        states(lm, token_RS)
    assert changed_N.float().mean() > 0.5
    expert_NK, weight_NK = used[0]
    assert torch.equal(expert_NK, recorded()[:, :2])
    expected_NK = (inputs[0] @ block.gate.weight.T).softmax(-1).gather(-1, expert_NK)
    torch.testing.assert_close(weight_NK, expected_NK / expected_NK.sum(-1, keepdim=True))


def in_branches(batch: StepBatch, row: int, of_rollout: Tensor) -> list[Tensor]:
    """The parts of a rollout's positions that are its branches."""
    return list(torch.split(of_rollout, [branch.length for branch in batch.branches[row]]))


def step_experts(policy: PolicyModel, rows: list[Row], *, packing: bool, max_tokens: int) -> dict[int, Tensor]:
    """Each rollout's experts, recorded in micro-batches of this size."""
    batch, replay = StepBatch.from_rows(rows), RoutingReplay(Routers(policy.causal_lm), None, CPU)
    replay.begin(batch)
    for micro in rank_micro_batches(batch, range(len(batch)), max_tokens, rank=0, num_ranks=1, packing=packing):
        with torch.no_grad(), replay.recording(micro):
            policy(micro.input_RS, micro.line, micro.state_N, micro.target_N)
    return replay._expert_SC


def test_each_position_has_its_own_experts_packed_padded_and_alone(folder: Path, policy: PolicyModel) -> None:
    rows = few_rows(folder)
    batch, routers = StepBatch.from_rows(rows), Routers(policy.causal_lm)
    alone = []
    for row in range(len(batch)):
        experts = []
        for branch_S in in_branches(batch, row, batch.sequences[row]):
            with torch.no_grad(), routers.recording() as recorded:
                states(policy.causal_lm, branch_S[None])
            experts.append(recorded().byte())
        alone.append(torch.cat(experts))
    assert max(map(len, batch.branches)) == 3
    assert len({tuple(map(tuple, expert_SC.tolist())) for expert_SC in alone}) > len(rows) / 2
    for packing, max_tokens in ((True, 256), (False, 256)):
        kept = step_experts(policy, rows, packing=packing, max_tokens=max_tokens)
        assert all(torch.equal(kept[row], expert_SC) for row, expert_SC in enumerate(alone)), (packing, max_tokens)
        assert sum(kept[row].nbytes for row in kept) == 2 * 2 * sum(map(len, batch.sequences)), "bytes of a token"


@pytest.mark.parametrize("packing", [True, False])
def test_a_replay_gives_each_position_its_own_experts_back(folder: Path, policy: PolicyModel, packing: bool) -> None:
    """With moved routers, recorded in other micro-batches than replayed, against one row at a time."""
    rows, lm = few_rows(folder), policy.causal_lm
    batch, routers = StepBatch.from_rows(rows), Routers(lm)
    replay = RoutingReplay(routers, None, CPU)
    replay.begin(batch)
    cut: dict[str, Any] = {"rank": 0, "num_ranks": 1}
    with torch.no_grad():
        for micro in rank_micro_batches(batch, range(len(batch)), 64, packing=not packing, **cut):
            with replay.recording(micro):
                policy(micro.input_RS, micro.line, micro.state_N, micro.target_N)
        move_routers(lm)
        (micro,) = rank_micro_batches(batch, range(len(batch)), 100_000, packing=packing, **cut)
        with replay.around(micro):
            logp_N, _ = policy(micro.input_RS, micro.line, micro.state_N, micro.target_N)
        own_N, _ = policy(micro.input_RS, micro.line, micro.state_N, micro.target_N)
        logp_RT, own_RT = micro.spread(logp_N), micro.spread(own_N)
        for place, row in enumerate(micro.row_R.tolist()):
            (alone,) = rank_micro_batches(batch, [row], 100_000, packing=False, **cut)
            experts = in_branches(batch, row, replay._expert_SC[row].short())
            with routers.replaying(pad_sequence(experts, batch_first=True, padding_value=-1).flatten(0, 1)):
                expected, _ = policy(alone.input_RS, None, alone.state_N, alone.target_N)
            torch.testing.assert_close(logp_RT[place][micro.mask_RT[place]], expected, rtol=1e-5, atol=1e-5)
    assert (logp_RT - own_RT).abs().max() > 0.1, "the routers did not move"
    replay.end_update("")
    assert 0.5 < replay.end()["experts_changed.sum"] / len(micro.state_N) <= 1


def weights_after(folder: Path, rows: list[Row], algorithm: dict[str, Any], **learner: Any) -> tuple[Any, Any]:
    config = make_config(folder, algorithm=algorithm, learner={"learning_rate": 1e-2, **learner})
    trainer = Trainer(config, folder)
    return train(trainer, 1, rows).metrics, trainer.engine.policy()


def test_at_unchanged_weights_a_replay_changes_no_bit(folder: Path) -> None:
    """One mini-batch, cut as the pass that records."""
    rows = [replace(row, advantage=row.advantage or 1.0) for row in few_rows(folder, num_mini_batches=1)]
    plain = {**REPLAY, "routing_replay": "none"}
    (figures, weights), (expected, others) = (weights_after(folder, rows, keys) for keys in (REPLAY, plain))
    assert figures.pop("experts_changed") == 0
    assert figures == expected
    assert all(torch.equal(weight, others[name]) for name, weight in weights.items())


def distance(first: dict[str, Tensor], second: dict[str, Tensor]) -> float:
    return max(float((first[name] - weight).norm() / weight.norm()) for name, weight in second.items())


def test_a_step_is_the_same_however_its_passes_are_made(folder: Path) -> None:
    """Four mini-batches, twice, at a rate that moves most tokens; some have no backward pass."""
    rows = [replace(row, advantage=0.0 if row.group == 3 else row.advantage) for row in few_rows(folder)]
    keys = {**REPLAY, "ppo_epochs": 2}
    figures, weights = weights_after(folder, rows, keys)
    assert figures["experts_changed"] > 0.3
    cases: list[dict[str, Any]] = [
        {"micro_batch_tokens": 128, "gradient_checkpointing": True, "zero_stage": 1},
        {"packing": False, "zero_stage": 2},
        {"zero_stage": 3, "gradient_checkpointing": True},
    ]
    for learner in cases:
        others, again = weights_after(folder, rows, keys, **learner)
        assert others["experts_changed"] == pytest.approx(figures["experts_changed"], abs=0.02), learner
        assert others["loss"] == pytest.approx(figures["loss"], rel=1e-3), learner
        assert distance(again, weights) < 1e-3, learner
    assert distance(weights_after(folder, rows, {**keys, "routing_replay": "none"})[1], weights) > 1e-2


def test_routers_are_trained_also_after_their_choice_has_moved(folder: Path) -> None:
    """In the last of four updates most tokens have replayed experts: its gradient reaches every router."""
    trainer = Trainer(make_config(folder, algorithm=REPLAY, learner={"learning_rate": 1e-2}), folder)
    norms: list[list[float]] = []
    apply = trainer.engine.apply

    def noted(max_grad_norm: float) -> float:
        gradients = [weight.grad for weight in routers_of(trainer.engine.model)]
        norms.append([0.0 if gradient is None else float(gradient.norm()) for gradient in gradients])
        return apply(max_grad_norm)

    trainer.engine.apply = noted  # type: ignore[method-assign]
    assert train(trainer, 1, few_rows(folder)).metrics["experts_changed"] > 0.3
    assert len(norms) == 4 and all(norm > 1e-4 for of_update in norms for norm in of_update)


@pytest.mark.parametrize("last", [1, 2, 3])
def test_every_update_replays(folder: Path, last: int) -> None:
    """The figure is of the last applied update, so those after it are left out."""
    trainer = Trainer(make_config(folder, algorithm=REPLAY, learner={"learning_rate": 1e-2}), folder)
    figures = train(trainer, 1, few_rows(folder), not_applied=range(last + 1, 4)).metrics
    assert figures["experts_changed"] > 0.1


def test_adapters_of_experts_and_routers_replay(folder: Path) -> None:
    """And the policy without its adapters, to which the KL term compares, routes by itself."""
    lora = {"rank": 4, "target_modules": ["all-linear"]}
    keys = {**REPLAY, "use_kl_loss": True}
    figures, weights = weights_after(folder, few_rows(folder), keys, lora=lora)
    assert 0 < figures["experts_changed"] <= 1
    _, again = weights_after(folder, few_rows(folder), keys, lora=lora, gradient_checkpointing=True)
    assert distance(again, weights) < 1e-3
