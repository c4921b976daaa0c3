"""A policy version as raw bits, and its manifest.

A push compares and sends bits, so that no number changes. With several ranks each has the bits of the tensors that it
owns. Rank zero has the manifest of all. weight_updates.py brings a version to generators.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from gspo.common.weights.manifest import (
    ManifestEntry,
    digest_of_before,
    entries_of,
    entries_of_before,
    is_of_before,
    manifest_digest,
)
from gspo.learner.training.trainer_api import NotFiniteError

_BITS = {torch.float32: torch.uint32, torch.bfloat16: torch.uint16, torch.float16: torch.uint16}


@dataclass(frozen=True)
class PolicyFacts:
    """A version without its weights.

    Attributes:
        num_bytes: Size of all tensors.
        sources: Addresses of the ranks that serve the tensors which rank zero does not own.
    """

    version: int
    digest: str
    dtype: str
    num_tensors: int
    num_bytes: int
    sources: tuple[str, ...] = ()


@dataclass(frozen=True)
class PolicyWeights:
    """One version of the policy in the inference dtype: its manifest, and this rank's weights in host memory.

    Attributes:
        digest: The manifest's; empty on other ranks than zero.
        entries: The manifest, of all tensors; on other ranks than zero of their own.
        bits: Name of each tensor that this rank owns -> its elements as unsigned integers of the same width, in their
            shape.
        digest_on_record: Its digest, of the kind that an earlier record of the version has.
    """

    version: int
    digest: str
    dtype: str
    entries: tuple[ManifestEntry, ...]
    bits: Mapping[str, NDArray[np.unsignedinteger[Any]]]
    digest_on_record: str = ""
    sources: tuple[str, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Size of all tensors of the manifest."""
        num_elements = sum(prod(entry.shape) for entry in self.entries)
        return num_elements * getattr(torch, self.dtype).itemsize if num_elements else 0

    @property
    def facts(self) -> PolicyFacts:
        """The version without its weights."""
        return PolicyFacts(self.version, self.digest, self.dtype, len(self.entries), self.num_bytes, self.sources)


class RankManifest(NamedTuple):
    """The part of a manifest that one rank makes.

    Attributes:
        dtype: Empty from a rank that owns nothing.
        address: Where generators pull the rank's tensors; empty for rank zero.
        not_finite: Names of tensors with weights that are no finite numbers; such a version has no entries.
        before: Entries of the older kind, where a record has that kind.
    """

    dtype: str
    address: str
    num_tensors: int
    not_finite: Sequence[str]
    entries: Sequence[ManifestEntry]
    before: Sequence[ManifestEntry]

    def to_bytes(self) -> bytes:
        """One line of JSON."""
        return json.dumps(self).encode()

    @classmethod
    def from_bytes(cls, line: bytes) -> RankManifest:
        """The part that `to_bytes` wrote."""
        *facts, entries, before = json.loads(line)
        parts = (
            [ManifestEntry(name, dtype, tuple(shape), number) for name, dtype, shape, number in part]
            for part in (entries, before)
        )
        return cls(*facts, *parts)


def weights_from(version: int, tensors: Mapping[str, torch.Tensor], recorded: str = "") -> PolicyWeights:
    """A policy from contiguous CPU tensors of one dtype, which must not change afterwards.

    Args:
        recorded: The digest on record for this version, whose kind `digest_on_record` has; empty without one.

    Raises:
        NotFiniteError: A weight is infinite or NaN: no generator may sample from such a version.
    """
    return joined(version, own_weights(version, tensors), [rank_manifest(tensors, recorded)])


def own_weights(version: int, tensors: Mapping[str, torch.Tensor]) -> PolicyWeights:
    """The tensors that this rank owns, without a manifest."""
    dtype = _dtype_of(tensors)
    bits = {name: tensor.view(_BITS[tensor.dtype]).numpy() for name, tensor in tensors.items()}
    entries = tuple(ManifestEntry(name, dtype, tensor.shape, "") for name, tensor in bits.items())
    return PolicyWeights(version, "", dtype, entries, bits)


def rank_manifest(tensors: Mapping[str, torch.Tensor], recorded: str = "", address: str = "") -> RankManifest:
    """The manifest of the tensors that this rank owns; the arguments as for `weights_from`."""
    dtype = _dtype_of(tensors)
    if not_finite := [name for name, tensor in tensors.items() if not _is_finite(tensor)]:
        return RankManifest(dtype, address, len(tensors), not_finite, [], [])
    named = [(name, dtype, tuple(it.shape), it.view(_BITS[it.dtype]).numpy()) for name, it in tensors.items()]
    before = entries_of_before(named) if is_of_before(recorded) else []
    return RankManifest(dtype, address, len(tensors), not_finite, entries_of(named), before)


def joined(version: int, own: PolicyWeights, parts: Sequence[RankManifest]) -> PolicyWeights:
    """A version from this rank's tensors and the manifest of every rank.

    Raises:
        NotFiniteError: As for `weights_from`.
    """
    if not_finite := [name for part in parts for name in part.not_finite]:
        raise NotFiniteError(
            f"version {version} is not published: {len(not_finite)} of {sum(part.num_tensors for part in parts)} of "
            f"its tensors hold weights that are no finite numbers, first {not_finite[0]}"
            + (". Lower learner.learning_rate and resume" if version else "")
        )
    (dtype,) = {part.dtype for part in parts if part.dtype}
    entries, before = (tuple(it for part in parts for it in getattr(part, kind)) for kind in ("entries", "before"))
    digest = manifest_digest(entries)
    sources = tuple(part.address for part in parts if part.address and part.num_tensors)
    on_record = digest_of_before(before) if before else digest
    return PolicyWeights(version, digest, dtype, entries, own.bits, on_record, sources)


def _dtype_of(tensors: Mapping[str, torch.Tensor]) -> str:
    """Their dtype; empty without tensors."""
    dtypes = {str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()}
    if len(dtypes) > 1:
        raise ValueError(f"a policy has one inference dtype, not {sorted(dtypes)}")
    return next(iter(dtypes), "")


def _is_finite(tensor: torch.Tensor) -> bool:
    """Whether every element is; at a tenth of the time of a digest, and without a copy."""
    return not tensor.numel() or all(bool(bound.isfinite()) for bound in torch.aminmax(tensor))
