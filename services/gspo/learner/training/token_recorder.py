"""Keeps the log-prob and the entropy of each token that a step trains."""

from collections.abc import Callable

import torch
from torch import Tensor

from gspo.learner.assembly.rows import TokenRecord
from gspo.learner.model.batch import MicroBatch, StepBatch


class TokenRecorder:
    """The log-prob and the entropy of each token at the update that trained it.

    Args:
        is_on: Whether any are kept (learner.token_records).
    """

    def __init__(self, *, is_on: bool) -> None:
        self._is_on = is_on

    def begin(self, batch: StepBatch) -> None:
        """The step begins; its passes are of this batch."""
        self._batch = batch
        self._figures_2BT = torch.zeros(2, *batch.mask_BT.shape) if self._is_on else None

    def see(self, micro: MicroBatch, logp_RT: Tensor, entropy_RT: Tensor) -> None:
        """Keep the figures of a micro-batch's counted tokens, in place of those of an earlier update."""
        if self._figures_2BT is None:
            return
        mask_RT = micro.mask_RT.cpu()
        for figures_BT, values_RT in zip(self._figures_2BT, (logp_RT, entropy_RT), strict=True):
            kept_RT = figures_BT[micro.row_R, : micro.width]
            figures_BT[micro.row_R, : micro.width] = torch.where(mask_RT, values_RT.detach().float().cpu(), kept_RT)

    def end(self) -> None:
        """The step is over, and its tensors are let go."""
        del self._batch, self._figures_2BT

    def records(self, sum_of_ranks: Callable[[Tensor], Tensor]) -> tuple[TokenRecord, ...]:
        """A record of each trained rollout, on every rank.

        Args:
            sum_of_ranks: Adds up the figures; each rank has those of its own rows, and zeros elsewhere.
        """
        if self._figures_2BT is None:
            return ()
        logp_BT, entropy_BT = sum_of_ranks(self._figures_2BT).numpy()
        return tuple(
            TokenRecord(row.group, row.number, logp_T[: len(row.token_ids)], entropy_T[: len(row.token_ids)])
            for row, logp_T, entropy_T in zip(self._batch.rows, logp_BT, entropy_BT, strict=True)
        )
