"""Counts the sizes that a model's costs follow from, by its config.json: `python -m gspo.learner.model.profile FOLDER`.

The model runs on torch's fake tensors, which have shapes and no data. So the counts are those of the code that trains,
for every architecture, in seconds and without weights.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.initialization import no_init_weights

from gspo.common.model.heads import shares_lines
from gspo.common.planning.model_profile import ModelProfile
from gspo.learner.model.attention import attention_name
from gspo.learner.model.batch import PackedRollouts
from gspo.learner.model.flop_counts import count_flops
from gspo.learner.model.network import EXPERTS, hidden_states
from gspo.learner.model.rounded_weights import product_weights

# Two sizes give offset and slope. Rows this long use torch's fused attention on every device.
_TOKENS = (2048, 4096)
_ROW = 1024
# A mixture's experts lie in one tensor: [experts, out, in].
_STACKED = 3
# The parameter with two matrices of each expert.
_FUSED = "gate_up_proj"


def profile(folder: Path, *, trust_remote_code: bool = False) -> ModelProfile:
    """Count the model of a folder with a config.json."""
    config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    with FakeTensorMode(allow_non_fake_inputs=True), no_init_weights():
        causal_lm = AutoModelForCausalLM.from_config(
            config,
            dtype=torch.float32,
            attn_implementation=attention_name(),
            experts_implementation=EXPERTS,
            trust_remote_code=trust_remote_code,
        ).train()
        causal_lm.tie_weights()
        saved = {dtype: _saved_by_tokens(causal_lm, dtype) for dtype in ("bfloat16", "float32")}
    return _counts(causal_lm, saved)


def _counts(causal_lm: PreTrainedModel, saved_bytes: dict[str, tuple[float, float]]) -> ModelProfile:
    text, head = causal_lm.config.get_text_config(), causal_lm.get_output_embeddings().weight
    if not (layers := _layers(causal_lm)):
        raise ValueError("it has no layers")
    heads = text.num_attention_heads
    head_width = getattr(text, "head_dim", None) or text.hidden_size // heads
    # Multi-head latent attention keeps one latent for all heads.
    latent = getattr(text, "kv_lora_rank", None)
    kv_heads = 1 if latent else getattr(text, "num_key_value_heads", None) or heads
    kv_width = latent + text.qk_rope_head_dim if latent else 2 * kv_heads * head_width
    return ModelProfile(
        model_type=causal_lm.config.model_type,
        num_layers=len(layers),
        num_parameters=_size(causal_lm),
        num_rounded=sum(weight.numel() for weight in product_weights(causal_lm)),
        largest_weight=max(parameter.numel() for parameter in causal_lm.parameters()),
        flops=count_flops(causal_lm),
        vocabulary=head.shape[0],
        width=head.shape[1],
        num_kv=len(layers) * kv_width,
        num_heads=heads,
        num_kv_heads=kv_heads,
        num_adapted=sum(_adapted_size(layer) for layer in layers),
        max_positions=getattr(text, "max_position_embeddings", 0) or 0,
        shares_lines=shares_lines(causal_lm.config.model_type, getattr(text, "layer_types", None)),
        saved_bytes=saved_bytes,
    )


def _saved_by_tokens(causal_lm: PreTrainedModel, dtype: str) -> tuple[float, float]:
    """Bytes (of a micro-batch, of each of its tokens)."""
    if dtype == "float32" and any(weight.ndim == _STACKED for weight in causal_lm.parameters()):
        # torch's grouped product refuses float32 on fake tensors. Twice the bytes of bfloat16 is an upper bound.
        return 0.0, 2 * _saved_by_tokens(causal_lm, "bfloat16")[1]
    few, many = (_saved_bytes(causal_lm, getattr(torch, dtype), num_tokens) for num_tokens in _TOKENS)
    a_token = (many - few) / (_TOKENS[1] - _TOKENS[0])
    return few - a_token * _TOKENS[0], a_token


def _saved_bytes(causal_lm: PreTrainedModel, dtype: torch.dtype, num_tokens: int) -> int:
    """Bytes of the storages, other than parameters, that one packed micro-batch keeps for its backward pass."""
    weights = {parameter.untyped_storage()._cdata for parameter in causal_lm.parameters()}
    # By their addresses, which no other storage gets while these are referenced.
    saved: dict[int, Any] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            saved[storage._cdata] = storage
        return tensor

    line = PackedRollouts.of([_ROW] * (num_tokens // _ROW), num_tokens)
    input_RS = torch.zeros(1, num_tokens, dtype=torch.long)
    with (
        torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor),
        torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32),
    ):
        hidden_states(causal_lm, input_RS, line)
    return sum(storage.nbytes() for storage in saved.values())


def _layers(causal_lm: PreTrainedModel) -> list[nn.Module]:
    """The decoder layers: of all lists of modules the one with the most parameters."""
    lists = [module for module in causal_lm.base_model.modules() if isinstance(module, nn.ModuleList)]
    largest: nn.ModuleList = max(lists, key=_size)
    return list(largest)


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _adapted_size(layer: nn.Module) -> int:
    """Parameters of a layer's adapters for each of their rank.

    A mixture's stacked experts have one each. An adapter over two matrices of each expert
    has twice the rank.
    """
    total = 0
    for name, parameter in layer.named_parameters():
        if parameter.ndim == _STACKED:
            total += (2 if _FUSED in name else 1) * len(parameter) * sum(parameter.shape[1:])
        elif parameter.ndim > 1:
            total += sum(parameter.shape)
    return total


if __name__ == "__main__":
    sys.stdout.write(f"{profile(Path(sys.argv[1]), trust_remote_code='--trust-remote-code' in sys.argv).to_json()}\n")
