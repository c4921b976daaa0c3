"""JSON lines on standard error, the log of every service."""

import contextlib
import io
import logging
import sys
from types import TracebackType
from typing import TextIO, cast

import structlog

from gspo.common.service.failure import log_failure


def set_up_logs(level: str, **bound: str) -> None:
    """JSON lines on standard error, every one with the bound fields."""
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        # One write a line: ranks share a file, and print writes the line's end apart where Python is unbuffered.
        logger_factory=structlog.WriteLoggerFactory(cast(TextIO, _LossyStream(sys.stderr))),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(**bound)
    sys.excepthook = _log_uncaught


def _log_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Such as the error of an import, before a service runs."""
    if isinstance(error, Exception):
        log_failure("service_failed", error, f"{kind.__name__}: {error}")
    else:
        sys.__excepthook__(kind, error, trace)


class _LossyStream(io.TextIOBase):
    """A stream that drops lines if its disk is full or its pipe is closed; the process continues."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write, if possible."""
        with contextlib.suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush, if possible."""
        with contextlib.suppress(OSError):
            self._stream.flush()
