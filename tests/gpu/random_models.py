"""Random models in the shapes of published ones, by their config.json: nothing is downloaded.

Their weights mean nothing, and cost as much as trained ones.
"""

from __future__ import annotations

import fcntl
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.support.tiny_model import make_tokenizer

_QWEN3: dict[str, Any] = {"vocab_size": 151_936, "num_key_value_heads": 8, "head_dim": 128, "rope_theta": 1_000_000.0}
QWEN3_0_6B: dict[str, Any] = _QWEN3 | {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "tie_word_embeddings": True,
}
QWEN3_8B: dict[str, Any] = _QWEN3 | {
    "hidden_size": 4096,
    "intermediate_size": 12_288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "tie_word_embeddings": False,
}
_QWEN3_30B_A3B: dict[str, Any] = _QWEN3 | {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
}
# Three of four layers have linear attention.
_QWEN3_5_0_8B: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "vocab_size": 248_320,
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_hidden_layers": 24,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "tie_word_embeddings": True,
}
_TINY: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "tie_word_embeddings": True,
}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": QWEN3_0_6B,
    "qwen3-8b": QWEN3_8B,
    # 8 B's width, with so few layers that the states of training fit one GPU.
    "qwen3-8b-9-layers": QWEN3_8B | {"num_hidden_layers": 9},
    "qwen3-30b-a3b-1-layer": _QWEN3_30B_A3B | {"num_hidden_layers": 1},
    "qwen3-30b-a3b-4-layers": _QWEN3_30B_A3B | {"num_hidden_layers": 4},
    "qwen3.5-0.8b": _QWEN3_5_0_8B,
    "tiny": _TINY,
    "tiny-untied": _TINY | {"tie_word_embeddings": False},
    "tiny-mixture": _TINY
    | {"model_type": "qwen3_moe", "moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2},
}


def random_model(folder: Path, shape: str, device: str) -> Path:
    """A random Qwen3 (dense, mixture, or 3.5) of a shape of SHAPES in bfloat16, with the character tokenizer; made once
    a folder.

    Its matrices are spread twice as wide as a fresh model's, so that its answers' distribution is not flat and a
    fault shows in the log-probs.
    """
    return drawn_once(folder, partial(_draw_model, shape=shape, device=device))


def drawn_once(folder: Path, draw: Callable[[Path], None]) -> Path:
    """A folder that the first part which wants it draws; parts beside each other may want the same."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    is_drawn = folder.parent / f"{folder.name}.drawn"
    with (folder.parent / f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not is_drawn.exists():
            draw(folder)
            is_drawn.touch()
    return folder


def _draw_model(folder: Path, shape: str, device: str) -> None:
    tokenizer = make_tokenizer()
    config = AutoConfig.for_model(
        **{"model_type": "qwen3", "vocab_size": len(tokenizer), **SHAPES[shape]},
        max_position_embeddings=8192,
        initializer_range=0.04,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        dtype="bfloat16",
    )
    # On the device: a CPU takes minutes to draw 8 billion numbers.
    with torch.random.fork_rng(), torch.device(device):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
