"""A child process: TRL's GRPO trainer under GSPO settings, on the same model, prompts and shape.

Only where the trl package is installed; gspo does not need it. Neighbour: part_peer.py asks.
"""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks.harness.child_process import serve
from benchmarks.harness.sizes import CACHE, GROUP_SIZE, NUM_MINI_BATCHES, NUM_ROLLOUTS


class StepEndCallback(TrainerCallback):
    """When each optimizer step ended."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_train_begin(self, *_args: Any, **_kwargs: Any) -> None:
        self.ends.append(time.monotonic())

    def on_step_end(self, *_args: Any, **_kwargs: Any) -> None:
        self.ends.append(time.monotonic())


def measure(spec: dict[str, Any]) -> dict[str, Any]:
    """Seconds of every step of the whole shape, which is one generation and all its optimizer steps."""
    clock, max_tokens = StepEndCallback(), spec["max_tokens"]
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(spec["model"]),
        reward_funcs=_reward,
        args=_config(max_tokens, spec["rounds"]),
        train_dataset=Dataset.from_dict({"prompt": spec["prompts"]}),
        processing_class=AutoTokenizer.from_pretrained(spec["model"], padding_side="left"),
        callbacks=[clock],
    )
    trainer.train()
    ends = clock.ends[::NUM_MINI_BATCHES]
    rounds = [after - before for before, after in pairwise(ends)]
    return {"rounds": [{"seconds": seconds, "tokens": NUM_ROLLOUTS * max_tokens} for seconds in rounds]}


def _config(max_tokens: int, rounds: int) -> GRPOConfig:
    return GRPOConfig(
        output_dir=str(CACHE / "runs/peer"),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=NUM_ROLLOUTS // NUM_MINI_BATCHES,
        gradient_accumulation_steps=1,
        steps_per_generation=NUM_MINI_BATCHES,
        num_generations=GROUP_SIZE,
        max_completion_length=max_tokens,
        # No answer ends early, so that all are exactly as long as they may be.
        generation_kwargs={"min_new_tokens": max_tokens},
        max_steps=rounds * NUM_MINI_BATCHES,
        beta=0.0,
        loss_type="grpo",
        importance_sampling_level="sequence",
        epsilon=3e-4,
        epsilon_high=4e-4,
        learning_rate=1e-6,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
    )


def _reward(completions: list[list[dict[str, str]]], **_: Any) -> list[float]:
    return [float(completion[0]["content"][:1] < "P") for completion in completions]


if __name__ == "__main__":
    serve(measure)
