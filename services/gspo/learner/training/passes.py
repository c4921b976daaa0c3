"""One rank's passes over a step's rollouts: their cut into micro-batches, log-probs of frozen weights, sums over ranks.

trainer.py trains on the micro-batches.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from gspo.common.config.schema import Config
from gspo.common.planning.flops import ModelFlops
from gspo.learner.model.batch import MicroBatch, StepBatch, positions_of, rank_micro_batches
from gspo.learner.objective.objective import OLD, REFERENCE, TEACHER
from gspo.learner.ranks.out_of_memory import StepOutOfMemoryError
from gspo.learner.ranks.process_group import sum_over_ranks
from gspo.learner.training.policy_engine import PolicyEngine
from gspo.learner.training.trainer_api import memory_keys
from gspo.runlog.memory_shortages import MemoryShortage

# Characters of torch's reason that are put on record.
_LONGEST_REASON = 200


@dataclass(frozen=True)
class ColumnScorer:
    """Makes a column of a step: log-probs of its tokens by a model.

    Attributes:
        model: A block with the model.
        packing: Whether it reads packed lines.
        flops: Operations of its forward passes.
        around: Makes the block of each pass.
    """

    column: str
    model: Callable[[], AbstractContextManager[torch.nn.Module]]
    packing: bool
    flops: ModelFlops
    around: Callable[[MicroBatch], AbstractContextManager[object]] = nullcontext

    def make(self, passes: RankPasses, batch: StepBatch) -> Tensor:
        """The log-probs [B, T] of the whole step, on every rank."""
        with self.model() as model:
            return passes.score(model, passes.cut(range(len(batch)), packing=self.packing), self.around)


class LoggedTeacher:
    """The column by a teacher at an address. It was logged before: a replay asks no server, and has the same bits."""

    column, flops = TEACHER, None

    def make(self, _passes: RankPasses, batch: StepBatch) -> Tensor:
        """The log-probs [B, T] that the rows have."""
        return batch.teacher_BT


def scorers_of(
    config: Config,
    engine: PolicyEngine,
    policy_flops: ModelFlops,
    recording: Callable[[MicroBatch], AbstractContextManager[object]],
) -> list[ColumnScorer | LoggedTeacher]:
    """The scorers of the columns that the objective needs.

    Args:
        recording: The block of a pass at the step's first weights.
    """
    scorers: list[ColumnScorer | LoggedTeacher] = []
    if config.algorithm.needs_reference:
        scorers.append(ColumnScorer(REFERENCE, engine.reference, engine.packing, policy_flops))
    if (teacher := engine.teacher) is not None:
        scorers.append(ColumnScorer(TEACHER, lambda: nullcontext(teacher.model), teacher.is_packed, teacher.flops))
    if config.teacher.address is not None:
        scorers.append(LoggedTeacher())
    if config.algorithm.old_logprobs == "recompute":
        scorers.append(ColumnScorer(OLD, engine.policy_at_rest, engine.packing, policy_flops, around=recording))
    return scorers


class RankPasses:
    """The passes of one rank over one step after another.

    Ranks that share lines have the same micro-batches, log-probs and losses; those of the first one count.
    """

    def __init__(self, config: Config, engine: PolicyEngine) -> None:
        self._config, self._engine = config, engine
        sharing = config.learner.sequence_ranks
        self._share, self._num_shares = engine.rank // sharing, engine.num_ranks // sharing
        self._counts = engine.rank % sharing == 0

    @contextmanager
    def over(self, step: int, batch: StepBatch, micro_batch_tokens: int) -> Iterator[None]:
        """A block with the passes of a step.

        Raises:
            StepOutOfMemoryError: This rank's memory was too small.
        """
        # Steps differ in their longest rollout, and a limit may be of another step.
        self._batch, self._most_tokens = batch, max([micro_batch_tokens, *map(len, batch.sequences)])
        self._largest = 0  # positions of a micro-batch
        try:
            yield
        except torch.OutOfMemoryError as error:
            raise StepOutOfMemoryError(self._shortage(step, str(error))) from error
        finally:
            del self._batch

    def cut(
        self, rows: Sequence[int], *, backward: bool = False, counted: bool = True, packing: bool | None = None
    ) -> list[MicroBatch]:
        """This rank's micro-batches of these rows, packed as the policy takes them unless `packing` is set."""
        cut = rank_micro_batches(
            self._batch,
            rows,
            self._most_tokens,
            rank=self._share,
            num_ranks=self._num_shares,
            packing=self._engine.packing if packing is None else packing,
            backward=backward,
            counted=counted,
        )
        self._largest = max([self._largest, *(micro.input_RS.numel() for micro in cut)])
        return [micro.to(self._engine.device) for micro in cut]

    def cut_mini_batch(self, mini_batch: int, moving_B: Tensor) -> list[MicroBatch]:
        """This rank's micro-batches of a mini-batch; those that need no backward pass come first.

        Args:
            moving_B: The rollouts with a gradient.
        """
        rows = (self._batch.mini_batch_B == mini_batch).nonzero()[:, 0].tolist()
        still = self.cut([row for row in rows if not moving_B[row]])
        if moving := [row for row in rows if moving_B[row]]:
            return still + self.cut(moving, backward=True)
        # The moments decay and move the weights also under a gradient of zero.
        shortest = min(rows, key=lambda row: len(self._batch.sequences[row]))
        return still + self.cut([shortest], backward=True, counted=False)

    @torch.no_grad()
    def score(
        self,
        model: torch.nn.Module,
        cut: Iterable[MicroBatch],
        around: Callable[[MicroBatch], AbstractContextManager[object]] = nullcontext,
    ) -> Tensor:
        """Log-probs [B, T] of a cut at the model's present weights, on every rank; 0 elsewhere."""
        logp_BT = torch.zeros_like(self._batch.behavior_BT)
        model.eval()
        for micro in cut:
            with around(micro):
                logp_N, _ = model(*micro.model_input)
            logp_BT[micro.row_R, : micro.width] += micro.spread(logp_N).cpu()
        model.train()
        return self.sum(logp_BT)

    def sum(self, value: Tensor) -> Tensor:
        """The sum over all ranks of values that ranks with the same lines have alike."""
        return sum_over_ranks(self.counted(value), self._engine.device)

    def counted(self, value: Tensor) -> Tensor:
        """This rank's part of a sum over all ranks: 0 if another one of its lines' ranks counts the same value."""
        return value if self._counts else torch.zeros_like(value)

    def _shortage(self, step: int, error: str) -> MemoryShortage:
        """The record of a step that ran out of memory: half of its largest micro-batch, but a whole rollout at least.

        If each rollout is a micro-batch of its own already, it turns gradient checkpointing on.
        """
        causal_lm, used = self._engine.model.causal_lm, self._largest or self._most_tokens
        batch, packing = self._batch, self._engine.packing
        smaller = max([used // 2, *(positions_of(batch, row, packing=packing) for row in range(len(batch)))])
        is_checkpointing = causal_lm.is_gradient_checkpointing
        enables = smaller >= used and not is_checkpointing and causal_lm.supports_gradient_checkpointing
        return MemoryShortage(
            step=step,
            rank=self._engine.rank,
            unix_s=time.time(),
            error=error.partition("\n")[0][:_LONGEST_REASON],
            keys=memory_keys(self._config),
            used_tokens=used,
            micro_batch_tokens=min(used, smaller),
            gradient_checkpointing=is_checkpointing or enables,
            is_last=smaller >= used and not enables,
        )
