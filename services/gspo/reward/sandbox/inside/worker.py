"""One worker: the process that user code runs in. It loads the code and answers questions on a socket of its own.

It starts as a copy of the supervisor, already confined. User code shares this process and can change anything in it,
so the service trusts no byte of its answers. An answer repeats the question's id, which is new for each question.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import linecache
import os
import socket
import sys
import types
from collections.abc import Callable
from contextlib import suppress
from importlib.abc import ExecutionLoader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from typing import Any

from .frames import HEAD_BYTES, body_size, frame, read
from .recognise import UnfitError, find_environment, find_function
from .results import InvalidReturnError, describe_error, list_values, nameless_error, plain_value, type_name
from .supplied import CallLog, TrainerState, load_tokenizer

_CHUNK_BYTES = 2**18
MODULE_PREFIX = "reward_file_"
_TASKS = "/proc/self/task"
# Bound before user code can put something else in their place.
_frame, _read = frame, read


def serve(channel: socket.socket) -> None:
    """Answer frames until the channel closes."""
    worker, questions, num_threads = LoadedCode(), channel.makefile("rb", _CHUNK_BYTES), _num_threads()
    while head := questions.read(HEAD_BYTES):
        question = _read(head, questions.read(body_size(head)))
        answer = _answer(worker, question)
        if (more_threads := _num_threads() - num_threads) > 0:
            answer["threads_left"] = more_threads
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError, AttributeError):  # closed or replaced by the user's code
                stream.flush()
        channel.sendall(_framed(answer, question["id"]))


def _answer(worker: LoadedCode, question: dict[str, Any]) -> dict[str, Any]:
    try:
        return worker.answer(question)
    except BaseException as error:  # noqa: BLE001 - the outermost loop: the caller gets the reason
        try:
            return {"error": describe_error(error, worker.path)}
        except BaseException as again:  # noqa: BLE001 - an exception that cannot even be shown
            return {"error": nameless_error(again)}


def _framed(answer: dict[str, Any], question_id: str) -> bytes:
    answer["id"] = question_id
    try:
        return _frame(answer)
    except (MemoryError, RecursionError, ValueError, TypeError) as error:
        return _frame({"error": nameless_error(error), "id": question_id})


def _num_threads() -> int:
    """Tasks of this process: the folder of them has a link for each beside its own two."""
    try:
        return os.stat(_TASKS).st_nlink - 2  # noqa: PTH116 - for each call: quicker
    except OSError:
        return 1


class NamedModules(MetaPathFinder):
    """Finds modules and packages by the very files that may be read: the folders that these lie in may not be."""

    def __init__(self, files: dict[str, str]) -> None:
        self._files = files

    def find_spec(self, fullname: str, _path: Any, _target: Any = None) -> ModuleSpec | None:
        """Called by import."""
        file = self._files.get(fullname)
        return spec_from_file_location(fullname, file) if file else None


class CarriedModules(MetaPathFinder):
    """Finds the modules that came as texts with the code.

    Args:
        folder: Folder of the code's file, which nothing here can read.
        texts: By path from there.
    """

    def __init__(self, folder: Path, texts: dict[str, str]) -> None:
        self._files = {_module_name(path): (str(folder / path), text) for path, text in texts.items()}
        # Folders of modules without __init__.py are packages too.
        parents = {str(parent).replace("/", "."): folder / parent for path in texts for parent in Path(path).parents}
        self._folders = {name: str(place) for name, place in parents.items() if name != "."}

    def find_spec(self, fullname: str, _path: Any, _target: Any = None) -> ModuleSpec | None:
        """Called by import."""
        if fullname in self._files:
            path, text = self._files[fullname]
            inner = [str(Path(path).parent)] if path.endswith("/__init__.py") else None
            loader = TextLoader(path, text)
            return spec_from_file_location(fullname, path, loader=loader, submodule_search_locations=inner)
        if fullname in self._folders:
            spec = ModuleSpec(fullname, None, is_package=True)
            spec.submodule_search_locations = [self._folders[fullname]]
            return spec
        return None


class TextLoader(ExecutionLoader):
    """Loads a module from its text; tracebacks quote its lines."""

    def __init__(self, path: str, text: str) -> None:
        self._path, self._text = path, text

    def get_filename(self, _fullname: str) -> str:
        """Called by import."""
        return self._path

    def get_source(self, _fullname: str) -> str:
        """Called by import, and for tracebacks."""
        return self._text


def _module_name(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


class LoadedCode:
    """Holds the loaded code."""

    def __init__(self) -> None:
        self.path = ""
        self._function: Callable[..., Any]
        self._bind: Callable[..., inspect.BoundArguments]
        self._functions: dict[str, Callable[..., Any]] = {}
        self._tokenizer: Any = None

    def answer(self, question: dict[str, Any]) -> dict[str, Any]:
        """Load code or a tokenizer, call with `arguments` or once for each of `rows`, or call an environment."""
        if "source" in question:
            self.path = question["path"]
            return {"signature": self._load(question)}
        if "function" in question:
            function = self._functions[question["function"]]
            return {"values_json": _as_json(self._wait(function(**question["arguments"])))}
        if "rows" in question:
            return {"values": self._call_rows(question["rows"])}
        if "tokenizer" in question:
            self._tokenizer = load_tokenizer(question["tokenizer"])
            return {}
        return self._call_batch(question["arguments"], question.get("supplied", {}))

    def _call_batch(self, arguments: dict[str, Any], supplied: dict[str, Any]) -> dict[str, Any]:
        call_log = CallLog()
        values = list_values(self._wait(self._call(arguments | self._own_arguments(supplied, call_log))))
        logged = call_log.as_json(len(values))
        return {"values": values, "logged_json": logged} if logged else {"values": values}

    def _own_arguments(self, supplied: dict[str, Any], call_log: CallLog) -> dict[str, Any]:
        """The arguments that the question names; without a tokenizer its ones keep their defaults."""
        makers: dict[str, Callable[[Any], Any]] = {
            "log_metric": lambda _: call_log.log_metric,
            "log_extra": lambda _: call_log.log_extra,
            "trainer_state": TrainerState,
        }
        if self._tokenizer is not None:
            decode = self._tokenizer.decode
            makers["tokenizer"] = lambda _: self._tokenizer
            makers["raw_completions"] = lambda answers: [
                answer if isinstance(answer, str) else decode(answer, skip_special_tokens=False) for answer in answers
            ]
        return {name: makers[name](value) for name, value in supplied.items() if name in makers}

    def _load(self, question: dict[str, Any]) -> dict[str, Any]:
        carried = CarriedModules(Path(self.path).parent, question["texts"])
        sys.meta_path[:0] = [NamedModules(question["modules"]), carried]
        module = load_module(self.path, question["source"], question["folders"])
        if question["kind"] == "environment":
            self._functions, entry = find_environment(module, question["entry"])
            return {"entry": entry, "convention": "environment", "takes": [], "required": [], "takes_any": False}
        self._function, signature = find_function(module, question["entry"])
        self._bind = inspect.signature(self._function).bind
        return signature

    def _call(self, arguments: dict[str, Any]) -> Any:
        """Bind before the call, to distinguish a signature that does not fit from a TypeError within."""
        try:
            bound = self._bind(**arguments)
        except TypeError as error:
            raise UnfitError(f"takes other arguments than it is given: {error}") from error
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

            async def gather() -> list[Any]:
                return await asyncio.gather(*(results[index] for index in waiting), return_exceptions=True)

            for index, result in zip(waiting, self._wait(gather()), strict=True):
                results[index] = result
        return [
            {"error": describe_error(result, self.path)} if isinstance(result, BaseException) else plain_value(result)
            for result in results
        ]

    def _wait(self, result: Any) -> Any:
        """An awaitable's result; its loop ends with the call, and so do all tasks in it."""
        if not inspect.isawaitable(result):
            return result
        with asyncio.Runner() as runner:
            return runner.run(_finish(result))


async def _finish(awaitable: Any) -> Any:
    return await awaitable


def _as_json(value: Any) -> str:
    """A value as JSON: tuples become lists.

    Raises:
        InvalidReturnError: JSON cannot carry it.
    """
    try:
        return json.dumps(value, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise InvalidReturnError(f"returned {type_name(value)} that JSON cannot carry: {error}") from error


def load_module(path: str, source: str, folders: list[str]) -> types.ModuleType:
    """Run the file's text as a module; `folders` are where its own imports come from, before the installed ones."""
    module = types.ModuleType(MODULE_PREFIX + Path(path).stem)
    module.__file__ = path
    sys.path[:0] = folders
    sys.modules[module.__name__] = module
    # Tracebacks quote the lines of the file, which cannot be read from here.
    linecache.cache[path] = (len(source), None, source.splitlines(keepends=True), path)
    exec(compile(source, path, "exec"), module.__dict__)  # noqa: S102 - what this process is for
    return module
