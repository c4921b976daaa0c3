"""Results and exceptions of user code as plain values, which JSON can carry.

It shares its process with user code, which can forge its output: the service checks all of it again.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import socket
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .recognise import UnfitError

TRACEBACK_CHARS = 4000
TEXT_CHARS = 500
_FULL = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)
# Too many files or threads, a read-only file system, a link out of scratch.
_REFUSED = (errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.EROFS, errno.EXDEV)
_SHOWN = ("/usr/", "/lib", "/bin/", "/proc/self/")
NO_MORE_THREADS = "can't start new thread"


class InvalidReturnError(Exception):
    """User code returned a value of another form."""


def list_values(result: Any) -> list[Any]:
    """The values of a batch: a list, tuple, array or tensor of numbers, or of dicts of named parts."""
    if isinstance(result, dict) and "rewards" in result:
        return _openrlhf_values(result)
    if hasattr(result, "tolist"):
        result = result.tolist()
    if isinstance(result, str | bytes | dict) or not isinstance(result, Iterable):
        raise InvalidReturnError(
            f"returned {type_name(result)} where a list of numbers belongs, one for each completion"
        )
    return [plain_value(value) for value in result]


def _openrlhf_values(result: dict[str, Any]) -> list[Any]:
    """The rewards of OpenRLHF's form, each with the values of `extra_logs` for its row."""
    rewards, logs = list_values(result["rewards"]), result.get("extra_logs") or {}
    extras = {str(name): list_values(values) for name, values in logs.items()}
    if not extras:
        return rewards
    if any(len(values) != len(rewards) for values in extras.values()):
        raise InvalidReturnError("returned extra_logs of another length than its rewards")
    return [
        {"parts": {"score": reward, **{name: values[i] for name, values in extras.items()}}}
        for i, reward in enumerate(rewards)
    ]


def plain_value(value: Any) -> Any:
    """A number, None, {"parts": {name: number or None}}, or {"type": what it was instead}."""
    if type(value) is float:
        return value
    if isinstance(value, dict):
        return {"parts": {str(name): plain_value(part) for name, part in value.items()}}
    if hasattr(value, "item"):
        with contextlib.suppress(ValueError, RuntimeError):  # more than one element
            value = value.item()
    if value is None or isinstance(value, int | float):
        return None if value is None else _as_float(value)
    return {"type": type_name(value)}


def _as_float(number: float) -> float:
    try:
        return float(number)
    except OverflowError:  # an integer beyond every float
        return math.inf if number > 0 else -math.inf


def type_name(value: Any) -> str:
    """Name of a value's class, for people."""
    return "None" if value is None else str(type(value).__name__)


def describe_error(error: BaseException, path: str) -> dict[str, Any]:
    """Kind, class, message in one line and place of an exception, and its traceback from the user's file on."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    line = frames[-1].lineno if frames else getattr(error, "lineno", None)
    own = isinstance(error, UnfitError | InvalidReturnError)
    text = str(error) if own else " ".join("".join(traceback.format_exception_only(error)).split())[:TEXT_CHARS]
    kind = failure_kind(error)
    if kind == "forbidden" and isinstance(error, FileNotFoundError):
        text += " (files outside the sandbox are hidden)"
    first = error.__traceback__
    while first is not None and frames and first.tb_frame.f_code.co_filename != path:
        first = first.tb_next
    return {
        "kind": kind,
        "type": type(error).__name__,
        "text": text,
        "place": f"{Path(path).name} line {line}" if frames else "",
        "line": line,
        # Of the harness's own frames only those below the user's are of use.
        "traceback": ""
        if own and not frames
        else "".join(traceback.format_exception(type(error), error, first))[-TRACEBACK_CHARS:],
    }


def nameless_error(error: BaseException) -> dict[str, Any]:
    """The description of a failure whose own description failed with `error`."""
    text = f"raised or returned a value that cannot be shown ({type_name(error)})"
    kind = "memory" if isinstance(error, MemoryError) else "exception"
    return {"kind": kind, "type": "", "text": text, "place": "", "line": None, "traceback": ""}


def failure_kind(error: BaseException) -> str:
    """One of services/gspo/reward/sandbox/calls.py's kinds, by the exception."""
    number = error.errno if isinstance(error, OSError) else None
    if isinstance(error, MemoryError) or number == errno.ENOMEM:
        return "memory"
    if isinstance(error, InvalidReturnError):
        return "invalid_return"
    if number in _FULL:
        return "output_too_large"
    # A name cannot be looked up because no socket can be opened.
    if isinstance(error, PermissionError | socket.gaierror) or number in _REFUSED or _is_hidden(error):
        return "forbidden"
    if isinstance(error, RuntimeError) and error.args == (NO_MORE_THREADS,):
        return "forbidden"
    # urllib keeps the reason in an attribute, others raise from it.
    reason = getattr(error, "reason", None) or error.__cause__
    return failure_kind(reason) if isinstance(reason, OSError) and reason is not error else "exception"


def _is_hidden(error: BaseException) -> bool:
    """Whether a missing file may exist outside the sandbox."""
    name = error.filename if isinstance(error, FileNotFoundError) else None
    if not isinstance(name, str):
        return False
    if name.startswith("/"):
        return not name.startswith((os.environ["HOME"], *_SHOWN))
    return Path(name).is_symlink()
