"""The calls of a trainer as a protocol, their arguments and results; and the hyperparameters of each step.

Hyperparameters are pure functions of the step number, so that a resumed run needs no scheduler state.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from gspo.common.config.engines import LearnerConfig
from gspo.common.config.loading import key_value
from gspo.common.config.schema import Config
from gspo.learner.assembly.rows import Row, TokenRecord

if TYPE_CHECKING:
    from gspo.learner.push.policy_weights import PolicyWeights

# Writes a checkpoint's files from copies and waits for those of other ranks, until its argument says to give up.
WriteCheckpoint: TypeAlias = Callable[[Callable[[], bool]], None]
# Makes a version from the copies of all ranks. Every rank calls its own once, and they wait for one another.
MakeVersion: TypeAlias = "Callable[[], PolicyWeights]"


# A step that ran out of memory counts for later ones only under the same values.
_MEMORY_KEYS = (
    *("learner.micro_batch_tokens", "learner.gradient_checkpointing", "learner.packing", "learner.zero_stage"),
    *("learner.offload", "learner.ranks", "learner.sequence_ranks"),
)


class NotFiniteError(ArithmeticError):
    """Too many mini-batches in a row had no finite loss or gradient norm, or a version has weights that are not."""


@dataclass(frozen=True)
class UpdateNotApplied:
    """An optimizer step that was not made.

    Attributes:
        update: Its number within the step, from 0, over all passes.
        mini_batch: The mini-batch it would have been of.
    """

    update: int
    mini_batch: int
    reason: str


@dataclass(frozen=True)
class TrainResult:
    """The metrics of a step's updates by their public names, and its mini-batches that were not applied.

    Attributes:
        metrics: Those that also follow from the rows (assembly/row_metrics.py) stand for them.
        probe_s: Seconds of the mismatch probe.
        clip_split_s: Seconds of the passes that split the clip.
        tokens: Those of each trained rollout, under learner.token_records; else empty.
    """

    metrics: dict[str, float]
    not_applied: tuple[UpdateNotApplied, ...] = ()
    probe_s: float = 0.0
    clip_split_s: float = 0.0
    tokens: tuple[TokenRecord, ...] = ()


@dataclass(frozen=True)
class Hyperparameters:
    """The hyperparameters of one step that a resume may change, and how its mini-batches are cut.

    They are logged with the step, so that a replay makes the same update under another configuration.

    Attributes:
        learning_rate: This step's, after warm-up and schedule.
        weight_decay: AdamW's decoupled one.
        max_grad_norm: Gradients are scaled down to this norm.
        micro_batch_tokens: Most tokens of a micro-batch, or those of the step's longest rollout if that has more.
        gradient_checkpointing: Whether the backward pass computes activations again.
    """

    learning_rate: float
    weight_decay: float
    max_grad_norm: float
    micro_batch_tokens: int
    gradient_checkpointing: bool


class TrainerApi(Protocol):
    """The calls of a learner's trainer, which every rank makes; trainer.py and policy_engine.py say what each does."""

    @property
    def has_other_ranks(self) -> bool:
        """Whether other ranks make the same calls."""

    @property
    def gpus(self) -> Mapping[str, float | None]:
        """The GPU of each rank -> its peak flop/s, or None where that is unknown."""

    def train(
        self, step: int, rows: Sequence[Row], not_applied: Collection[int], hyperparameters: Hyperparameters
    ) -> TrainResult:
        """Train the policy of version step - 1."""

    def begin_version(self, version: int, recorded: str, *, is_reused: bool) -> MakeVersion:
        """Copy the weights in the generators' dtype, each rank its share; the result makes their version."""

    def write_share(self, version: int, folder: Path) -> None:
        """Write the tensors of a version that other ranks than zero own."""

    def save(self, folder: Path, state: Mapping[str, Any]) -> None:
        """Write a checkpoint's files."""

    def begin_save(self, folder: Path, state: Mapping[str, Any]) -> WriteCheckpoint:
        """Copy a checkpoint's states to host memory; the result writes the files beside training."""

    def load(self, folder: Path) -> dict[str, Any]:
        """Continue from a checkpoint of `save` or `begin_save`."""

    def export(self, folder: Path) -> None:
        """Write the policy as a Hugging Face folder."""

    def move_to_host(self) -> None:
        """Free the device: all states of training go to host memory. No other call but the last may come meanwhile."""

    def move_to_device(self) -> None:
        """Bring the states back."""

    def rank_heartbeat(self) -> None:
        """Show other ranks that this one runs."""

    def close(self) -> None:
        """End."""


# From the configuration, the model's folder and the run directory; takes as long as loading a model does.
StartTrainer: TypeAlias = Callable[[Config, Path, Path], TrainerApi]


def configured_hyperparameters(config: Config, step: int) -> Hyperparameters:
    learner = config.learner
    rate = learning_rate(learner, step, config.run.total_steps)
    return Hyperparameters(
        rate, learner.weight_decay, learner.max_grad_norm, config.micro_batch_tokens, learner.gradient_checkpointing
    )


def memory_keys(config: Config) -> dict[str, Any]:
    """The configured values that decide the memory of a step, by name."""
    return {name: key_value(config, name) for name in _MEMORY_KEYS}


def learning_rate(learner: LearnerConfig, step: int, total_steps: int | None) -> float:
    """The rate of `step` (from 1): a linear rise over warmup_steps, then constant, or a fall that ends after the last.

        warm-up    peak * step / (warmup_steps + 1)
        linear     peak * (1 - p)
        cosine     peak * (1 + cos(pi p)) / 2,     p = (step - 1 - warmup_steps) / (total_steps - warmup_steps)

    p stays in [0, 1), so that the last step still moves; a run beyond total_steps keeps its last rate.

    Raises:
        ValueError: The schedule is linear or cosine, and there is no total_steps.
    """
    warmup = learner.warmup_steps
    if step <= warmup:
        return learner.learning_rate * step / (warmup + 1)
    if learner.schedule == "constant":
        return learner.learning_rate
    if total_steps is None:
        raise ValueError(f"learner.schedule {learner.schedule} needs run.total_steps")
    length = max(1, total_steps - warmup)
    progress = min(step - 1 - warmup, length - 1) / length
    if learner.schedule == "linear":
        return learner.learning_rate * (1 - progress)
    return learner.learning_rate * (1 + math.cos(math.pi * progress)) / 2
