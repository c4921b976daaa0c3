"""What the loop asks of whoever makes versions, and what it answers: the calls as a protocol, and plain carriers.

It computes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from torch import Tensor

from gspo.common.config.schema import Config
from gspo.learner.assembly.rows import Row


class NotFiniteError(ArithmeticError):
    """Too many mini-batches in a row had no finite loss or gradient norm, or a version has weights that are not."""


@dataclass(frozen=True)
class SkippedUpdate:
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
    """What a step came to: its figures, and the mini-batches that were not applied."""

    figures: dict[str, float]
    not_applied: tuple[SkippedUpdate, ...] = ()


@dataclass(frozen=True)
class Hyperparameters:
    """What the updates of one step are made with, of all that a resume may change; the rest is fixed for a run.

    It is logged with the step, so that a replay makes the same update under another configuration.

    Attributes:
        learning_rate: Of this step, after warm-up and schedule.
        weight_decay: AdamW's decoupled one.
        max_grad_norm: Gradients are scaled down to this norm.
    """

    learning_rate: float
    weight_decay: float
    max_grad_norm: float


class TrainerApi(Protocol):
    """The calls of orders.RankZero and trainer.Trainer, which say what each does."""

    @property
    def has_other_ranks(self) -> bool:
        """Whether other ranks make the same calls."""

    def train(
        self,
        step: int,
        rows: Sequence[Row],
        known: Collection[int] = (),
        hyperparameters: Hyperparameters | None = None,
    ) -> TrainResult:
        """Train the policy of version step - 1."""

    def policy(self) -> dict[str, Tensor]:
        """The weights in the generators' dtype."""

    def save(self, folder: Path, state: Mapping[str, Any]) -> None:
        """Write a checkpoint's files."""

    def load(self, folder: Path) -> dict[str, Any]:
        """Go on from what `save` wrote."""

    def export(self, folder: Path) -> None:
        """Write the policy as a Hugging Face folder."""

    def rank_heartbeat(self) -> None:
        """Show other ranks that this one lives."""

    def close(self) -> None:
        """End."""


# From the configuration, the model's folder and the run directory; takes as long as loading a model does.
StartTrainer: TypeAlias = Callable[[Config, Path, Path], TrainerApi]
