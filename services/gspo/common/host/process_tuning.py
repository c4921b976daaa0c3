"""Settings of a process before it imports an engine: waiting threads, freed memory, garbage collection.

It imports neither torch nor vLLM: both read these settings when they are loaded.
"""

import ctypes
import gc
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

# A thread at a barrier looks for the others for some 20 us and then sleeps. Most barriers are shorter, and waking a
# thread takes as long: without looking, a learner alone lost a fifth of its speed. OpenMP's default of 300,000 looks
# makes two engines that share the cores several times as slow: each waits for a thread that the other one blocks.
WAITING: Mapping[str, str] = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "1000"}
# mallopt's names of its parameters. Blocks of up to 32 MiB, the most that glibc allows, come from the heap, and up to
# 256 MiB of freed heap stay.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_KEPT_BYTES, _LARGEST_BLOCK_BYTES = 256 * 2**20, 32 * 2**20
# glibc's own threshold at the start of a process.
_RETURNED_BYTES = 128 * 2**10


def wait_shortly() -> None:
    """Set how threads wait, for this process and those that it starts; a value that the user has set stays."""
    for name, value in WAITING.items():
        os.environ.setdefault(name, value)


def keep_freed_memory() -> bool:
    """Keep freed blocks in this process for the next ones; False where the C library is not glibc.

    glibc returns large freed blocks to the system and takes them anew, page by page. Sender and receiver of weights
    free one frame after another: that took half of the transfer of a weight update.
    """
    return _set_heap(_LARGEST_BLOCK_BYTES, _KEPT_BYTES)


@contextmanager
def return_freed_memory() -> Iterator[None]:
    """A block in which freed blocks return to the system at once; after it `keep_freed_memory` holds.

    A load frees whole weights between the parts that it keeps. On the heap the holes between these stay in memory.
    """
    _set_heap(_RETURNED_BYTES, _RETURNED_BYTES)
    try:
        yield
    finally:
        keep_freed_memory()


def _set_heap(largest_block_bytes: int, kept_bytes: int) -> bool:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_MMAP_THRESHOLD, largest_block_bytes) and mallopt(_TRIM_THRESHOLD, kept_bytes))


@contextmanager
def importing() -> Iterator[None]:
    """A block of imports, without garbage collection.

    Nearly all objects of an import stay. The collector looks through them again and again and frees nothing: that took
    1.9 of 9.3 s of vLLM's imports and 1.3 of 5.6 s of the learner's (processor time).
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        # Later collections skip these objects; a process forked from this one then shares their memory.
        gc.freeze()
        if was_enabled:
            gc.enable()
