"""What a part is given: its sizes, the random model, and where it puts what it measures.

On a GPU that is a Qwen3-0.6B and long answers, on a CPU next to nothing, so that a trial there runs the same lines.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from tests.support.tiny_model import make_tokenizer

# The shape of Qwen3-0.6B, by its published config.json.
_QWEN3_0_6B: dict[str, Any] = {
    "vocab_size": 151_936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
_TINY: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
}


@dataclass(frozen=True)
class PartSizes:
    """PartSizes of one run.

    Attributes:
        num_requests, prompt_tokens, answer_tokens: What the engine is asked.
        num_rollouts: Of a training step, as long as a prompt and an answer of the engine.
        num_timed_steps: After one that warms up.
        cold_start_steps, demo_steps: Of the arithmetic example; None is the example's own number.
        engine: Arguments of vLLM beside ours.
    """

    model: dict[str, Any]
    num_requests: int
    prompt_tokens: int
    answer_tokens: int
    num_rollouts: int
    num_timed_steps: int
    cold_start_steps: int | None
    demo_steps: int
    engine: dict[str, Any] = field(default_factory=dict)


SIZES = {
    "cuda": PartSizes(
        _QWEN3_0_6B, 64, 128, 512, 64, 3, None, 60, {"gpu_memory_utilization": 0.4, "enforce_eager": True}
    ),
    "cpu": PartSizes(_TINY, 8, 8, 48, 8, 1, 20, 2),
}


def random_model(folder: Path, device: str) -> Path:
    """A random Qwen3 with the character tokenizer, saved in bfloat16; made once a folder.

    Its matrices are spread twice as wide as a fresh model's, so that its answers' distribution is not flat and a
    fault shows in the log-probs.
    """
    if (folder / "tokenizer.json").exists():
        return folder
    tokenizer, shape = make_tokenizer(), SIZES[device].model
    config = Qwen3Config(
        **{"vocab_size": len(tokenizer), **shape},
        max_position_embeddings=4096,
        rope_theta=1_000_000.0,
        tie_word_embeddings=True,
        initializer_range=0.04,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@dataclass
class PartRun:
    """One part's run.

    Attributes:
        engine: Arguments of vLLM from the command line, over those of the sizes.
        numbers: Filled as they are measured, so that a part that fails keeps what it had.
    """

    part: str
    device: str
    folder: Path
    engine: dict[str, Any]
    numbers: dict[str, float | str] = field(default_factory=dict)

    @property
    def sizes(self) -> PartSizes:
        """For the device."""
        return SIZES[self.device]

    @cached_property
    def model(self) -> Path:
        """The folder of the random model."""
        return random_model(self.folder / f"model-{self.device}", self.device)

    @property
    def engine_arguments(self) -> dict[str, Any]:
        """vLLM's, beside those that the service sets itself."""
        by_default = {"enforce_eager": False} if self.part == "graphs" else {}
        return {**self.sizes.engine, **by_default, **self.engine}

    def note(self, **numbers: float | str) -> None:
        """Keep numbers under names that have their unit; three digits are enough to read."""
        for name, value in numbers.items():
            self.numbers[name] = float(f"{value:.3g}") if isinstance(value, float) else value
            # A part that is ended leaves no answer, but its log.
            print(f"{name}: {self.numbers[name]}", flush=True)

    def require(self, holds: bool, what: str) -> None:
        """Fail the part unless something holds."""
        if not holds:
            raise PartFailedError(what)


class PartFailedError(Exception):
    """What a part was to show does not hold."""
