"""Cut rollouts into micro-batches under a token budget, padded or not, and lay rows into one padded tensor.

Not here: which rollouts a step holds, or on which rank; the loss does not depend on any cut made here.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def micro_batches(
    lengths: Sequence[int], max_tokens: int, num_branches: Sequence[int] | None = None
) -> list[list[int]]:
    """Cut rows of the given lengths (tokens) into lists of row indices, each padded to at most max_tokens.

    A micro-batch costs rows x its longest row. Rows go longest first, equal lengths in their own order, so
    neighbours are alike, padding is small, and too long a row shows at once. The same lengths give the same cut.
    Every row is in exactly one list.
    With `num_branches`, an index i stands for so many rows, which stay together, the longest of lengths[i]. If these
    exceed max_tokens by their padding, they are a list of their own.
    ValueError: a row longer than max_tokens, or a negative length.
    """
    batches: list[list[int]] = []
    num_fitting = 0
    for row in _longest_first(lengths, max_tokens):
        num_rows = 1 if num_branches is None else num_branches[row]
        if not batches or num_fitting < num_rows:
            batches.append([])
            num_fitting = max_tokens // max(1, lengths[row])
        batches[-1].append(row)
        num_fitting -= num_rows
    return batches


def packed_micro_batches(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Cut rows of the given lengths (tokens) into lists of row indices of at most max_tokens in all, unpadded.

    As `micro_batches`: longest first, each row in exactly one list, the same cut of the same lengths.
    ValueError: a row longer than max_tokens, or a negative length.
    """
    batches: list[list[int]] = []
    free = 0
    for row in _longest_first(lengths, max_tokens):
        if not batches or free < lengths[row]:
            batches.append([])
            free = max_tokens
        batches[-1].append(row)
        free -= lengths[row]
    return batches


def pad(rows: Sequence[Sequence[float]], *, fill: float = 0, dtype: torch.dtype = torch.long) -> tuple[Tensor, Tensor]:
    """Lay rows side by side, filled up on the right: values [B, T] and a bool mask [B, T] of the given values.

    T is the longest row's length, B the number of rows; either may be 0.
    """
    width = max((len(row) for row in rows), default=0)
    values_BT = torch.full((len(rows), width), fill, dtype=dtype)
    for values_T, row in zip(values_BT, rows, strict=True):
        values_T[: len(row)] = torch.as_tensor(row, dtype=dtype)
    lengths_B = torch.tensor([len(row) for row in rows], dtype=torch.long)
    return values_BT, torch.arange(width) < lengths_B[:, None]


def _longest_first(lengths: Sequence[int], max_tokens: int) -> list[int]:
    if lengths and min(lengths) < 0:
        raise ValueError(f"lengths holds {min(lengths)}; a length is at least 0")
    order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    if order and lengths[order[0]] > max_tokens:
        longest = lengths[order[0]]
        raise ValueError(f"row {order[0]} has {longest} tokens; raise max_tokens, {max_tokens}, to at least that")
    return order
