"""A policy version as raw bits: a push compares and sends bits, so that no number changes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gspo.common.weights.digest import policy_digest
from gspo.learner.training.trainer_api import NotFiniteError

_BITS = {torch.float32: torch.uint32, torch.bfloat16: torch.uint16, torch.float16: torch.uint16}


@dataclass(frozen=True)
class PolicyWeights:
    """One version of the policy in the inference dtype, in host memory.

    Attributes:
        bits: Tensor name -> its elements as unsigned integers of the same width, in their shape.
    """

    version: int
    digest: str
    dtype: str
    bits: Mapping[str, NDArray[np.unsignedinteger[Any]]]

    @property
    def num_bytes(self) -> int:
        """Of all tensors."""
        return sum(tensor.nbytes for tensor in self.bits.values())


def weights_from(version: int, tensors: Mapping[str, torch.Tensor]) -> PolicyWeights:
    """A policy from contiguous CPU tensors of one dtype, which must not change afterwards.

    Raises:
        NotFiniteError: A weight is infinite or NaN: no generator may sample from such a version.
    """
    dtypes = {str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()}
    if len(dtypes) != 1:
        raise ValueError(f"a policy has one inference dtype, not {sorted(dtypes)}")
    (dtype,) = dtypes
    if not_finite := [name for name, tensor in tensors.items() if not _is_finite(tensor)]:
        raise NotFiniteError(
            f"version {version} is not published: {len(not_finite)} of {len(tensors)} of its tensors hold weights that "
            f"are no finite numbers, first {not_finite[0]}"
            + (". Lower learner.learning_rate and resume" if version else "")
        )
    bits = {name: tensor.view(_BITS[tensor.dtype]).numpy() for name, tensor in tensors.items()}
    digest = policy_digest((name, dtype, tensor.shape, tensor) for name, tensor in bits.items())
    return PolicyWeights(version, digest, dtype, bits)


def _is_finite(tensor: torch.Tensor) -> bool:
    """Whether every element is; at a tenth of the time of a digest, and without a copy."""
    return not tensor.numel() or all(bool(bound.isfinite()) for bound in torch.aminmax(tensor))
