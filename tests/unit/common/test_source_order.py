"""The order of sources: shares at every prefix, each source's own order, the same place from anywhere."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo.common.source_order import SourceOrder

WEIGHTS = st.lists(st.integers(1, 1000) | st.floats(1e-3, 1e3), min_size=1, max_size=32)


def sources(weights: list[float], num_groups: int) -> list[int]:
    order = SourceOrder(weights)
    return [order.place(group).source for group in range(num_groups)]


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ([1.0], [0, 0, 0, 0]),
        ([1.0, 1.0], [0, 1, 0, 1, 0, 1]),
        # The times (c + 1/2) / p: 2/3, 2, 10/3, ... of the first and 2, 6, ... of the second, in units of 1.
        ([3.0, 1.0], [0, 0, 1, 0, 0, 0, 1, 0]),
        ([0.1, 0.2, 0.1], [1, 0, 2, 1, 1, 0, 2, 1]),
    ],
)
def test_small_cases_by_hand(weights: list[float], expected: list[int]) -> None:
    assert sources(weights, len(expected)) == expected


@settings(max_examples=60, deadline=None)
@given(WEIGHTS, st.integers(1, 300))
def test_every_prefix_has_the_shares_of_the_weights(weights: list[float], num_groups: int) -> None:
    order, counts, k = SourceOrder(weights), Counter[int](), len(weights)
    shares = [weight / sum(weights) for weight in weights]
    for group in range(num_groups):
        source, number = order.place(group)
        # The groups of a source are numbered in order: each source's own order is that of a run of it alone.
        assert number == counts[source]
        counts[source] += 1
        for i, share in enumerate(shares):
            assert abs(counts[i] - (group + 1) * share) <= (0.5 + share * (k - 2) / 2 if k > 1 else 0) + 1e-9


@settings(max_examples=60, deadline=None)
@given(WEIGHTS, st.integers(0, 10**12))
def test_a_place_far_away_continues_the_order(weights: list[float], group: int) -> None:
    """A resumed run asks for groups in the middle: each place follows from the one before by the rule of the order."""
    order = SourceOrder(weights)
    numbers: dict[int, int] = {}
    for later in range(group, group + 40):
        source, number = order.place(later)
        assert number == numbers.get(source, number)
        numbers[source] = number + 1
    assert order.place(group) == SourceOrder(weights).place(group)


def test_one_source_has_every_group() -> None:
    order = SourceOrder([7.5])
    assert [order.place(group) for group in (0, 1, 41, 10**9)] == [(0, 0), (0, 1), (0, 41), (0, 10**9)]
