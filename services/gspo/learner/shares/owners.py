"""The rank that owns each layer of the policy."""

from collections.abc import Sequence


def owners(sizes: Sequence[int], num_ranks: int) -> tuple[int, ...]:
    """The rank of each layer, so that all ranks own about the same: the largest first, each to the one with the least.

    Args:
        sizes: The bytes or elements of each layer.
    """
    owned, ranks = [0] * num_ranks, [0] * len(sizes)
    for layer in sorted(range(len(sizes)), key=lambda layer: -sizes[layer]):
        ranks[layer] = min(range(num_ranks), key=owned.__getitem__)
        owned[ranks[layer]] += sizes[layer]
    return tuple(ranks)
