"""The manifest of a policy version, its tensors with their fingerprints, and the digest that names the version.

It is of tensors: two folders with the same tensors in different files have the same digest. Runs of before recorded
another digest, SHA-256 of the bytes of each tensor. The digest on record says by its prefix which it is.
"""

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from gspo.common.weights.fingerprint import fingerprint

# Of digests of manifests; those before it have none.
PREFIX = "lin64:"
# More threads than these would only wait for memory.
_MOST_THREADS = 8
# Raw little-endian bytes in C order. A dtype that NumPy lacks (bfloat16) comes as an integer view of its width.
TensorBytes: TypeAlias = bytes | bytearray | memoryview | NDArray[np.generic]
# (Hugging Face name, dtype as in `bfloat16`, shape, raw bytes).
NamedTensor: TypeAlias = tuple[str, str, tuple[int, ...], TensorBytes]


class ManifestEntry(NamedTuple):
    """A tensor of a version; `fingerprint` is the text of a Fingerprint, or a SHA-256 for runs of before."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    fingerprint: str


def is_of_before(recorded: str) -> bool:
    """Whether a digest on record is of the kind that has no manifest."""
    return bool(recorded) and not recorded.startswith(PREFIX)


def manifest_digest(entries: Iterable[ManifestEntry]) -> str:
    """The digest of a manifest: its prefix, and the SHA-256 of the sorted lines `name dtype shape fingerprint`.

    Raises:
        ValueError: A name comes twice.
    """
    return PREFIX + _lines_digest(list(entries))


def digest_of_before(entries: Iterable[ManifestEntry]) -> str:
    """The digest that runs of before recorded, of entries with SHA-256; otherwise as `manifest_digest`."""
    return _lines_digest(list(entries))


def policy_digest(tensors: Iterable[NamedTensor]) -> str:
    """The digest of the manifest of a whole policy.

    The order of the tensors does not matter; a tied `lm_head.weight` is omitted by both sides, so that one policy has
    one digest.

    Raises:
        ValueError: A name comes twice.
    """
    return manifest_digest(entries_of(tensors))


def entries_of(tensors: Iterable[NamedTensor]) -> list[ManifestEntry]:
    return _entries(tensors, lambda data: str(fingerprint(np.frombuffer(_bytes(data), np.uint8))))


def entries_of_before(tensors: Iterable[NamedTensor]) -> list[ManifestEntry]:
    """Entries with the SHA-256 of each tensor."""
    return _entries(tensors, lambda data: hashlib.sha256(_bytes(data)).hexdigest())


def _bytes(data: TensorBytes) -> memoryview:
    """A view of its bytes: of C-contiguous data; BufferError or ValueError otherwise."""
    view = memoryview(cast("bytes", data))  # before Python 3.12 types cannot say "a buffer"
    # A view with a zero in its shape cannot be cast.
    return view.cast("B") if view.nbytes else memoryview(b"")


def _entries(tensors: Iterable[NamedTensor], number_of: Callable[[TensorBytes], str]) -> list[ManifestEntry]:
    # The largest first, so that no thread begins the longest tensor when the others are done.
    policy = sorted(tensors, key=lambda tensor: -memoryview(cast("bytes", tensor[3])).nbytes)
    with ThreadPoolExecutor(min(_MOST_THREADS, len(os.sched_getaffinity(0)))) as threads:
        numbers = threads.map(number_of, (data for *_, data in policy))
        return [ManifestEntry(*tensor[:3], number) for tensor, number in zip(policy, numbers, strict=True)]


def _lines_digest(entries: list[ManifestEntry]) -> str:
    (name, times), *_ = Counter(entry.name for entry in entries).most_common(1) or [("", 0)]
    if times > 1:
        raise ValueError(f"the manifest has tensor {name!r} twice")
    lines = (f"{name} {dtype} {','.join(map(str, shape))} {number}\n" for name, dtype, shape, number in sorted(entries))
    return hashlib.sha256("".join(lines).encode()).hexdigest()
