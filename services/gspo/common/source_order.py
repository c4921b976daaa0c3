"""The source of prompts of each group, from the group's number alone; for coordinator and learner."""

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple


class SourcePlace(NamedTuple):
    """A group's place among the sources.

    Attributes:
        source: Index of its source.
        number: Groups of that source before it.
    """

    source: int
    number: int


class SourceOrder:
    """The sources of the groups of a run, without end, in shares that follow the weights at every prefix.

    The order is the divisor method of Webster and Sainte-Lague, which seats are divided by in parliaments. Let source i
    have the share p_i = weight_i / sum of weights, and c_i of the groups before group g. Group g is of the source with
    the least (c_i + 1/2) / p_i, of equal ones the first. With k >= 2 sources, after any n groups

        |c_i - n p_i| <= 1/2 + p_i (k - 2) / 2.

    The counts before a group need no loop over the groups: all j with (j + 1/2) / p_i <= T come before all others, and
    those are floor(p_i T + 1/2). With T = g - k / 2 they are at most g together, and the method takes at most k
    groups more. The arithmetic is that of whole numbers.

    Args:
        weights: A positive number for each source.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        exact = [Fraction(repr(weight)) for weight in weights]
        common = math.lcm(*(weight.denominator for weight in exact))
        self._weights = [int(weight * common) for weight in exact]
        self._sum, multiple = sum(self._weights), math.lcm(*self._weights)
        # (c + 1/2) / p in units that are the same for all sources.
        self._strides = [multiple // weight for weight in self._weights]

    def place(self, group: int) -> SourcePlace:
        """The source of a group, 0 and up, and its number there."""
        twice_T = 2 * group - len(self._weights)
        counts = [max(0, (weight * twice_T + self._sum) // (2 * self._sum)) for weight in self._weights]
        for _ in range(group - sum(counts)):
            counts[self._next(counts)] += 1
        source = self._next(counts)
        return SourcePlace(source, counts[source])

    def _next(self, counts: Sequence[int]) -> int:
        times = [(2 * count + 1) * stride for count, stride in zip(counts, self._strides, strict=True)]
        return times.index(min(times))
