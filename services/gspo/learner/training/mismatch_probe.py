"""The mismatch between generators and learner at equal weights, also if a step has no token of the newest version.

With a lag, a step trains on samples of an earlier version. Against newer weights their log-probs differ by drift and
noise together. So the learner keeps the weights of a version until its rollouts come, and scores a few of them under
these weights: the remaining difference is noise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor, distributed

from gspo.learner.model.batch import StepBatch
from gspo_core.figures import mismatch_stats
from gspo_core.staleness import drop_old_tokens
from gspo_core.stats import Stats

# Few are enough: 16 answers of 100 tokens give the token's sigma to 2 % and the sequence's to a fifth.
_NUM_PROBED_ROLLOUTS = 16


def fresh_tokens(step: int, batch: StepBatch) -> Tensor:
    """The counted tokens that the version before this step sampled. Bool [B, T]."""
    return drop_old_tokens(batch.version_BT, batch.mask_BT, step - 1, 0)


def mismatch_of_step(logp_BT: Tensor, batch: StepBatch, mask_BT: Tensor) -> Stats:
    """The mismatch of the tokens in a mask, at log-probs that every rank has: counted by rank zero alone."""
    stats = mismatch_stats(logp_BT, batch.behavior_BT, mask_BT)
    return stats if distributed.get_rank() == 0 else {key: torch.zeros_like(value) for key, value in stats.items()}


class MismatchProbe:
    """Keeps the trained parameters of one version, in the host memory of rank zero, and measures the mismatch there.

    Args:
        parameters: Of the model; those that are not trained never change.
        whole: Gathers parameters that are spread over the ranks for a block. At its end the values of the rank
            `changed_by`, if one is named, are those of all ranks.
        score: Log-probs [B, T] of some rollouts of a step at the model's present weights.
    """

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        whole: Callable[..., AbstractContextManager[None]],
        score: Callable[[StepBatch, Sequence[int]], Tensor],
    ) -> None:
        self._parameters = [p for p in parameters if p.requires_grad]
        self._whole, self._score = whole, score
        self._is_first = distributed.get_rank() == 0
        self._version: int | None = None
        self._kept: list[Tensor] = []

    def measure(self, step: int, batch: StepBatch) -> Stats:
        """The mismatch at the kept version, once its tokens have come; empty if a token is of the present one.

        During the measurement the model has the kept weights. After it the model has its own again, to the bit, and
        these are the kept ones.
        """
        if bool(fresh_tokens(step, batch).any()):
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
            self._version = step - 1
        return mismatch_of_step(logp_BT, batch, mask_BT)

    @torch.no_grad()
    def _keep(self, version: int) -> None:
        self._kept = []
        for parameter in self._parameters:
            with self._whole([parameter]):
                if self._is_first:
                    self._kept.append(parameter.detach().to("cpu", copy=True))
        self._version = version

    @torch.no_grad()
    def _each(self, move: Callable[[Tensor, Tensor], object]) -> None:
        for number, parameter in enumerate(self._parameters):
            with self._whole([parameter], changed_by=0):
                if self._is_first:
                    move(parameter.data, self._kept[number])


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
