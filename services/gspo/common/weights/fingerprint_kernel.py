"""The fingerprints of many tensors of one GPU in one launch of a Triton kernel.

Its results are those of common/weights/fingerprint.py, to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from gspo.common.weights.device_fingerprint import check_elements, device_fingerprint, factors_on
from gspo.common.weights.fingerprint import (
    COLUMN_FACTORS,
    FIRST_FACTOR,
    GOLDEN,
    NUM_COLUMNS,
    SECOND_FACTOR,
    SPACING,
    WORD_BYTES,
)

# Rows of one program: so many that the factors of the columns are read seldom, and so few that all cores have work.
_ROWS = 16
# Those that the kernel is compiled with.
CONSTANTS = {
    "rows": _ROWS,
    "columns": NUM_COLUMNS,
    "spacing": SPACING,
    "golden": GOLDEN,
    "first_factor": FIRST_FACTOR,
    "second_factor": SECOND_FACTOR,
}


def kernel_fingerprints(tensors: Sequence[Tensor], starts: Sequence[int] | None = None) -> Tensor:
    """The two lanes of runs of elements, as int64 [runs, 2] on their device.

    Args:
        tensors: Contiguous, of 1, 2 or 4 bytes an element, on one device.
        starts: Each first element's flat position in its whole tensor; None for 0.

    Raises:
        ValueError: Elements are not contiguous, or of another width.
    """
    device = tensors[0].device
    starts = starts or [0] * len(tensors)
    lanes = torch.zeros(len(tensors), 2, dtype=torch.int64, device=device)
    runs = []
    for number, (tensor, start) in enumerate(zip(tensors, starts, strict=True)):
        whole = _whole_words(tensor, start)
        if whole < tensor.numel():
            # Less than a word behind the others, or a run that is cut within a word.
            lanes[number] = device_fingerprint(tensor.view(-1)[whole:], start + whole)
        itemsize = tensor.element_size()
        runs.append((tensor.data_ptr(), start * itemsize // WORD_BYTES, whole * itemsize // WORD_BYTES))
    run_table = np.array(runs, np.int64).reshape(-1, 3)
    first_rows = run_table[:, 1] // NUM_COLUMNS
    num_programs = -(-(run_table[:, 1] + run_table[:, 2] - first_rows * NUM_COLUMNS) // (_ROWS * NUM_COLUMNS))
    num_programs[run_table[:, 2] == 0] = 0
    if not (total := int(num_programs.sum())):
        return lanes
    program_runs = np.repeat(np.arange(len(runs)), num_programs)
    ahead = np.arange(total) - np.repeat(np.cumsum(num_programs) - num_programs, num_programs)
    programs = np.stack([program_runs, first_rows[program_runs] + ahead * _ROWS], axis=1)
    fingerprint_rows[(total,)](
        torch.from_numpy(run_table).to(device),
        torch.from_numpy(programs).to(device),
        _column_factors(device),
        lanes,
        **CONSTANTS,
    )
    return lanes


def _whole_words(tensor: Tensor, start: int) -> int:
    """The elements from the first on that are whole words of their tensor, in memory that is read by words."""
    in_word = WORD_BYTES // check_elements(tensor)
    if start % in_word or tensor.data_ptr() % WORD_BYTES:
        return 0
    return tensor.numel() // in_word * in_word


@lru_cache(maxsize=8)
def _column_factors(device: torch.device) -> Tensor:
    return factors_on(device, COLUMN_FACTORS)


@triton.jit  # type: ignore[untyped-decorator]
def fingerprint_rows(
    run_table: tl.tensor,
    programs: tl.tensor,
    column_factors: tl.tensor,
    lanes: tl.tensor,
    rows: tl.constexpr,
    columns: tl.constexpr,
    spacing: tl.constexpr,
    golden: tl.constexpr,
    first_factor: tl.constexpr,
    second_factor: tl.constexpr,
) -> None:
    """Add some rows of one run to its lanes."""
    program = tl.program_id(0)
    run = tl.load(programs + 2 * program)
    first_row = tl.load(programs + 2 * program + 1)
    words = tl.load(run_table + 3 * run).to(tl.pointer_type(tl.uint32))
    first_word = tl.load(run_table + 3 * run + 1)
    num_words = tl.load(run_table + 3 * run + 2)
    column = tl.arange(0, columns)
    first_sums = tl.full([columns], 0, tl.uint64)
    second_sums = tl.full([columns], 0, tl.uint64)
    for number in range(rows):
        row = first_row + number
        place = row * columns - first_word + column
        word = tl.load(words + place, (place >= 0) & (place < num_words), 0).to(tl.uint64)
        first_sums += word * _row_factor(row + 2 * spacing, golden, first_factor, second_factor)
        second_sums += word * _row_factor(row + 3 * spacing, golden, first_factor, second_factor)
    first_columns = tl.load(column_factors + column).to(tl.uint64)
    second_columns = tl.load(column_factors + columns + column).to(tl.uint64)
    # Not `tl.sum`: Triton's interpreter knows it only where Triton itself was imported for it.
    first_lane = tl.reduce(first_sums * first_columns, 0, tl.standard._sum_combine)
    second_lane = tl.reduce(second_sums * second_columns, 0, tl.standard._sum_combine)
    tl.atomic_add(lanes + 2 * run, first_lane.to(tl.int64), sem="relaxed")
    tl.atomic_add(lanes + 2 * run + 1, second_lane.to(tl.int64), sem="relaxed")


@triton.jit  # type: ignore[untyped-decorator]
def _row_factor(
    counter: tl.tensor, golden: tl.constexpr, first_factor: tl.constexpr, second_factor: tl.constexpr
) -> tl.tensor:
    mixed = (counter.to(tl.uint64) + 1) * golden
    mixed = (mixed ^ (mixed >> 30)) * first_factor
    mixed = (mixed ^ (mixed >> 27)) * second_factor
    return (mixed ^ (mixed >> 31)) | 1
