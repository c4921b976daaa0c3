"""Adjacent ranks that share each packed line: every one has a part of its positions, and of its heads in attention.

Attention needs the whole line, but each of its heads works alone. So before it the ranks exchange positions for heads,
and after it heads for positions; every other layer works on a rank's own positions. Source: DeepSpeed-Ulysses, arXiv
2309.14509.

All ranks of a group make these calls in the same order, in the backward pass too, since they run the same graph.
Letters: S positions of a line, P of a part, all parts alike; K = P * ranks, with filling behind the end of the line.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.autograd.function import once_differentiable


class SequenceRanks:
    """This rank's group of ranks, which share each line in parts of equal length.

    All ranks of the learner create it at once, and their number is a multiple of `num_ranks`.

    Args:
        num_ranks: Ranks of a group.
        timeout_s: Longest wait of a rank for the others.

    Attributes:
        num_ranks: Ranks of this group.
        rank: This one's number in it, from 0; it has the part of that number.
    """

    def __init__(self, num_ranks: int, timeout_s: float) -> None:
        group, self.rank = divmod(distributed.get_rank(), num_ranks)
        self.num_ranks = num_ranks
        firsts = range(0, distributed.get_world_size(), num_ranks)
        timeout = timedelta(seconds=timeout_s)
        # Every rank takes part in the creation of every group.
        groups = [distributed.new_group(range(first, first + num_ranks), timeout=timeout) for first in firsts]
        self._group = groups[group]

    def part_length(self, length: int) -> int:
        """P of a line of S positions."""
        return -(-length // self.num_ranks)

    def part(self, line_S: Tensor) -> Tensor:
        """This rank's part [P] of a line [S], filled up with 0 behind the line's end."""
        P = self.part_length(len(line_S))
        part = line_S[self.rank * P : (self.rank + 1) * P]
        return nn.functional.pad(part, (0, P - len(part)))

    def own_places(self, place_N: Tensor, length: int) -> Tensor:
        """Whether each of some places in a line of S positions is in this rank's part, as Bool [N]."""
        return place_N // self.part_length(length) == self.rank

    def whole(self, part: Tensor, length: int) -> Tensor:
        """The line [S, ...] from the parts [P, ...] of all ranks.

        Every rank makes the same loss of it. So the gradient that arrives is the line's on each, and each takes that of
        its part: added up over the ranks, the loss counts once.
        """
        whole: Tensor = _Whole.apply(part, self)  # type: ignore[no-untyped-call]
        return whole[:length]

    def to_heads(self, tensors: Sequence[Tensor], length: int) -> list[Tensor]:
        """All positions of this rank's share of the heads, from its positions of all heads.

        Fewer heads than ranks, as of keys and values, are repeated, so that each rank has the one it needs.

        Args:
            tensors: [P, heads, width] each, of one dtype; `common.model.heads.heads_divide` holds for their heads.
            length: S.

        Returns:
            Of each, [S, heads / ranks or 1, width].
        """
        shares = [_per_rank(tensor, self.num_ranks) for tensor in tensors]
        received_KC = self._exchange(torch.cat(shares, -1).transpose(0, 1)).flatten(0, 1)[:length]
        split = torch.split(received_KC, [share.shape[-1] for share in shares], -1)
        return [part.reshape(length, -1, tensor.shape[-1]) for part, tensor in zip(split, tensors, strict=True)]

    def to_positions(self, line: Tensor) -> Tensor:
        """This rank's positions [P, heads, width] of all heads, from the line [S, heads / ranks, width] of its share.

        Positions behind the line's end are 0.
        """
        length, _, width = line.shape
        P = self.part_length(length)
        filled = nn.functional.pad(line, (0, 0, 0, 0, 0, P * self.num_ranks - length))
        return self._exchange(filled.view(self.num_ranks, P, -1)).transpose(0, 1).reshape(P, -1, width)

    def _exchange(self, sent: Tensor) -> Tensor:
        """[ranks, ...], entry r for rank r, to [ranks, ...], entry r from rank r."""
        received: Tensor = _Exchange.apply(sent, self._group)  # type: ignore[no-untyped-call]
        return received


def _per_rank(tensor: Tensor, num_ranks: int) -> Tensor:
    """[P, heads, width] as [P, ranks, numbers of a rank's heads]."""
    P, num_heads, _ = tensor.shape
    if num_heads < num_ranks:
        tensor = tensor.repeat_interleave(num_ranks // num_heads, 1)
    return tensor.reshape(P, num_ranks, -1)


class _Exchange(torch.autograd.Function):
    """The gradient goes back the way that the numbers came."""

    @staticmethod
    def forward(ctx: Any, sent: Tensor, group: distributed.ProcessGroup) -> Tensor:
        ctx.group = group
        return _all_to_all(sent, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _all_to_all(gradient, ctx.group), None


def _all_to_all(sent: Tensor, group: distributed.ProcessGroup) -> Tensor:
    sent = sent.contiguous()
    received = torch.empty_like(sent)
    distributed.all_to_all_single(received, sent, group=group)
    return received


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, ranks: SequenceRanks) -> Tensor:
        ctx.ranks, ctx.length = ranks, len(part)
        whole = part.new_empty(len(part) * ranks.num_ranks, *part.shape[1:])
        distributed.all_gather(list(torch.split(whole, len(part))), part.contiguous(), group=ranks._group)
        return whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        start = ctx.ranks.rank * ctx.length
        return gradient[start : start + ctx.length].contiguous(), None
