"""One rank of four, for test_sequence_ranks.py: lines that ranks share, against the same lines on one rank.

Called by torchrun as `-m tests.integration.learner.line_cases MODELS OUT`; rank 0 writes what each case came to into
OUT.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, distributed
from transformers import BloomConfig, BloomForCausalLM, Qwen3Config, Qwen3ForCausalLM

from gspo.common.errors import InputError
from gspo.learner.model.batch import PackedRollouts
from gspo.learner.model.network import PolicyModel, load_policy_model
from gspo.learner.ranks.sequence_ranks import SequenceRanks
from gspo.learner.training.trainer import Trainer
from tests.integration.learner.rank_cases import run_case
from tests.support.tiny_model import make_tiny_model
from tests.support.training import figure_cases
from tests.support.training.rollout_rows import make_config, make_rows, train
from tests.support.typed.gradients import backward

# Longest first. 66 and 641 tokens are no multiple of 4, 3 are fewer than 4 ranks, and torch's own attention is for
# rollouts longer than 512.
LINES = ([37, 20, 9], [64], [2, 1], [600, 41])
# Case -> model and learner keys. Four query heads and two of keys: two ranks have one of these each, four share them.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("dense", {}),
    "checkpointing": ("dense", {"gradient_checkpointing": True}),
    "adapters": ("dense", {"lora": {"rank": 4}}),
    "windows": ("windows", {}),
    "mixture": ("mixture", {}),
    "bfloat16": ("dense", {"dtype": "bfloat16"}),
}
SIZES = (2, 4)
# Two groups of two ranks, and one of four.
STEPS: dict[str, dict[str, Any]] = {
    "two-groups": {"sequence_ranks": 2, "zero_stage": 2},
    "one-group": {"sequence_ranks": 4, "zero_stage": 3, "gradient_checkpointing": True},
}
# Two groups of two ranks, four ranks of their own, and one group: they record other rollouts than they train.
REPLAYS: dict[str, dict[str, Any]] = {
    "two-groups": {"sequence_ranks": 2, "zero_stage": 1, "gradient_checkpointing": True},
    "four-ranks": {"zero_stage": 3, "packing": False},
    "one-group": {"sequence_ranks": 4},
}


def replay_case(model: Path, learner: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A step of four mini-batches with the experts of its first weights, while the routers move; figures, policy."""
    keys = {"pg_clip": 0.05, "old_logprobs": "recompute", "routing_replay": "learner"}
    trainer = Trainer(make_config(model, algorithm=keys, learner={"learning_rate": 1e-2, **learner}), model)
    return train(trainer, 1, make_rows(model)).metrics, trainer.engine.policy()


def make_models(folder: Path) -> None:
    """Every model of the cases."""
    make_tiny_model(folder / "dense", hidden_size=128, scale=4.0)
    # Of run_case, with heads for four ranks.
    make_tiny_model(folder / "dense" / figure_cases.TEACHER, hidden_size=128, layers=1, seed=1, scale=4.0)
    make_tiny_model(folder / "mixture", hidden_size=128, scale=4.0, num_experts=4)
    make_tiny_model(folder / "windows", hidden_size=128, scale=4.0)
    config = Qwen3Config.from_pretrained(folder / "windows")
    config.use_sliding_window, config.sliding_window, config.max_window_layers = True, 5, 1
    config.layer_types = ["full_attention", "sliding_attention"]
    Qwen3ForCausalLM(config).save_pretrained(folder / "windows")
    # It takes no attention but its own.
    sizes = {"vocab_size": 128, "hidden_size": 64, "n_head": 4, "n_layer": 1}
    BloomForCausalLM(BloomConfig(**sizes)).save_pretrained(folder / "own")


def figures(policy: PolicyModel, lengths: list[int]) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies of every second position, over all tokens and over four [4, N]; the gradient of a sum."""
    torch.manual_seed(sum(lengths))
    S = sum(lengths)
    token_1S = torch.randint(3, 90, (1, S))
    state_N = torch.arange(0, S, 2)
    target_N, weight_4N = torch.randint(3, 90, state_N.shape), torch.randn(4, len(state_N))
    kept_NK = target_N[:, None] + torch.arange(4)
    policy.zero_grad()
    line = PackedRollouts.of(lengths, 256)
    of_all, of_sets = (policy(token_1S, line, state_N, target_N, None, kept) for kept in (None, kept_NK))
    both_4N = torch.stack([*of_all, *of_sets])
    backward((both_4N * weight_4N).sum())
    trained = [p for p in policy.parameters() if p.requires_grad]
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in trained]
    return both_4N.detach(), torch.cat([gradient.flatten() for gradient in gradients])


def differences(policy: PolicyModel, ranks: SequenceRanks, lengths: list[int]) -> tuple[float, float]:
    """Between one rank and those that share the line: the largest of any figure, and the gradient's share."""
    policy.ranks = None
    expected_4N, expected = figures(policy, lengths)
    policy.ranks = ranks
    both_4N, gradient = figures(policy, lengths)
    distributed.all_reduce(gradient, group=ranks._group)
    return float((both_4N - expected_4N).abs().max()), float((gradient - expected).norm() / expected.norm())


def kept_bytes(policy: PolicyModel, ranks: SequenceRanks | None) -> int:
    """Bytes that a forward of a long line keeps for its backward pass, without the weights."""
    policy.ranks = ranks
    kept: dict[int, int] = {}
    weights = {parameter.untyped_storage().data_ptr() for parameter in policy.parameters()}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    lengths = LINES[-1]
    token_1S, state_N = torch.full((1, sum(lengths)), 7), torch.arange(sum(lengths))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        both = policy(token_1S, PackedRollouts.of(lengths, 1024), state_N, token_1S[0])
    assert both[0].requires_grad
    return sum(num_bytes for place, num_bytes in kept.items() if place not in weights)


def main() -> None:
    """Every case at every length, then optimizer steps."""
    models, out = map(Path, sys.argv[1:])
    distributed.init_process_group("gloo")
    first = distributed.get_rank() == 0
    groups = {size: SequenceRanks(size, 100.0) for size in SIZES}
    results: dict[str, Any] = {}
    for name, (model, learner) in CASES.items():
        policy = load_policy_model(models / model, make_config(models / model, learner=learner))
        for size, ranks in groups.items():
            results[f"{name}-{size}"] = [differences(policy, ranks, lengths) for lengths in LINES]
    policy = load_policy_model(models / "dense", make_config(models / "dense"))
    results["kept_bytes"] = {size: kept_bytes(policy, ranks) for size, ranks in [(1, None), *groups.items()]}
    for name, learner in STEPS.items():
        trainer, measured, gradient = run_case(models / "dense", learner)
        policy_tensors = trainer.engine.policy()
        if first:
            (out / f"{name}.json").write_text(json.dumps(measured))
            save_file({"gradient": gradient, **policy_tensors}, out / f"{name}.safetensors")
    for name, learner in REPLAYS.items():
        measured, policy_tensors = replay_case(models / "mixture", learner)
        if first:
            (out / f"replay-{name}.json").write_text(json.dumps(measured))
            save_file(policy_tensors, out / f"replay-{name}.safetensors")
    try:
        Trainer(make_config(models / "own", learner={"sequence_ranks": 2}), models / "own")
    except InputError as error:
        results["refused"] = [error.where, error.rule]
    if first:
        (out / "lines.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
