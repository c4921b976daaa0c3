"""A child process: the encoding of what a version changes, frame by frame in threads as the services work."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from benchmarks.harness.child_process import serve
from benchmarks.push.versions import policy
from gspo.common.weights import apply_changes, pack_changes, policy_digest
from gspo.learner.push.policy_weights import FRAME_BYTES, PolicyWeights

_ROUNDS = 3


def measure(spec: dict[str, Any]) -> dict[str, Any]:
    """Changed share, bytes and seconds for every version of a learning rate."""
    found = []
    base = policy(spec["rate"], 0)
    for version in range(1, spec["versions"] + 1):
        newest = policy(spec["rate"], version)
        found.append(_compare(newest, base))
        base = newest
    return {"versions": found}


def _compare(newest: PolicyWeights, base: PolicyWeights) -> dict[str, Any]:
    runs = [
        (name, slice(start, start + FRAME_BYTES // bits.itemsize))
        for name, bits in newest.bits.items()
        for start in range(0, bits.size, FRAME_BYTES // bits.itemsize)
    ]
    pairs = [(newest.bits[name].reshape(-1)[run], base.bits[name].reshape(-1)[run]) for name, run in runs]
    began = time.monotonic()
    digest = policy_digest((name, newest.dtype, bits.shape, bits) for name, bits in newest.bits.items())
    digest_s = time.monotonic() - began
    assert digest == newest.digest
    num_changed = sum(int(np.count_nonzero(new != old)) for new, old in pairs)
    return {
        "changed": num_changed / sum(len(new) for new, _ in pairs),
        "bytes": newest.num_bytes,
        "digest_s": digest_s,
        "gaps": _encoded(pairs),
    }


def _encoded(pairs: list[tuple[Any, Any]]) -> dict[str, float]:
    """Bytes, and the least seconds of a few rounds."""
    pack_s, apply_s = [], []
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
        for _ in range(_ROUNDS):
            began = time.monotonic()
            packed = list(threads.map(lambda pair: pack_changes(*pair), pairs))
            pack_s.append(time.monotonic() - began)
            copies = [old.copy() for _, old in pairs]
            began = time.monotonic()
            list(threads.map(apply_changes, copies, packed))
            apply_s.append(time.monotonic() - began)
    assert all(np.array_equal(copy, new) for copy, (new, _) in zip(copies, pairs, strict=True))
    return {"bytes": sum(len(changes.data) for changes in packed), "pack_s": min(pack_s), "apply_s": min(apply_s)}


if __name__ == "__main__":
    serve(measure)
