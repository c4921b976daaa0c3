"""The owners of layers: every layer has one, and the ranks own about the same."""

from __future__ import annotations

import pytest

from gspo.learner.shares.owners import owners


def test_the_largest_layers_go_first_each_to_the_rank_with_the_least() -> None:
    assert owners([3, 5, 4, 2], 2) == (1, 0, 1, 0)
    assert owners([3, 5, 4, 2], 1) == (0, 0, 0, 0)
    assert owners([1, 1], 4) == (0, 1)


@pytest.mark.parametrize("num_ranks", [2, 4, 64])
def test_no_rank_owns_more_than_a_layer_above_the_mean(num_ranks: int) -> None:
    """Those of a model like Qwen3-235B: 94 layers, and two matrices of the vocabulary."""
    sizes = [2490, *[622] * 2, *[2490] * 93]
    ranks = owners(sizes, num_ranks)
    owned = [sum(size for size, rank in zip(sizes, ranks, strict=True) if rank == own) for own in range(num_ranks)]
    assert sum(owned) == sum(sizes)
    assert max(owned) <= sum(sizes) / num_ranks + max(sizes)
