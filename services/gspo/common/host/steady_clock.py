"""The time of day for deadlines of this process: a clock that is set forward or back does not move it."""

import time

_BOOT_UNIX_S = time.time() - time.monotonic()


def steady_unix_s() -> float:
    """Seconds since 1970 by the clock at this process's start; the time of a machine's sleep is not counted."""
    return _BOOT_UNIX_S + time.monotonic()
