"""The model flops of one step over all ranks: of its training, and of sampling what it trained."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from torch import Tensor

from gspo.common.planning.flops import ModelFlops
from gspo.learner.model.batch import StepBatch


def step_flops(
    model: ModelFlops,
    batch: StepBatch,
    moving_B: Tensor,
    updates: Sequence[int],
    scorings: Sequence[ModelFlops],
) -> dict[str, float]:
    """`train_flops` and `generation_flops`, which no cut into micro-batches and ranks changes.

    Rollouts that a rank repeats only to keep step with the others, and the mismatch probe, count for nothing.

    Args:
        moving_B: The rollouts with a gradient; the others are read forward alone.
        updates: The mini-batch of each optimizer step that was computed.
        scorings: The models that read the whole batch forward beside them: for old log-probs, a reference, a teacher.
    """
    sizes = [[(branch.length, branch.num_counted) for branch in branches] for branches in batch.branches]
    forward = [sum(model.forward(*size) for size in of_rollout) for of_rollout in sizes]
    moved = [
        sum(model.backward(*size) for size in of_rollout) if moving else 0.0
        for of_rollout, moving in zip(sizes, moving_B.tolist(), strict=True)
    ]
    of_mini_batch: dict[int, float] = defaultdict(float)
    for mini_batch, there, back in zip(batch.mini_batch_B.tolist(), forward, moved, strict=True):
        of_mini_batch[mini_batch] += there + back
    scored = sum(scoring.forward(*size) for scoring in scorings for of_rollout in sizes for size in of_rollout)
    return {
        "train_flops": scored + sum(of_mini_batch[mini_batch] for mini_batch in updates),
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
