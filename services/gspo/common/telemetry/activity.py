"""The current activity of a service and its duration: shown while it lasts, and counted for the idle share."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from gspo.common.telemetry import metrics

# The cause that keeps a service from being ready until it has started.
STARTING = "starting"
Kind = Literal["busy", "waiting"]


class Activity:
    """The current activity of one service's main loop.

    `what` is the bounded name for the metric; `detail` completes it for a reader ('rewards' 'of 3 groups').
    Several threads may set it: a start loads the model in one beside the event loop.
    """

    def __init__(self, service: str) -> None:
        self.service = service
        self.kind: Kind = "busy"
        self.what, self.detail = "starting", ""
        self.since_unix_s = time.time()
        self._since = time.monotonic()
        self._setting = threading.Lock()

    def set(self, kind: Kind, what: str, detail: str = "") -> None:
        """Enter an activity; the time of the previous one is counted."""
        with self._setting:
            now = time.monotonic()
            metrics.ACTIVITY_SECONDS.labels(self.service, self.kind, self.what).inc(now - self._since)
            self._since = now
            if (kind, what) != (self.kind, self.what):
                self.since_unix_s = time.time()
            self.kind, self.what, self.detail = kind, what, detail

    @contextmanager
    def doing(self, what: str, detail: str = "") -> Iterator[None]:
        """Busy for the length of a block; then the earlier activity again."""
        yield from self._during("busy", what, detail)

    @contextmanager
    def waiting(self, what: str, detail: str = "") -> Iterator[None]:
        """Waiting for the length of a block; then the earlier activity again."""
        yield from self._during("waiting", what, detail)

    def _during(self, kind: Kind, what: str, detail: str) -> Iterator[None]:
        before = self.kind, self.what, self.detail
        self.set(kind, what, detail)
        try:
            yield
        finally:
            self.set(*before)

    def describe(self) -> dict[str, str | float]:
        """For the heartbeat: kind, what, detail, since_unix_s."""
        return {"kind": self.kind, "what": self.what, "detail": self.detail, "since_unix_s": self.since_unix_s}
