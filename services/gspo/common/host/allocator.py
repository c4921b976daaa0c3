"""Memory that is freed and taken again at once: keep it, instead of giving it back to the system each time.

glibc hands large blocks back when they are freed, and takes them anew, page by page, for the next one. Sender and
receiver of weights let go of one frame after another: half of a push's transfer went there.
"""

from __future__ import annotations

import ctypes

# mallopt's names of its parameters, and what they are set to: blocks of up to 32 MiB, the most that glibc allows,
# come from the heap, and up to 256 MiB of freed heap stay.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_KEPT_BYTES, _LARGEST_BLOCK_BYTES = 256 * 2**20, 32 * 2**20


def keep_freed_memory() -> bool:
    """Keep freed blocks in this process for the next; False where the C library is not glibc."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_MMAP_THRESHOLD, _LARGEST_BLOCK_BYTES) and mallopt(_TRIM_THRESHOLD, _KEPT_BYTES))
