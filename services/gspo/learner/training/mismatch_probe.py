"""The mismatch between generators and learner at equal weights, also if a step has no token of the newest version.

With a lag, a step trains on samples of an earlier version. Against newer weights their log-probs differ by drift and
noise together. So now and then the learner keeps the weights of a version until its rollouts come, and scores a few of
them under these weights: the remaining difference is noise.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor, distributed

from gspo.common.config.algorithm import AlgorithmConfig
from gspo.learner.model.batch import MicroBatch, StepBatch
from gspo.learner.objective.figures import compared_stats
from gspo_core.staleness import drop_old_tokens
from gspo_core.stats import Stats

# Few are enough: 16 answers of 100 tokens give the token's sigma to 2 % and the sequence's to a fifth.
_NUM_PROBED_ROLLOUTS = 16


def fresh_tokens(step: int, batch: StepBatch) -> Tensor:
    """The counted tokens that the version before this step sampled. Bool [B, T]."""
    return drop_old_tokens(batch.version_BT, batch.mask_BT, step - 1, 0)


def mismatch_of_step(algorithm: AlgorithmConfig, logp_BT: Tensor, batch: StepBatch, mask_BT: Tensor) -> Stats:
    """`compared_stats` of the tokens in a mask, at log-probs that every rank has: counted by rank zero alone."""
    stats = compared_stats(algorithm, logp_BT, batch.behavior_BT, mask_BT, batch.mask_BT, batch.branch_BT)
    return stats if distributed.get_rank() == 0 else {key: torch.zeros_like(value) for key, value in stats.items()}


def mismatch_of_micro_batch(
    algorithm: AlgorithmConfig, logp_RT: Tensor, batch: StepBatch, micro: MicroBatch, mask_BT: Tensor
) -> Stats:
    """`compared_stats` of the tokens in a mask that are in this micro-batch."""
    return compared_stats(
        algorithm,
        logp_RT,
        micro.take(batch.behavior_BT),
        micro.take_mask(mask_BT),
        micro.take_mask(batch.mask_BT),
        None if batch.branch_BT is None else micro.take(batch.branch_BT),
    )


class MismatchProbe:
    """Keeps the trained weights of one version in host memory, and measures the mismatch there.

    Float32 ones: a rounded copy would bring back another policy. Ranks with parts of the weights keep these, and
    exchange nothing.

    It does so where `every` steps have passed without a measurement. Tokens of the present version are measured
    without it, by the first forward pass at these weights.

    Attributes:
        seconds: Time of the last call of `measure`.

    Args:
        kept: The tensors of which this rank keeps a version, on any device.
        change: A block in which every rank may change these; after it all ranks compute with them.
        score: Log-probs [B, T] of some rollouts of a step at the model's present weights.
        algorithm: Its clip tells what the mismatch puts outside.
        every: Steps between two measurements; 0 for none.
    """

    def __init__(
        self,
        kept: Callable[[], Sequence[Tensor]],
        change: Callable[[], AbstractContextManager[None]],
        score: Callable[[StepBatch, Sequence[int]], Tensor],
        algorithm: AlgorithmConfig,
        every: int,
    ) -> None:
        self._tensors, self._change, self._score = kept, change, score
        self._algorithm, self._every = algorithm, every
        self._version: int | None = None
        self._kept: list[Tensor] = []
        self._due_step = 0
        self.seconds = 0.0

    def measure(self, step: int, batch: StepBatch) -> Stats:
        """The mismatch at the kept version, once its tokens have come; empty if no measurement is due, or not here.

        During the measurement the model has the kept weights. After it the model has its own again, to the bit.
        """
        began = time.monotonic()
        try:
            return self._measure(step, batch)
        finally:
            self.seconds = time.monotonic() - began

    def _measure(self, step: int, batch: StepBatch) -> Stats:
        if not self._every:
            return {}
        if bool(fresh_tokens(step, batch).any()):
            self._note_measured(step)
            return {}
        if step < self._due_step:
            return {}
        if self._version is None or self._version < int(batch.version_BT[batch.mask_BT].min()):
            self._keep(step - 1)
            return {}
        rows, mask_BT = _rollouts_to_probe(batch, self._version)
        if not rows:
            return {}
        self._each(_swap)
        try:
            logp_BT = self._score(batch, rows)
        finally:
            self._each(Tensor.copy_)
        self._note_measured(step)
        return mismatch_of_step(self._algorithm, logp_BT, batch, mask_BT)

    def _note_measured(self, step: int) -> None:
        """The next measurement is due later; until then no weights are kept."""
        self._due_step, self._version, self._kept = step + self._every, None, []

    @torch.no_grad()
    def _keep(self, version: int) -> None:
        self._kept = []  # before the next copies, so that there is one version at a time
        self._kept = [tensor.to("cpu", copy=True) for tensor in self._tensors()]
        self._version = version

    @torch.no_grad()
    def _each(self, move: Callable[[Tensor, Tensor], object]) -> None:
        with self._change():
            for tensor, kept in zip(self._tensors(), self._kept, strict=True):
                move(tensor, kept)


def _swap(here: Tensor, kept: Tensor) -> None:
    present = here.to("cpu", copy=True)
    here.copy_(kept)
    kept.copy_(present)


def _rollouts_to_probe(batch: StepBatch, version: int) -> tuple[list[int], Tensor]:
    """The rollouts with the most tokens of a version, and the mask of these tokens. Bool [B, T]."""
    of_version_BT = batch.mask_BT & (batch.version_BT == version)
    num_B = of_version_BT.sum(-1)
    most = sorted((row for row in range(len(batch)) if num_B[row]), key=lambda row: -int(num_B[row]))
    probed = sorted(most[:_NUM_PROBED_ROLLOUTS])
    chosen_B1 = torch.zeros(len(batch), 1, dtype=torch.bool)
    chosen_B1[probed] = True
    return probed, of_version_BT & chosen_B1
