"""Rollouts packed one after another without padding, and their positions side by side for the attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gspo_core.packing import micro_batches


@dataclass(frozen=True)
class PackedBlock:
    """Adjacent rollouts of a line, of similar length, as R rows of S positions.

    Attributes:
        first, last: Their positions in the line, last excluded.
        row_place_N: For each of the R * S places, its position in the block; behind a row's end, any position of that
            row. None if every row is S long.
        line_place_N: For each position of the block, its place among the R * S.
    """

    first: int
    last: int
    num_rows: int
    width: int
    row_place_N: Tensor | None
    line_place_N: Tensor | None

    @classmethod
    def of(cls, first: int, lengths: Sequence[int]) -> PackedBlock:
        """The block of rollouts of these lengths that starts at `first`."""
        R, S, last = len(lengths), max(lengths), first + sum(lengths)
        if last - first == R * S:
            return cls(first, last, R, S, None, None)
        length_R = torch.tensor(lengths)
        place_S, start_R = torch.arange(S), length_R.cumsum(0) - length_R
        inside_RS = place_S < length_R[:, None]
        row_place_RS = start_R[:, None] + torch.where(inside_RS, place_S, 0)
        return cls(first, last, R, S, row_place_RS.flatten(), inside_RS.flatten().nonzero()[:, 0])

    def to(self, device: torch.device) -> PackedBlock:
        """The same with its places on `device`."""
        if self.row_place_N is None or self.line_place_N is None:
            return self
        places = self.row_place_N.to(device), self.line_place_N.to(device)
        return PackedBlock(self.first, self.last, self.num_rows, self.width, *places)

    def to_rows(self, line: Tensor) -> Tensor:
        """[positions of the line, ...] to [R, S, ...]: this block's rows, with finite values behind their ends."""
        part = line[self.first : self.last]
        if self.row_place_N is not None:
            part = _ToRows.apply(part, self.row_place_N, self.line_place_N)  # type: ignore[no-untyped-call]
        return part.reshape(self.num_rows, self.width, *line.shape[1:])

    def to_line(self, rows: Tensor) -> Tensor:
        """[R, S, ...] to this block's [positions, ...]; places behind the rows' ends get no gradient."""
        flat = rows.reshape(self.num_rows * self.width, *rows.shape[2:])
        return flat if self.line_place_N is None else flat.index_select(0, self.line_place_N)


class _ToRows(torch.autograd.Function):
    """index_select with an index_select as gradient: each position has one place that counts."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, row_place_N: Tensor, line_place_N: Tensor) -> Tensor:
        ctx.line_place_N = line_place_N
        return part.index_select(0, row_place_N)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return gradient.index_select(0, ctx.line_place_N), None, None


@dataclass(frozen=True)
class PackedRollouts:
    """A line of rollouts, the longest first.

    Attributes:
        position_S: Every position's place in its own rollout, from 0.
    """

    position_S: Tensor
    blocks: tuple[PackedBlock, ...]

    @classmethod
    def of(cls, lengths: Sequence[int], max_padded: int) -> PackedRollouts:
        """Pack rollouts of these lengths, in descending order, one after another.

        Args:
            max_padded: Most places of a block; a longer rollout is a block of its own.
        """
        position_S = torch.cat([torch.arange(length) for length in lengths])
        blocks, first = [], 0
        for rows in micro_batches(lengths, max(max_padded, *lengths)):
            block = PackedBlock.of(first, [lengths[row] for row in rows])
            blocks.append(block)
            first = block.last
        return cls(position_S, tuple(blocks))

    def to(self, device: torch.device) -> PackedRollouts:
        """The same with its places on `device`."""
        return PackedRollouts(self.position_S.to(device), tuple(block.to(device) for block in self.blocks))
