"""The counts of a loaded model against torch's own counter of the operations that run."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from gspo.learner.model.batch import PackedRollouts
from gspo.learner.model.flop_counts import count_flops
from gspo.learner.model.network import load_policy_model
from tests.support.tiny_model import make_tiny_model
from tests.support.training.rollout_rows import make_config

# Rollouts of one length, packed: R rows of S positions, of which N are predicted in all.
R, S, N = 3, 64, 48
MODELS: dict[str, dict[str, Any]] = {
    "dense": {},
    "mixture": {"num_experts": 8},
    "untied": {"tie_word_embeddings": False},
}


def grouped_product(a: Any, b: Any, *_args: Any, **_kwargs: Any) -> int:
    """Each row of `a` meets the matrix of its own group."""
    return int(2 * prod(a) * b[-1])


def added_product(_sum: Any, a: Any, b: Any, **_kwargs: Any) -> int:
    """A product that is added in place."""
    return int(2 * prod(a) * b[-1])


def batched_product(a: Any, b: Any, *_args: Any, **_kwargs: Any) -> int:
    """A column times a row is the angles of positions, which other versions of transformers multiply one by one."""
    return 0 if a[-1] == 1 else int(2 * prod(a) * b[-1])


# Operations that torch's counter does not know, or counts though no weight has a part in them.
OTHERS: dict[Any, Any] = {
    torch.ops.aten._grouped_mm: grouped_product,
    torch.ops.aten.addmm_: added_product,
    torch.ops.aten.bmm: batched_product,
}


def counted_by_torch(folder: Path, **learner: Any) -> tuple[Any, int]:
    """The policy, and the operations of one forward and backward pass."""
    policy = load_policy_model(folder, make_config(folder, learner=learner))
    token_S = torch.arange(R * S) % 90
    state_N = torch.linspace(0, R * S - 1, N).long()
    with FlopCounterMode(display=False, custom_mapping=OTHERS) as counter:
        logp_N, _ = policy(token_S[None], PackedRollouts.of([S] * R, R * S), state_N, token_S[state_N])
        logp_N.sum().backward()
    return policy.causal_lm, counter.get_total_flops()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_training_pass_is_counted_as_torch_counts_it(tmp_path: Path, name: str, dtype: str) -> None:
    causal_lm, by_torch = counted_by_torch(make_tiny_model(tmp_path, **MODELS[name]), dtype=dtype)
    model = count_flops(causal_lm)
    ours = R * (model.forward(S, 0) + model.backward(S, 0)) + 6 * N * model.head
    # No model flops: pairs with later tokens, which a mask removes, and the logits that the backward pass makes again.
    masked = 12 * model.attention[0] * R * S * (S - 1) // 2
    assert by_torch == ours + masked + 2 * N * model.head


def test_adapters_alone_are_trained(tmp_path: Path) -> None:
    causal_lm, by_torch = counted_by_torch(make_tiny_model(tmp_path), lora={"rank": 4})
    model = count_flops(causal_lm)
    ours = R * (model.forward(S, 0) + model.backward(S, 0)) + 4 * N * model.head
    masked = 12 * model.attention[0] * R * S * (S - 1) // 2
    # Below the first adapters nothing needs a gradient: the inputs of the first layer's projections.
    attention = causal_lm.base_model.layers[0].self_attn
    first = [getattr(attention, f"{kind}_proj") for kind in "qkv"]
    spared = sum(layer.base_layer.weight.numel() + layer.lora_A["default"].weight.numel() for layer in first)
    assert by_torch == ours + masked + 2 * N * model.head - 2 * R * S * spared
    assert model.trained_head == 0 < model.trained_body < 0.1 * model.body


def test_adapters_of_experts_count_by_the_share_that_a_token_passes(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, num_experts=8)
    plain = count_flops(load_policy_model(folder, make_config(folder)).causal_lm)
    adapted = count_flops(load_policy_model(folder, make_config(folder, learner={"lora": {"rank": 4}})).causal_lm)
    # Of each layer: q, k, v, o (width 64, keys 32) and the router (8) at rank 4. Of two experts gate and up [64, 64] in
    # one tensor, for which peft doubles the rank, and down [64, 32].
    of_all = 4 * ((64 + 64) + (64 + 32) + (64 + 32) + (64 + 64) + (64 + 8))
    assert adapted.trained_body == 2 * (of_all + 2 * (8 * (64 + 64) + 4 * (32 + 64)))
    assert adapted.body == plain.body + adapted.trained_body


def test_layers_with_a_window_see_that_many_tokens(tmp_path: Path) -> None:
    causal_lm = load_policy_model(make_tiny_model(tmp_path), make_config(tmp_path)).causal_lm
    causal_lm.config.layer_types = ["full_attention", "sliding_attention"]
    causal_lm.config.sliding_window = 16
    model = count_flops(causal_lm)
    assert model.attention == {0: 64, 16: 64}
    seen = [min(position, 16) for position in range(1, S + 1)]
    assert model.forward(S, 0) - 2 * S * model.body == 4 * 64 * (sum(range(1, S + 1)) + sum(seen))
