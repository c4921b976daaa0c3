"""Micro-batches: every row once, within the budget, the same each time; padding by hand."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gspo_core.packing import micro_batches, packed_micro_batches, pad


def test_literal() -> None:
    assert micro_batches([3, 10, 4, 10, 1], max_tokens=20) == [[1, 3], [2, 0, 4]]
    assert micro_batches([5, 5, 5], max_tokens=10) == [[0, 1], [2]]
    assert micro_batches([], max_tokens=10) == []


def test_the_branches_of_a_rollout_stay_together() -> None:
    """Rollout 0 takes three rows of 4 tokens; rollout 2 exceeds the budget by its padding, and is alone."""
    assert micro_batches([4, 4, 9, 2], 16, num_branches=[3, 1, 2, 1]) == [[2], [0, 1], [3]]
    assert micro_batches([4, 4, 2], 16, num_branches=[3, 2, 2]) == [[0], [1, 2]]
    assert micro_batches([5, 5, 5], 10, num_branches=[1, 1, 1]) == micro_batches([5, 5, 5], 10)


def test_packed_literal() -> None:
    assert packed_micro_batches([3, 10, 4, 10, 1], max_tokens=20) == [[1, 3], [2, 0, 4]]
    assert packed_micro_batches([3, 10, 4, 10, 1], max_tokens=14) == [[1], [3, 2], [0, 4]]
    assert packed_micro_batches([], max_tokens=10) == []


@given(st.lists(st.integers(0, 50), max_size=60), st.integers(50, 200))
def test_packed_rows_fill_the_budget_and_no_more(lengths: list[int], max_tokens: int) -> None:
    batches = packed_micro_batches(lengths, max_tokens)
    assert sorted(row for rows in batches for row in rows) == list(range(len(lengths)))
    for rows in batches:
        assert rows
        assert sum(lengths[row] for row in rows) <= max_tokens


@given(st.lists(st.integers(0, 50), max_size=60), st.integers(50, 200))
def test_every_row_once_and_within_the_budget(lengths: list[int], max_tokens: int) -> None:
    batches = micro_batches(lengths, max_tokens)
    assert sorted(row for rows in batches for row in rows) == list(range(len(lengths)))
    for rows in batches:
        assert rows
        assert len(rows) * max(lengths[row] for row in rows) <= max_tokens


@pytest.mark.parametrize("cut", [micro_batches, packed_micro_batches])
def test_refusals(cut: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match="row 1 has 11 tokens; raise max_tokens, 10"):
        cut([3, 11], max_tokens=10)
    with pytest.raises(ValueError, match="lengths holds -1"):
        cut([3, -1], max_tokens=10)


def test_pad() -> None:
    values_BT, mask_BT = pad([[1, 2, 3], [], [4]], fill=9)
    assert values_BT.tolist() == [[1, 2, 3], [9, 9, 9], [4, 9, 9]]
    assert mask_BT.tolist() == [[True, True, True], [False] * 3, [True, False, False]]
    logp_BT, _ = pad([[-0.5], [-1.0, -2.0]], dtype=torch.float32)
    assert logp_BT.tolist() == [[-0.5, 0.0], [-1.0, -2.0]]


def test_pad_of_nothing() -> None:
    assert [x.shape for x in pad([])] == [(0, 0), (0, 0)]
    assert [x.shape for x in pad([[], []])] == [(2, 0), (2, 0)]
