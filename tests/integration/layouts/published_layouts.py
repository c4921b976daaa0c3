"""Random models in the layouts in which families of models are published: names, ties, shards, dtypes, and leftovers.

Their sizes are not those of any published model.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Glm4Config,
    Glm4ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from tests.support.tiny_model import make_tokenizer
from tests.support.weights import store_tied_head

_FILE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "initializer_range": 0.08,
    "bos_token_id": None,
}


def qwen3(folder: Path) -> None:
    """Tied, and the file has the head too, as 0.6B and 1.7B; two shards."""
    _write(folder, Qwen3ForCausalLM, Qwen3Config, tie_word_embeddings=True)
    store_tied_head(folder)
    _shard(folder, 2)


def qwen2_5(folder: Path) -> None:
    """Tied without a head in the one file; biases at queries, keys and values."""
    _write(
        folder, Qwen2ForCausalLM, Qwen2Config, tie_word_embeddings=True, num_attention_heads=2, num_key_value_heads=1
    )


def llama3(folder: Path) -> None:
    """A head of its own, four shards, the scaled rotation of 3.1, and the rotation's table of older files."""
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
    }
    _write(folder, LlamaForCausalLM, LlamaConfig, tie_word_embeddings=False, rope_parameters=rope)
    _rewrite(folder, {f"model.layers.{n}.self_attn.rotary_emb.inv_freq": torch.ones(16) for n in range(2)})
    _shard(folder, 4)


def gemma3_text(folder: Path) -> None:
    """Tied by the default of the architecture, without the key in config.json."""
    layers = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 32}
    _write(folder, Gemma3ForCausalLM, Gemma3TextConfig, query_pre_attn_scalar=32, **layers)
    config = json.loads((folder / "config.json").read_text())
    config.pop("tie_word_embeddings", None)
    (folder / "config.json").write_text(json.dumps(config))


def mistral(folder: Path) -> None:
    """A head of its own, shards with an index, and all weights once more in the form of Mistral's own programs."""
    _write(folder, MistralForCausalLM, MistralConfig, tie_word_embeddings=False, sliding_window=None)
    tensors = load_file(folder / _FILE)
    own = {"norm.weight": tensors["model.norm.weight"], "output.weight": tensors["lm_head.weight"]}
    own |= {"layers.0.attention.wq.weight": tensors["model.layers.0.self_attn.q_proj.weight"]}
    save_file(own, folder / "consolidated.safetensors")
    _shard(folder, 2)


def qwen3_moe(folder: Path) -> None:
    """Every expert's matrices by themselves, over three shards."""
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
    _write(folder, Qwen3MoeForCausalLM, Qwen3MoeConfig, tie_word_embeddings=False, **experts)
    _shard(folder, 3)


def gpt_oss(folder: Path) -> None:
    """The bfloat16 form: stacked experts with biases, attention sinks, two shards."""
    layers = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 32}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    _write(folder, GptOssForCausalLM, GptOssConfig, tie_word_embeddings=False, **layers, **experts)
    _shard(folder, 2)


def mixtral(folder: Path) -> None:
    """Every expert's matrices by themselves, under the names of Mixtral's own."""
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}
    _write(folder, MixtralForCausalLM, MixtralConfig, tie_word_embeddings=False, **experts)
    _shard(folder, 2)


def glm4(folder: Path) -> None:
    """GLM-4 of 0414: norms behind attention and MLP too, half of each head rotated, gate and up in one matrix."""
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}
    _write(folder, Glm4ForCausalLM, Glm4Config, tie_word_embeddings=False, attention_bias=True, rope_parameters=rope)
    _shard(folder, 2)


def phi4(folder: Path) -> None:
    """Phi-4 has the architecture of Phi-3: queries, keys and values in one matrix, gate and up in another."""
    _write(folder, Phi3ForCausalLM, Phi3Config, tie_word_embeddings=False, sliding_window=None)
    _shard(folder, 2)


LAYOUTS: Mapping[str, Callable[[Path], None]] = {
    layout.__name__: layout
    for layout in (qwen3, qwen2_5, llama3, gemma3_text, mistral, mixtral, qwen3_moe, gpt_oss, glm4, phi4)
}


def _write(folder: Path, model: type[PreTrainedModel], config: type[PreTrainedConfig], **facts: Any) -> None:
    """A random model in bfloat16 in one file, with the character tokenizer."""
    tokenizer = make_tokenizer()
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        causal_lm = model._from_config(config(vocab_size=len(tokenizer), **{**_SIZES, **ends, **facts}))
        for name, weight in causal_lm.named_parameters():
            if name.endswith(("bias", "sinks")):  # a new model has zeros there
                torch.nn.init.normal_(weight, std=0.3)
    causal_lm.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _rewrite(folder: Path, more: Mapping[str, torch.Tensor]) -> None:
    """Add tensors to the one file."""
    tensors = load_file(folder / _FILE)
    save_file(tensors | more, folder / _FILE, metadata={"format": "pt"})


def _shard(folder: Path, num: int) -> None:
    """Spread the one file over `num` shards with an index."""
    tensors = load_file(folder / _FILE)
    names = sorted(tensors)
    weight_map: dict[str, str] = {}
    for number in range(num):
        shard = f"model-{number + 1:05d}-of-{num:05d}.safetensors"
        part = names[number * len(names) // num : (number + 1) * len(names) // num]
        save_file({name: tensors[name] for name in part}, folder / shard, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, shard)
    (folder / _FILE).unlink()
    (folder / _INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
