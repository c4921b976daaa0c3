"""Sums over sequences of tokens: over whole rollouts, or over each branch of a rollout for itself.

`branch_BT` [B, T] is the number of each token's branch, from 0; None where a rollout is one sequence. Results are
[B, K], K the highest number of branches, 1 for None. Not here: the formulas that need them; loss.py and figures.py.
"""

import torch
from torch import Tensor


def sums_of_sequences(x_BT: Tensor, branch_BT: Tensor | None) -> Tensor:
    """The sum of each sequence, [B, K]; 0 where a rollout has no such branch."""
    if branch_BT is None:
        return x_BT.sum(-1, keepdim=True)
    K = int(branch_BT.max()) + 1 if branch_BT.numel() else 1
    dtype = x_BT.dtype if x_BT.is_floating_point() else torch.long
    return x_BT.new_zeros(len(x_BT), K, dtype=dtype).scatter_add(1, branch_BT, x_BT.to(dtype))


def lengths_of_sequences(mask_BT: Tensor, branch_BT: Tensor | None) -> Tensor:
    """L: the counted tokens of each sequence, [B, K]."""
    return sums_of_sequences(mask_BT.bool(), branch_BT)


def means_of_sequences(x_BT: Tensor, mask_BT: Tensor, branch_BT: Tensor | None) -> Tensor:
    """sum_t x / L of each sequence, [B, K]; x is 0 outside the mask. 0 for a sequence without tokens."""
    return sums_of_sequences(x_BT, branch_BT) / lengths_of_sequences(mask_BT, branch_BT).clamp(min=1)


def at_tokens(x_BK: Tensor, mask_BT: Tensor, branch_BT: Tensor | None) -> Tensor:
    """Each token's value of its sequence, [B, T]."""
    return x_BK.expand(mask_BT.shape) if branch_BT is None else x_BK.gather(1, branch_BT)
