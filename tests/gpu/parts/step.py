"""Training steps of the learner on random rollouts: MFU, peak memory beside the plan, the copy that a push sends.

The parts `step`, `width`, `mixture` and `lora` are this module on other models.
"""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from gspo.common.host.machine import GIB
from gspo.common.model.files import read_model_files
from gspo.common.model.trained_parameters import trained_size
from gspo.common.planning.longest import fitting_micro_batch, needs_checkpointing
from gspo.common.planning.memory import RankMemory, rank_memory, reserved_bytes
from gspo.learner.model.profile import profile
from gspo.learner.push.policy_weights import PolicyWeights
from gspo.learner.push.weight_updates import PACKING_THREADS, PackedChanges
from gspo.learner.training.trainer import Trainer
from tests.gpu.breakdown import note_breakdown
from tests.gpu.catalogue import PARTS
from tests.gpu.learner_calls import learner_config, random_rows
from tests.gpu.part_run import NotForThisCardError, PartRun
from tests.support.training.rollout_rows import train, with_version


@dataclass(frozen=True)
class TrainingCase:
    """A model and the rollouts that it is trained on.

    Attributes:
        shape: That of the model, in SHAPES.
        num_timed_steps: After one that warms up.
        learner: Further keys of the section.
        mfu_goal: None: there is none.
        copies: Whether the copy of the policy, and the search for its changes, are timed too.
    """

    shape: str
    num_rollouts: int = 16
    prompt_tokens: int = 128
    answer_tokens: int = 3968
    num_timed_steps: int = 3
    learner: dict[str, Any] = field(default_factory=dict)
    mfu_goal: float | None = None
    copies: bool = True

    @property
    def num_tokens(self) -> int:
        """Those of a step."""
        return self.num_rollouts * (self.prompt_tokens + self.answer_tokens)


_FEW: dict[str, Any] = {
    "num_rollouts": 8,
    "prompt_tokens": 8,
    "answer_tokens": 120,
    "num_timed_steps": 1,
}
_LORA: dict[str, Any] = {"learner": {"lora": {"rank": 16}}, "copies": False}
# The choice of a run's start on a GPU.
_COMPILED: dict[str, Any] = {"learner": {"torch_compile": True}}
CASES = {
    ("step", "cuda"): TrainingCase("qwen3-0.6b", mfu_goal=0.35, **_COMPILED),
    ("step", "cpu"): TrainingCase("tiny", **_FEW, mfu_goal=0.35),
    ("width", "cuda"): TrainingCase("qwen3-8b-9-layers", mfu_goal=0.5, **_COMPILED),
    ("width", "cpu"): TrainingCase("tiny-untied", **_FEW, mfu_goal=0.5),
    ("mixture", "cuda"): TrainingCase("qwen3-30b-a3b-4-layers"),
    ("mixture", "cpu"): TrainingCase("tiny-mixture", **_FEW),
    ("lora", "cuda"): TrainingCase("qwen3-8b", num_timed_steps=2, **_LORA),
    ("lora", "cpu"): TrainingCase("tiny", **_FEW, **_LORA),
}


def run(case: PartRun) -> None:
    """Plan the memory, train a step to warm up and then timed ones; copy and pack the weights as the publisher does."""
    training = CASES[case.part, case.device]
    model = case.model_of(training.shape)
    config, memory = _planned(case, training, model)
    case.note(micro_batch_tokens=config.micro_batch_tokens, planned_gib=memory.peak / GIB)
    case.note(gradient_checkpointing=str(config.learner.gradient_checkpointing))
    rows = random_rows(training.num_rollouts, training.prompt_tokens, training.answer_tokens)
    began = time.monotonic()
    trainer = Trainer(config, model)
    case.note(start_s=time.monotonic() - began)
    before = _copy_policy(case, trainer) if training.copies else None
    train(trainer, 1, rows)
    seconds, flops = [], 0.0
    for step in range(2, 2 + training.num_timed_steps):
        began = time.monotonic()
        figures = train(trainer, step, with_version(rows, step - 1)).metrics
        case.synchronize()
        seconds.append(time.monotonic() - began)
        flops = figures["train_flops"]
        case.require(math.isfinite(figures["loss"]) and figures["grad_norm"] > 0, f"step {step}: {figures}")
    step_s = min(seconds)
    case.note(step_s=step_s, tokens_per_s=training.num_tokens / step_s, tflop_per_s=flops / step_s / 1e12)
    _judge_speed(case, training, trainer, flops / step_s)
    if case.on_gpu:
        peak = torch.cuda.max_memory_allocated()
        case.note(peak_gib=peak / GIB)
        case.judge("measured over planned memory", peak / memory.peak, at_least=0.85, at_most=1.15)
    if before is not None:
        after = _copy_policy(case, trainer)
        case.require(after.digest != before.digest, "the steps changed no weight")
        _pack_changes(case, after, before)
    note_breakdown(case, trainer, 2 + training.num_timed_steps, rows, step_s)
    if case.part == "mixture":
        _train_in_float32(case)


def _planned(case: PartRun, training: TrainingCase, model: Path) -> tuple[Any, RankMemory]:
    """The configuration as a run's start fills it for a GPU of the learner alone, and its memory by the plan."""
    model_profile, total = profile(model), case.total_bytes
    size = trained_size(learner_config(case, model, "bfloat16"), read_model_files(model, allow_pickle=False))
    keys = {"learning_rate": 1e-5, **training.learner}
    lengths, most = (training.prompt_tokens, training.answer_tokens), training.num_tokens

    def filled(**more: Any) -> Any:
        return learner_config(case, model, "bfloat16", lengths=lengths, **(keys | more))

    if total is not None:
        there = (model_profile, size, 1, total - reserved_bytes(total))
        if "gradient_checkpointing" not in keys:
            keys["gradient_checkpointing"] = needs_checkpointing(filled(), *there)
        most = min(most, fitting_micro_batch(filled(), *there))
    config = filled(micro_batch_tokens=most)
    memory = rank_memory(config, size, 1, profile=model_profile, on_gpu=case.on_gpu)
    if total is not None and memory.peak > total - reserved_bytes(total):
        needs = f"it takes {memory.peak / GIB:.0f} GiB by the plan"
        raise NotForThisCardError(f"{needs}, and the GPU has {total / GIB:.0f}")
    return config, memory


def _judge_speed(case: PartRun, training: TrainingCase, trainer: Trainer, flops_per_s: float) -> None:
    """MFU, by the GPU's data sheet or a CPU's matrix product; none for an unknown GPU."""
    (peak,) = trainer.engine.gpus.values()
    if peak is None:
        return
    case.note(mfu=flops_per_s / peak)
    if training.mfu_goal is not None:
        case.judge("MFU", flops_per_s / peak, at_least=training.mfu_goal)
        if "train_flops_share" in PARTS[case.part].rates:
            case.measure(train_flops_share=flops_per_s / peak)
    elif "mixture_flops_share" in PARTS[case.part].rates:
        case.measure(mixture_flops_share=flops_per_s / peak)


def _copy_policy(case: PartRun, trainer: Trainer) -> PolicyWeights:
    """The policy as the publisher takes it; the memory of its copy is kept for the next one."""
    began = time.monotonic()
    make = trainer.engine.begin_version(0, "", is_reused=True)
    copied_s = time.monotonic() - began
    began = time.monotonic()
    policy = make()
    case.note(copy_s=copied_s, digest_s=time.monotonic() - began, policy_gib=policy.num_bytes / GIB)
    case.measure(to_host_bytes_s=policy.num_bytes / copied_s)
    return policy


def _pack_changes(case: PartRun, policy: PolicyWeights, base: PolicyWeights) -> None:
    """Find and pack what the steps changed, as for a push."""
    began = time.monotonic()
    num_bytes = asyncio.run(PackedChanges(policy, base).pack())
    packed_s = time.monotonic() - began
    case.note(pack_s=packed_s, packed_share=num_bytes / policy.num_bytes)
    case.measure(pack_bytes_s=policy.num_bytes / packed_s / PACKING_THREADS)


def _train_in_float32(case: PartRun) -> None:
    """A step of a small mixture: torch's grouped product has no kernel for float32, and takes another way."""
    model = case.model_of("tiny-mixture")
    trainer = Trainer(learner_config(case, model, "float32", lengths=(8, 120), learning_rate=1e-5), model)
    figures = train(trainer, 1, random_rows(4, 8, 120)).metrics
    case.require(math.isfinite(figures["loss"]) and figures["grad_norm"] > 0, f"the step in float32: {figures}")
