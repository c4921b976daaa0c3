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
    lengths = [
        (len(sequence), int(counted)) for sequence, counted in zip(batch.sequences, batch.mask_BT.sum(-1), strict=True)
    ]
    forward = [model.forward(*length) for length in lengths]
    moved = [
        model.backward(*length) if moving else 0.0 for length, moving in zip(lengths, moving_B.tolist(), strict=True)
    ]
    of_mini_batch: dict[int, float] = defaultdict(float)
    for mini_batch, there, back in zip(batch.mini_batch_B.tolist(), forward, moved, strict=True):
        of_mini_batch[mini_batch] += there + back
    groups: dict[int, list[int]] = defaultdict(list)
    for number, row in enumerate(batch.rows):
        groups[row.group].append(number)
    return {
        "train_flops": sum(scoring.forward(*length) for scoring in scorings for length in lengths)
        + sum(of_mini_batch[mini_batch] for mini_batch in updates),
        "generation_flops": sum(
            model.sampling(int(batch.prompt_length_B[numbers[0]]), [lengths[number] for number in numbers])
            for numbers in groups.values()
        ),
    }
