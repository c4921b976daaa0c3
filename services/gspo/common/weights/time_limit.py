"""The time limit of a push or a load, which follows from the rates of those before."""

from collections import deque

# Other work on the same machines and networks may slow the next one down so far.
_MARGIN = 4.0
# A rate of long ago says little of today's network and load.
_NUM_REMEMBERED = 8


class TimeLimit:
    """Seconds allowed for bytes: a multiple of the time at the slowest of the last rates, and never below a least time.

    A fixed number of seconds is too short for a large policy and too long for a small one.

    Args:
        least_s: The limit is never below it.
        first_bytes_s: Bytes a second that are assumed at first. Choose a rate below the expected one.
    """

    def __init__(self, least_s: float, first_bytes_s: float) -> None:
        self._least_s = least_s
        self._bytes_s = deque([first_bytes_s], maxlen=_NUM_REMEMBERED)

    def seconds(self, num_bytes: int) -> float:
        """The limit for work on `num_bytes`."""
        return max(self._least_s, _MARGIN * num_bytes / min(self._bytes_s))

    def record(self, num_bytes: int, seconds: float) -> None:
        if num_bytes and seconds > 0:
            self._bytes_s.append(num_bytes / seconds)
