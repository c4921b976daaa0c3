"""One part's run: its sizes, its random model, and its numbers, goals and rates.

On a GPU that is a Qwen3-0.6B and long answers, on a CPU next to nothing, so that a trial there runs the same lines.
"""

from __future__ import annotations

import gc
import json
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from gspo.common.host.gpu_kinds import GPU_KINDS, GpuKind
from gspo.common.host.machine import CACHE_ARGUMENT, GIB, visible_gpus
from gspo.generation.engine.process import ForkedProcess
from tests.gpu.catalogue import PARTS
from tests.gpu.random_models import SHAPES, random_model


@dataclass(frozen=True)
class PartSizes:
    """PartSizes of one run.

    Attributes:
        shape: That of the model, in SHAPES.
        num_requests, prompt_tokens, answer_tokens: What the engine is asked.
        long_prompt_tokens: That of prompts whose answer is one token.
        cold_start_steps, demo_steps: Those of the arithmetic example; None is the example's own number.
        run_steps: That of the part `run`.
        engine: Arguments of vLLM beside ours.
    """

    shape: str
    num_requests: int
    prompt_tokens: int
    answer_tokens: int
    long_prompt_tokens: int
    cold_start_steps: int | None
    demo_steps: int
    run_steps: int
    engine: dict[str, Any] = field(default_factory=dict)

    @property
    def model(self) -> dict[str, Any]:
        """The keys of its config.json."""
        return SHAPES[self.shape]


# vLLM counts what others take while it starts, so engines beside each other need the bytes of their caches. Those of
# 256 requests of 640 tokens are 17.5 GiB of a Qwen3-0.6B.
_ENGINE: dict[str, Any] = {"gpu_memory_utilization": 0.15, CACHE_ARGUMENT: 18 * GIB, "enforce_eager": True}
SIZES = {
    "cuda": PartSizes("qwen3-0.6b", 256, 128, 512, 4096, None, 60, 8, _ENGINE),
    "cpu": PartSizes("tiny", 8, 8, 128, 128, 20, 2, 8),
}


# Models of parts that have another than the dense one of the sizes.
_MIXTURES = {"cuda": "qwen3-30b-a3b-1-layer", "cpu": "tiny-mixture"}
_LINEAR = "qwen3.5-0.8b"


@dataclass(frozen=True)
class GoalResult:
    """A goal and the number beside it.

    Attributes:
        met: None on a CPU, where the number means nothing.
    """

    name: str
    goal: str
    result: float
    met: bool | None


@dataclass
class PartRun:
    """One part's run.

    Attributes:
        engine: Arguments of vLLM from the command line, over those of the sizes.
        beside: How many other parts may run at the same time.
        process: That of its engine, which waits to start it.
        answer: The file of its findings, which are written as they come: a part that is ended keeps what it had.
        numbers: What it measured.
        goals: As `judge` found them.
        rates: Measured rates under the names of cli/plan/rates.py, which `gspo plan` then uses.
    """

    part: str
    device: str
    folder: Path
    engine: dict[str, Any]
    answer: Path
    process: ForkedProcess | None = None
    beside: int = 0
    numbers: dict[str, float | str] = field(default_factory=dict)
    goals: list[GoalResult] = field(default_factory=list)
    rates: dict[str, float] = field(default_factory=dict)

    @property
    def sizes(self) -> PartSizes:
        """For the device."""
        return SIZES[self.device]

    @property
    def is_mixture(self) -> bool:
        """Whether its model is a mixture instead of the dense one of the sizes."""
        return self.part.endswith("_mixture")

    @property
    def on_gpu(self) -> bool:
        """Whether the numbers mean anything."""
        return self.device == "cuda"

    @cached_property
    def card(self) -> GpuKind | None:
        """The data sheet of the first GPU; None for an unknown one. On a CPU any, so that the same lines run."""
        return GPU_KINDS.get(visible_gpus()[0].product) if self.on_gpu else next(iter(GPU_KINDS.values()))

    @cached_property
    def total_bytes(self) -> int | None:
        """Memory of the first GPU; None on a CPU."""
        return visible_gpus()[0].total_bytes if self.on_gpu else None

    @cached_property
    def model(self) -> Path:
        """The folder of the random model."""
        if self.part.endswith("_linear"):
            return self.model_of(_LINEAR)
        return self.model_of(_MIXTURES[self.device] if self.is_mixture else self.sizes.shape)

    def model_of(self, shape: str) -> Path:
        """The folder of a random model of a shape in SHAPES; the GPU in which it is drawn is empty again."""
        folder = random_model(self.folder / f"model-{shape}", shape, self.device)
        if self.on_gpu:
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        return folder

    @property
    def engine_arguments(self) -> dict[str, Any]:
        """vLLM's, beside those that the service sets itself."""
        by_default = {"enforce_eager": False} if self.part.endswith("_graphs") else {}
        return {**self.sizes.engine, **by_default, **self.engine}

    def note(self, **numbers: float | str) -> None:
        """Keep numbers under names that have their unit; three digits are enough to read."""
        for name, value in numbers.items():
            self.numbers[name] = float(f"{value:.3g}") if isinstance(value, float) else value
            print(f"{name}: {self.numbers[name]}", flush=True)
        self.write()

    def judge(self, name: str, result: float, *, at_least: float | None = None, at_most: float | None = None) -> None:
        """Put a number beside its goal. A missed goal is shown, and fails nothing."""
        met = (at_least is None or result >= at_least) and (at_most is None or result <= at_most)
        bounds = [f"at least {at_least:g}"] if at_least is not None else []
        bounds += [f"at most {at_most:g}"] if at_most is not None else []
        goal = GoalResult(name, " and ".join(bounds), float(f"{result:.3g}"), met if self.on_gpu else None)
        self.goals.append(goal)
        print(f"goal: {goal}", flush=True)
        self.write()

    def measure(self, **rates: float) -> None:
        """Keep measured rates, which the catalogue names for this part."""
        if unknown := rates.keys() - set(PARTS[self.part].rates):
            raise ValueError(f"the catalogue has no rate {', '.join(sorted(unknown))} of the part {self.part}")
        print(f"rates: {rates}", flush=True)
        self.rates |= {name: float(f"{value:.3g}") for name, value in rates.items()}
        self.write()

    def require_rates(self) -> None:
        """Fail a part that has not measured all its rates, though the data sheet of the GPU is known."""
        lacking = set(PARTS[self.part].rates) - self.rates.keys()
        self.require(self.card is None or not lacking, f"it has not measured {', '.join(sorted(lacking))}")

    def write(self, reason: str | None = None, not_here: str = "") -> None:
        """Write the findings.

        Args:
            reason: Why it failed; empty if it passed, None until it has ended.
            not_here: Why it cannot be run on this GPU.
        """
        findings = {
            "numbers": self.numbers,
            "goals": [asdict(goal) for goal in self.goals],
            # Rates of a CPU, or of a GPU that others use, say nothing about the GPU.
            "rates": self.rates if self.on_gpu and not self.beside else {},
            "reason": reason,
            "not_here": not_here,
        }
        fresh = self.answer.with_suffix(".new")
        fresh.write_text(json.dumps(findings))
        fresh.replace(self.answer)

    def synchronize(self) -> None:
        """Wait for the GPU, so that a clock read next has all its work."""
        if self.on_gpu:
            torch.cuda.synchronize()

    def require(self, holds: bool, what: str) -> None:
        """Fail the part unless something holds."""
        if not holds:
            raise PartFailedError(what)


class PartFailedError(Exception):
    """What a part was to show does not hold."""


class NotForThisCardError(Exception):
    """The part cannot be run here: the GPU is too small, or there are too few."""
