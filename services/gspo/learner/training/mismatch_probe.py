"""The weights of one earlier version, to measure the generators' mismatch if a step has no token of the newest.

With a lag, a step trains on samples of an earlier version. Against newer weights their log-probs differ by drift and
noise together. So the learner keeps the weights of a version until its rollouts come, and scores a few of them under
these weights: the remaining difference is noise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, distributed

from gspo.learner.model.batch import StepBatch
from gspo.learner.model.named_weights import Whole

NUM_PROBED_ROLLOUTS = 16


class SnapshotWeights:
    """The trained parameters of one version, in the host memory of rank zero.

    Args:
        parameters: Of the model; those that are not trained never change.
        whole: Gathers parameters that are spread over the ranks for a block, one after another; at its end the values
            of rank zero are those of all ranks.
        is_spread: Whether they are spread; else every rank holds them all.

    Attributes:
        version: The version of these weights; None while none are kept.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        whole: Whole,
        *,
        is_spread: bool,
    ) -> None:
        self.version: int | None = None
        self._parameters = [p for p in parameters if p.requires_grad]
        self._whole, self._is_spread = whole, is_spread
        self._is_first = distributed.get_rank() == 0
        self._kept: list[Tensor] = []

    @torch.no_grad()
    def keep(self, version: int) -> None:
        """Copy the present weights, which are those of `version`."""
        self._kept = []
        for parameter in self._parameters:
            with self._whole([parameter]):
                if self._is_first:
                    self._kept.append(parameter.detach().to("cpu", copy=True))
        self.version = version

    @contextmanager
    def in_place(self, present: int) -> Iterator[None]:
        """A block in which the model has the kept weights.

        After it the model has its own weights again, to the bit, and these, of version `present`, are the kept ones.
        """
        self._each(self._swap)
        try:
            yield
        finally:
            self._each(self._put_back)
            self.version = present

    @torch.no_grad()
    def _each(self, move: Callable[[Tensor, Tensor], None]) -> None:
        for number, parameter in enumerate(self._parameters):
            with self._whole([parameter]):
                if self._is_first:
                    move(parameter.data, self._kept[number])
            if not self._is_spread and distributed.get_world_size() > 1:
                distributed.broadcast(parameter.data, 0)

    @staticmethod
    def _swap(here: Tensor, kept: Tensor) -> None:
        present = here.to("cpu", copy=True)
        here.copy_(kept)
        kept.copy_(present)

    @staticmethod
    def _put_back(here: Tensor, kept: Tensor) -> None:
        here.copy_(kept)


def rollouts_to_probe(batch: StepBatch, version: int) -> tuple[list[int], Tensor]:
    """Up to 16 rollouts with tokens of a version, those with the most first, and the mask of these tokens. Bool [B, T].

    Few are enough: 16 answers of 100 tokens give the token's sigma to 2 % and the sequence's to a fifth.
    """
    of_version_BT = batch.mask_BT & (batch.version_BT == version)
    num_B = of_version_BT.sum(-1)
    most = sorted((row for row in range(len(batch)) if num_B[row]), key=lambda row: -int(num_B[row]))[
        :NUM_PROBED_ROLLOUTS
    ]
    chosen_B1 = torch.zeros(len(batch), 1, dtype=torch.bool)
    chosen_B1[most] = True
    return sorted(most), of_version_BT & chosen_B1
