"""The small Qwen3 or Qwen3-MoE of every example, and what trains it before any rewards: optimizers and their rates.

Not a lesson: each example says itself what its model sees.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

_KV_HEADS, _HEAD_DIM, _EXPERTS_PER_TOKEN = 2, 32, 2
_WARMUP_STEPS, _MOMENTUM = 10, 0.95
# Keeps a router from sending every token to the same experts; far below the answers' loss.
_BALANCE = 0.01


@dataclass(frozen=True)
class Sizes:
    """Sizes of a model.

    Attributes:
        num_experts: That of a layer, two a token; 0 is a dense model.
        expert_size: Width of an expert; None: two are together as wide as the dense layer.
        rope_theta: Base of the wavelengths; short texts want short ones.
    """

    hidden_size: int = 128
    intermediate_size: int = 512
    num_layers: int = 2
    num_heads: int = 4
    num_experts: int = 0
    expert_size: int | None = None
    max_length: int = 512
    rope_theta: float = 1000.0


def build_model(tokenizer: PreTrainedTokenizerFast, sizes: Sizes) -> PreTrainedModel:
    """A random model: a Qwen3, or with experts a Qwen3-MoE of the same layers."""
    keys: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": sizes.hidden_size,
        "intermediate_size": sizes.intermediate_size,
        "num_hidden_layers": sizes.num_layers,
        "num_attention_heads": sizes.num_heads,
        "num_key_value_heads": _KV_HEADS,
        "head_dim": _HEAD_DIM,
        "max_position_embeddings": sizes.max_length,
        "rope_parameters": {"rope_type": "default", "rope_theta": sizes.rope_theta},
        "tie_word_embeddings": True,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    if not sizes.num_experts:
        return Qwen3ForCausalLM(Qwen3Config(**keys))
    experts = {
        "num_experts": sizes.num_experts,
        "num_experts_per_tok": _EXPERTS_PER_TOKEN,
        "moe_intermediate_size": sizes.expert_size or sizes.intermediate_size // _EXPERTS_PER_TOKEN,
        "norm_topk_prob": True,
    }
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**keys, **experts))


def predict(model: PreTrainedModel, token_BT: Tensor) -> tuple[Tensor, Tensor | float]:
    """Logits [B, T, V], and the weighted loss of unevenly used experts.

    Padding is on the right, so causal attention keeps it out without a mask.
    """
    has_experts = isinstance(model, Qwen3MoeForCausalLM)
    output = model(input_ids=token_BT, use_cache=False, **({"output_router_logits": True} if has_experts else {}))
    return output.logits, _BALANCE * output.aux_loss if has_experts else 0.0


class Muon(torch.optim.Optimizer):
    """Momentum, made orthogonal (https://kellerjordan.github.io/posts/muon), for matrices [rows, columns].

    As torch.optim.Muon without decay, but in float32: its bfloat16 takes fifteen times as long on processors without
    bfloat16 instructions.
    """

    @torch.no_grad()
    def step(self) -> None:
        """Move every matrix; all have a gradient."""
        for group in self.param_groups:
            for matrix in group["params"]:
                momentum = self.state[matrix].setdefault("momentum", torch.zeros_like(matrix))
                momentum.lerp_(matrix.grad, 1 - _MOMENTUM)
                direction = orthogonal(matrix.grad.lerp(momentum, _MOMENTUM))
                scale = max(1.0, matrix.shape[0] / matrix.shape[1]) ** 0.5
                matrix.add_(direction, alpha=-group["lr"] * scale)


def orthogonal(matrix: Tensor) -> Tensor:
    """Five steps of Newton and Schulz towards the nearest matrix with singular values of 1."""
    a, b, c = 3.4445, -4.7750, 2.0315
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if is_tall else matrix
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x


def build_optimizers(model: PreTrainedModel, matrix_learning_rate: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, AdamW for all else, stacked experts and routers among it.

    Muon needs a third of the steps that AdamW alone needs.
    """
    muon_ids = {id(p) for name, p in model.named_parameters() if p.ndim == 2 and ".layers." in name}
    muon_ids -= {id(p) for name, p in model.named_parameters() if name.endswith("mlp.gate.weight")}
    matrices = [p for p in model.parameters() if id(p) in muon_ids]
    others = [p for p in model.parameters() if id(p) not in muon_ids]
    return [
        Muon([{"params": matrices, "initial_lr": matrix_learning_rate}], {"lr": matrix_learning_rate}),
        torch.optim.AdamW([{"params": others, "initial_lr": 3e-3}], betas=(0.9, 0.95), weight_decay=0.0),
    ]


def update(
    model: PreTrainedModel, optimizers: Sequence[torch.optim.Optimizer], loss: Tensor, step: int, num_steps: int
) -> None:
    """One step down the gradient of `loss`: linear warm-up, then half a cosine down to a tenth at the last step."""
    cosine = 0.5 * (1 + math.cos(math.pi * step / num_steps))
    factor = min(1.0, step / _WARMUP_STEPS) * (0.1 + 0.9 * cosine)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * factor
        optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        optimizer.step()
