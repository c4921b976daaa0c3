"""Results and exceptions of user code as plain values, which JSON can carry.

It shares its process with user code, which can forge its output: the service checks all of it again.
"""

import contextlib
import errno
import os
import re
import socket
import sys
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
# An exception may have been raised from another one, and so on.
_MAX_CAUSES = 10
_OF_NETWORK = re.compile(r"socket|getaddrinfo|connect")
_OF_PROCESSES = re.compile(r"multiprocessing|subprocess|SemLock|fork|spawn|exec|Popen|pty")
# Ways that a denied function has instead.
_NO_NETWORK = "no function has the network: use `url` for a server of yours, or the built-in llm_judge"
_ONE_PROCESS = (
    "a function is one process: use threads, reward.workers for calls side by side, or `url` for a server of yours"
)
_HIDDEN = "files outside the sandbox are hidden: name what it reads under `reads`, and write into the working folder"
_IN_SCRATCH = (
    "the working folder is an empty one of the sandbox: name the file under `reads`, and open it by its whole path or "
    "by Path(__file__).parent"
)


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
    if not isinstance(logs, dict):
        raise InvalidReturnError(f"returned {type_name(logs)} as extra_logs, where a dict of named numbers belongs")
    extras = {str(name): _logged_values(str(name), values, len(rewards)) for name, values in logs.items()}
    if not extras:
        return rewards
    return [
        {"parts": {"score": reward, **{name: values[i] for name, values in extras.items()}}}
        for i, reward in enumerate(rewards)
    ]


def _logged_values(name: str, values: Any, count: int) -> list[Any]:
    """The values of one key of `extra_logs`; one number is that of every answer."""
    where = f"extra_logs['{name}']"
    if isinstance(number := plain_value(values), float):
        return [number] * count
    try:
        listed = list_values(values)
    except InvalidReturnError as error:
        raise InvalidReturnError(
            f"returned {type_name(values)} as {where}, where a number or a list belongs"
        ) from error
    if len(listed) != count:
        raise InvalidReturnError(f"returned {len(listed)} values as {where} for {count} answers")
    return listed


def plain_value(value: Any) -> Any:
    """A number, None, {"parts": {name: number or None}}, or {"type": what it was instead}."""
    if type(value) is float:
        return value
    if isinstance(value, dict):
        return {"parts": {str(name): plain_value(part) for name, part in value.items()}}
    if hasattr(value, "item"):
        with contextlib.suppress(ValueError, RuntimeError):  # more than one element
            value = value.item()
    return None if value is None else _as_float(value)


def _as_float(value: Any) -> Any:
    """A number of any library: of numpy, sympy, fractions, decimal; or {"type": what it is instead}."""
    try:
        return float(value) if hasattr(value, "__float__") else {"type": type_name(value)}
    except OverflowError:  # 10**400 is beyond every float; the largest one is refused as well
        return sys.float_info.max if value > 0 else -sys.float_info.max
    except (TypeError, ValueError, ArithmeticError, RuntimeError):  # an expression with a variable, several elements
        return {"type": type_name(value)}


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
    if way := _way_out(error):
        text += f" ({way})"
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
    """One of services/gspo/reward/sandbox/calls.py's kinds, by the exception or by its causes."""
    kinds = [_own_kind(cause) for cause in _causes(error)]
    return next((kind for kind in kinds if kind != "exception"), "exception")


def _own_kind(error: BaseException) -> str:
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
    return "exception"


def _causes(error: BaseException) -> list[BaseException]:
    """An exception, what it was raised from, and so on.

    urllib keeps that in an attribute, requests in the context, and httpx hides it there.
    """
    chain = [error]
    while len(chain) < _MAX_CAUSES:
        last = chain[-1]
        is_wrapper = isinstance(last, OSError) and last.errno is None
        is_wrapper |= last.__suppress_context__ and type(last).__module__ != "builtins"
        wrapped = last.__context__ if is_wrapper else None
        reason = getattr(last, "reason", None)
        reason = reason if isinstance(reason, BaseException) else last.__cause__ or wrapped
        if reason is None or any(reason is known for known in chain):
            break
        chain.append(reason)
    return chain


def _way_out(error: BaseException) -> str:
    """A way that the sandbox allows, in place of the denied one; empty where none is known."""
    denied = _causes(error)[-1]
    if isinstance(denied, FileNotFoundError) and isinstance(denied.filename, str):
        return _HIDDEN if _is_hidden(denied) else "" if denied.filename.startswith("/") else _IN_SCRATCH
    if isinstance(denied, socket.gaierror):
        return _NO_NETWORK
    if not isinstance(denied, OSError):
        return ""
    has_no_place = denied.errno == errno.EROFS and denied.filename is None  # /dev/shm, for a pool's semaphores
    if not isinstance(denied, PermissionError) and not has_no_place:
        return ""
    if denied.filename is not None:
        return _HIDDEN
    frames = traceback.extract_tb(denied.__traceback__)[-2:]
    place = " ".join(f"{frame.filename} {frame.line}" for frame in frames)
    return _NO_NETWORK if _OF_NETWORK.search(place) else _ONE_PROCESS if _OF_PROCESSES.search(place) else ""


def _is_hidden(error: BaseException) -> bool:
    """Whether a missing file may exist outside the sandbox."""
    name = error.filename if isinstance(error, FileNotFoundError) else None
    if not isinstance(name, str):
        return False
    if name.startswith("/"):
        return not name.startswith((os.environ["HOME"], *_SHOWN))
    return Path(name).is_symlink()
