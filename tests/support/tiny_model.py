"""Random Qwen3 and Qwen3-MoE models in the Hugging Face format, small enough to start both engines in seconds.

What it is not: a trained model; its answers mean nothing.
"""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3ForSequenceClassification,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHARACTERS = string.digits + string.ascii_letters + string.punctuation + " \n"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character, plus the chat markers; `<|im_end|>` ends an answer, `<|endoftext|>` pads."""
    vocabulary = {token: number for number, token in enumerate((*SPECIAL_TOKENS, *CHARACTERS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<|endoftext|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        # Registered as special, or the pre-tokenizer would cut them into characters.
        additional_special_tokens=["<|im_start|>"],
        chat_template=CHAT_TEMPLATE,
    )


def make_tiny_model(
    folder: Path,
    *,
    hidden_size: int = 64,
    layers: int = 2,
    seed: int = 0,
    tie_word_embeddings: bool = True,
    max_length: int = 2048,
    scale: float = 1.0,
    num_experts: int = 0,
    tokenizer: PreTrainedTokenizerFast | None = None,
) -> Path:
    """Write a random Qwen3 model with its tokenizer to `folder` and return it.

    With `num_experts` it is a Qwen3-MoE: every layer has so many experts, of which a token uses two.
    `scale` multiplies every matrix's initial spread (0.02): above 1 the answers' distribution is peaked, and
    rounding in another dtype or a change of weights shows in the log-probs.
    `hidden_size` is a multiple of 32: the heads are 32 wide, half as many for keys and values.
    `tokenizer` is `make_tokenizer()` by default.
    """
    tokenizer = tokenizer or make_tokenizer()
    heads = hidden_size // 32
    sizes: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": hidden_size,
        "intermediate_size": 3 * hidden_size,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": max(1, heads // 2),
        "head_dim": 32,
        "max_position_embeddings": max_length,
        "tie_word_embeddings": tie_word_embeddings,
        "initializer_range": 0.02 * scale,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _random_model(sizes, num_experts)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def make_tiny_classifier(folder: Path) -> tuple[Qwen3ForSequenceClassification, PreTrainedTokenizerFast]:
    """Write a random reward model with its tokenizer to `folder`; both of them, the model in eval mode."""
    tokenizer = make_tokenizer()
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=32,
        num_labels=1,
        pad_token_id=tokenizer.pad_token_id,
        initializer_range=0.2,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen3ForSequenceClassification(config).eval()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model, tokenizer


def _random_model(sizes: dict[str, Any], num_experts: int) -> PreTrainedModel:
    if not num_experts:
        return Qwen3ForCausalLM(Qwen3Config(**sizes))
    width = sizes["hidden_size"] // 2
    experts = {"num_experts": num_experts, "num_experts_per_tok": 2, "moe_intermediate_size": width}
    # As the published Qwen3-MoE models do: the weights of a token's experts add up to one.
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **experts, norm_topk_prob=True))
