"""The process of one reward function: loads the user's file and answers calls on a socket of its own.

Started by sandbox.py as a script, with the standard library alone: no module of ours can stand in the way of the
user's. It limits itself; what it cannot promise (network, files, a hostile user) is not promised anywhere.
A frame is 8 bytes of length, big-endian, and JSON; the answer repeats the question's id.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import inspect
import json
import os
import resource
import signal
import socket
import sys
import traceback
import types
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

HEAD_BYTES = 8
TRACEBACK_CHARS = 4000
MODULE_PREFIX = "reward_file_"
# The names that a file may use without telling `entry`.
TRL_NAME, VERL_NAME = "reward", "compute_score"
# By these parameters a function is recognised; see functions.py for what each one is given.
TRL_PARAMETERS = frozenset({"completions", "completion_ids"})
VERL_PARAMETERS = frozenset({"solution_str", "ground_truth"})
_PR_SET_PDEATHSIG = 1


class Unfit(Exception):  # noqa: N818 - it says what the file is
    """The file holds no function that can be called; the message completes 'the file ...'."""


def main() -> None:
    """Serve on the inherited socket until it closes."""
    fd, memory_mb, parent = (int(given) for given in sys.argv[1:])
    channel = socket.socket(fileno=fd)
    # A program that the user starts must not hold the channel open.
    channel.set_inheritable(False)
    limit_process(memory_mb, parent)
    sys.argv = [""]
    serve(channel)


def limit_process(memory_mb: int, parent: int) -> None:
    """Bound the address space, drop no core, die with the parent."""
    memory = memory_mb * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)  # the parent died before the line above


def serve(channel: socket.socket) -> None:
    """Answer frames until the channel closes."""
    pid, worker = os.getpid(), Worker()
    while (question := read_frame(channel)) is not None:
        try:
            answer = worker.answer(question)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the outermost loop: the caller gets the reason
            answer = {"error": describe_error(error, worker.path)}
        if os.getpid() != pid:
            os._exit(0)  # the user's code forked, and this is the copy: it must not answer too
        answer["id"] = question["id"]
        body = json.dumps(answer).encode()
        channel.sendall(len(body).to_bytes(HEAD_BYTES, "big") + body)


def read_frame(channel: socket.socket) -> dict[str, Any] | None:
    """The next question; None when the channel is closed."""
    head = channel.recv(HEAD_BYTES, socket.MSG_WAITALL)
    if len(head) < HEAD_BYTES:
        return None
    size, body = int.from_bytes(head, "big"), bytearray()
    while len(body) < size:
        if not (part := channel.recv(min(size - len(body), 2**20))):
            return None
        body += part
    question: dict[str, Any] = json.loads(body)
    return question


class Worker:
    """Holds the loaded function."""

    def __init__(self) -> None:
        self.path = ""
        self._function: Callable[..., Any] = _nothing_loaded
        self._bind: Callable[..., inspect.BoundArguments] = inspect.signature(_nothing_loaded).bind
        self._loop: asyncio.AbstractEventLoop | None = None

    def answer(self, question: dict[str, Any]) -> dict[str, Any]:
        """Load a file, call with `arguments`, or call once for each of `rows`."""
        if "source" in question:
            self.path = question["path"]
            module = load_module(self.path, question["source"])
            self._function, signature = find_function(module, question["entry"])
            self._bind = inspect.signature(self._function).bind
            return {"signature": signature}
        if "rows" in question:
            return {"values": self._call_rows(question["rows"])}
        return {"values": list_values(self._wait(self._call(question["arguments"])))}

    def _call(self, arguments: dict[str, Any]) -> Any:
        """Bind before the call, so that a signature that does not fit is told from a TypeError within."""
        try:
            bound = self._bind(**arguments)
        except TypeError as error:
            raise Unfit(f"takes other arguments than it is given: {error}") from error
        return self._function(*bound.args, **bound.kwargs)

    def _call_rows(self, rows: list[dict[str, Any]]) -> list[Any]:
        """One call a row; coroutines run side by side. A row that raises leaves the others alone."""
        results: list[Any] = []
        for row in rows:
            try:
                results.append(self._call(row))
            except Exception as error:  # noqa: BLE001 - the row's own failure, reported as such
                results.append(error)
        waiting = [index for index, result in enumerate(results) if inspect.isawaitable(result)]
        if waiting:
            for index, result in zip(waiting, self._wait(_gather([results[i] for i in waiting])), strict=True):
                results[index] = result
        return [self._row(result) for result in results]

    def _row(self, result: Any) -> Any:
        if isinstance(result, BaseException):
            return {"error": describe_error(result, self.path)}
        return plain_value(result)

    def _wait(self, result: Any) -> Any:
        if not inspect.isawaitable(result):
            return result
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            asyncio.set_event_loop(self._loop)
        return self._loop.run_until_complete(_finish(result))


async def _finish(awaitable: Any) -> Any:
    return await awaitable


async def _gather(awaitables: list[Any]) -> list[Any]:
    return await asyncio.gather(*awaitables, return_exceptions=True)


def _nothing_loaded(**_given: Any) -> Any:
    raise Unfit("is not loaded")


def load_module(path: str, source: str) -> types.ModuleType:
    """Run the file's text as a module; its folder is where its own imports come from, as with `python FILE`."""
    module = types.ModuleType(MODULE_PREFIX + Path(path).stem)
    module.__file__ = path
    sys.path.insert(0, str(Path(path).parent))
    sys.modules[module.__name__] = module
    exec(compile(source, path, "exec"), module.__dict__)  # noqa: S102 - what this process is for
    return module


def find_function(module: types.ModuleType, entry: str | None) -> tuple[Callable[..., Any], dict[str, Any]]:
    """The function to call and its signature.

    It is `entry` where given; else `reward` or `compute_score`; else the only public function of the file whose
    parameters fit.

    Raises:
        Unfit: There is none, or more than one.
    """
    defined = {
        name: value
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__ and not name.startswith("_")
    }
    if entry is not None:
        if not callable(function := getattr(module, entry, None)):
            raise Unfit(f"has no function '{entry}'; {_listed(defined)}")
        return function, describe_signature(entry, function)
    named = [name for name in (TRL_NAME, VERL_NAME) if callable(getattr(module, name, None))]
    fitting = named or [name for name, value in defined.items() if _fits(name, value)]
    if len(fitting) > 1:
        raise Unfit(f"holds several reward functions: {', '.join(fitting)}")
    if not fitting:
        raise Unfit(f"holds no reward function; {_listed(defined)}")
    function = getattr(module, fitting[0])
    return function, describe_signature(fitting[0], function)


def _listed(defined: Iterable[str]) -> str:
    names = ", ".join(defined)
    return f"it defines {names}" if names else "it defines no function"


def _fits(name: str, function: Callable[..., Any]) -> bool:
    try:
        return not describe_signature(name, function)["takes_any_alone"]
    except Unfit:
        return False


def describe_signature(name: str, function: Callable[..., Any]) -> dict[str, Any]:
    """Convention and parameters of a function: entry, convention, takes, required, takes_any.

    Raises:
        Unfit: It follows neither convention, or cannot be called by keyword.
    """
    signature = inspect.signature(function)
    parameters = signature.parameters.values()
    by_name = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    takes = {p.name for p in by_name}
    takes_any = any(p.kind == p.VAR_KEYWORD for p in parameters)
    if any(p.kind == p.POSITIONAL_ONLY and p.default is p.empty for p in parameters):
        raise Unfit(f"defines {name}{signature}, whose positional-only parameters cannot be given by name")
    if takes >= VERL_PARAMETERS:
        convention = "verl"
    elif takes & TRL_PARAMETERS:
        convention = "trl"
    elif takes_any and not takes:
        # A decorator without functools.wraps hides the parameters; only the name is left to go by.
        convention = "verl" if name == VERL_NAME else "trl"
    else:
        raise Unfit(
            f"defines {name}{signature}, which is neither reward(prompts, completions, **columns) "
            "nor compute_score(data_source, solution_str, ground_truth, extra_info)"
        )
    return {
        "entry": name,
        "convention": convention,
        "takes": sorted(takes),
        "required": [p.name for p in by_name if p.default is p.empty],
        "takes_any": takes_any,
        "takes_any_alone": takes_any and not takes,
    }


def list_values(result: Any) -> list[Any]:
    """The values of a batch: a list, tuple, array or tensor of numbers, or of dicts of named parts."""
    if hasattr(result, "tolist"):
        result = result.tolist()
    if isinstance(result, str | bytes | dict) or not isinstance(result, Iterable):
        raise Unfit(f"returned {_type_name(result)} where a list of numbers belongs, one for each completion")
    return [plain_value(value) for value in result]


def plain_value(value: Any) -> Any:
    """A number, None, {"parts": {name: number or None}}, or {"type": what it was instead}."""
    if isinstance(value, dict):
        return {"parts": {str(name): plain_value(part) for name, part in value.items()}}
    if hasattr(value, "item"):
        with contextlib.suppress(ValueError, RuntimeError):  # more than one element
            value = value.item()
    if value is None or isinstance(value, int | float):
        return None if value is None else float(value)
    return {"type": _type_name(value)}


def _type_name(value: Any) -> str:
    return "None" if value is None else type(value).__name__


def describe_error(error: BaseException, path: str) -> dict[str, str]:
    """Kind, message in one line and place of an exception, and the end of its traceback."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    place = f"{Path(path).name} line {frames[-1].lineno}" if frames else ""
    text = " ".join("".join(traceback.format_exception_only(error)).split())
    return {
        "type": type(error).__name__,
        "text": str(error) if isinstance(error, Unfit) else text[:500],
        "place": place,
        "traceback": "".join(traceback.format_exception(error))[-TRACEBACK_CHARS:],
    }


if __name__ == "__main__":
    main()
