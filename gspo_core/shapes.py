"""Shape checks: every public function refuses tensors of wrong shapes, by name.

Not a tensor library: three checks and the dtype that sums are made in.
"""

from collections.abc import Mapping

import torch
from torch import Tensor


def check_matrix(**tensors: Tensor) -> None:
    """Raise ValueError unless all tensors (given by name) are [B, T] with the same B and T."""
    _check_alike(2, "[B, T]", tensors)


def check_vector(**tensors: Tensor) -> None:
    """Raise ValueError unless all tensors (given by name) are [B] with the same B."""
    _check_alike(1, "[B]", tensors)


def _check_alike(num_dimensions: int, letters: str, tensors: Mapping[str, Tensor]) -> None:
    (first_name, first), *others = tensors.items()
    if first.dim() != num_dimensions:
        raise ValueError(f"{first_name} has shape {tuple(first.shape)}; it must be {letters}")
    for name, tensor in others:
        if tensor.shape != first.shape:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}, {first_name} has {tuple(first.shape)}; "
                f"they must be the same {letters}"
            )


def check_rows(rows_B: Tensor, matrix_BT: Tensor, names: str) -> None:
    """Raise ValueError unless one tensor is [B], the other [B, T], with the same B. `names` is "rows, matrix"."""
    if rows_B.dim() != 1 or matrix_BT.dim() != 2 or len(rows_B) != len(matrix_BT):
        raise ValueError(
            f"{names} have shapes {tuple(rows_B.shape)} and {tuple(matrix_BT.shape)}; they must be [B] and [B, T]"
        )


def at_least_float32(*tensors: Tensor) -> torch.dtype:
    """The dtype to compute in: float64 if any tensor is float64, else float32 (also for bf16 and integers)."""
    if any(tensor.dtype == torch.float64 for tensor in tensors):
        return torch.float64
    return torch.float32
