"""Observers of a step's passes: the log-prob and entropy of each token, and the model flops.

mismatch_probe.py and model/routing_replay.py have two more.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gspo.common.planning.flops import ModelFlops
from gspo.learner.assembly.rows import TokenRecord
from gspo.learner.model.batch import MicroBatch, PassObserver, StepBatch
from gspo_core.stats import Stats


class TokenRecorder(PassObserver):
    """The log-prob and the entropy of each token at the update that trained it.

    Args:
        is_on: Whether any are kept (learner.token_records).
    """

    def __init__(self, *, is_on: bool) -> None:
        self._is_on = is_on

    def begin(self, _step: int, batch: StepBatch) -> None:
        self._batch = batch
        self._figures_2BT = torch.zeros(2, *batch.mask_BT.shape) if self._is_on else None

    def see(self, micro: MicroBatch, logp_RT: Tensor, entropy_RT: Tensor) -> Stats:
        """Keep the figures of a micro-batch's counted tokens, in place of those of an earlier update."""
        if self._figures_2BT is None:
            return {}
        mask_RT = micro.mask_RT.cpu()
        for figures_BT, values_RT in zip(self._figures_2BT, (logp_RT, entropy_RT), strict=True):
            kept_RT = figures_BT[micro.row_R, : micro.width]
            figures_BT[micro.row_R, : micro.width] = torch.where(mask_RT, values_RT.detach().float().cpu(), kept_RT)
        return {}

    def end(self) -> Stats:
        del self._batch, self._figures_2BT
        return {}

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


class FlopCount(PassObserver):
    """The model flops of one step over all ranks: of its training, and of sampling what it trained.

    Args:
        model: The policy's.
        scorings: Those of the models that read the whole batch forward beside it, one for each column.
    """

    def __init__(self, model: ModelFlops, scorings: Sequence[ModelFlops]) -> None:
        self._model, self._scorings = model, scorings

    def begin(self, _step: int, batch: StepBatch) -> None:
        self._batch, self._updates = batch, list[int]()

    def end(self) -> Stats:
        del self._batch
        return {}

    def end_update(self, mini_batch: int, _problem: str) -> None:
        """An update costs the same, applied or not."""
        self._updates.append(mini_batch)

    def figures(self, moving_B: Tensor) -> dict[str, float]:
        """`train_flops` and `generation_flops`, which no cut into micro-batches and ranks changes.

        Rollouts that a rank repeats only to keep step with the others, and the mismatch probe, count for nothing.

        Args:
            moving_B: The rollouts with a gradient; the others are read forward alone.
        """
        model, batch = self._model, self._batch
        sizes = [[(branch.length, branch.num_counted) for branch in branches] for branches in batch.branches]
        forward = [sum(model.forward(*size) for size in of_rollout) for of_rollout in sizes]
        moved = [
            sum(model.backward(*size) for size in of_rollout) if moving else 0.0
            for of_rollout, moving in zip(sizes, moving_B.tolist(), strict=True)
        ]
        of_mini_batch: dict[int, float] = defaultdict(float)
        for mini_batch, there, back in zip(batch.mini_batch_B.tolist(), forward, moved, strict=True):
            of_mini_batch[mini_batch] += there + back
        scored = sum(it.forward(*size) for it in self._scorings for of_rollout in sizes for size in of_rollout)
        return {
            "train_flops": scored + sum(of_mini_batch[mini_batch] for mini_batch in self._updates),
            "generation_flops": _sampling(model, batch),
        }


def _sampling(model: ModelFlops, batch: StepBatch) -> float:
    """A group's prompt is read once, and the context of every further branch too."""
    firsts: dict[int, list[tuple[int, int]]] = defaultdict(list)
    prompts, others = {}, 0.0
    for row, branches in zip(batch.rows, batch.branches, strict=True):
        prompts[row.group] = len(row.prompt_token_ids)
        for number, length, num_sampled in branches:
            if number:
                others += model.forward(length, num_sampled)
            else:
                firsts[row.group].append((length, num_sampled))
    return others + sum(model.sampling(length, firsts[group]) for group, length in prompts.items())
