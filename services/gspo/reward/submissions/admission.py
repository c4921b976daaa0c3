"""The checks of a submission before it is registered.

It must compile, import only allowed packages, load in the sandbox, follow a convention, and pass its test cases. Every
refusal names its rule and, for a problem of the source, line and column. An import that is put together at run time is
not checked here; the sandbox bounds its effect.
"""

from __future__ import annotations

import asyncio
import re
import sys
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Annotated

import msgspec
from pydantic import Field

from gspo.common.modules_beside import top_names
from gspo.reward.functions.library import Function, Library, code_of
from gspo.reward.registry.records import Content, StoredSignature, Submission, TestCase, version_of
from gspo.reward.sandbox.calls import CallError, CallLimits, Code
from gspo.reward.sandbox.inside import read_source
from gspo.reward.sandbox.values import MAX_NAME_CHARS
from gspo.reward.submissions.callers import ANONYMOUS
from gspo.reward.submissions.trials import TrialView, try_actions, try_rows

MAX_PROBLEMS = 20
# 256 KiB of ordinary source need less than a third of it.
READ_LIMITS = CallLimits(timeout_s=20.0, memory_mb=512, cpu_s=5.0)
# Each is a process that imports the function's packages; many at a time would take the cores from scoring. A caller has
# one at a time, so that its hanging submissions delay no other caller. Without tokens all callers are the same.
NUM_AT_A_TIME = 6
# Much shorter than for a run's own functions: packages are imported before.
LOAD_TIMEOUT_S = 10.0
# All test cases of a submission together; the caller waits for them.
TESTS_TIMEOUT_S = 120.0
_ENTRIES = {"reward": ("reward", "compute_score", "reward_func"), "environment": ("reset", "step")}


@dataclass(frozen=True)
class Problem:
    """One reason for a refusal."""

    rule: Annotated[str, Field(description="field, syntax, import, signature, load or test")]
    text: str
    line: Annotated[int | None, Field(description="Line of the source, from 1, where one is at fault")] = None
    column: Annotated[int | None, Field(description="Column of that line, from 1")] = None
    traceback: str = ""
    output: Annotated[str, Field(description="What the function printed")] = ""
    field: Annotated[str | None, Field(description="The field of the request, where one is at fault")] = None


class InputRefusedError(Exception):
    """A submission, or the input of a trial, is refused, with all its problems."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__("; ".join(problem.text for problem in problems))
        self.problems = list(problems)


class Outline(msgspec.Struct, frozen=True):
    """The outline of a source from inside/read_source.py; each item is a name with its line and column, from 1.

    Attributes:
        wrong: Why it cannot be compiled, with line and column; None if it can.
    """

    wrong: tuple[str, int, int] | None = None
    imports: list[tuple[str, int, int]] = []
    defined: list[tuple[str, int, int]] = []

    def place_of(self, names: Sequence[str]) -> tuple[int, int]:
        """Line and column of the first definition that has one of `names`, else of the first public one, else 1, 1."""
        places = [item for item in self.defined if item[0] in names]
        places = places or [item for item in self.defined if not item[0].startswith("_")]
        return places[0][1:] if places else (1, 1)


class Admission:
    """Checks submissions, a few at a time, until the end of its block.

    Args:
        library: Its limits apply if a submission has none.
        allowed_packages: Packages that may be imported besides the standard library.
    """

    def __init__(self, library: Library, allowed_packages: Collection[str]) -> None:
        self._library, self._allowed = library, tuple(allowed_packages)
        # Sources are compiled in a sandbox of their own: that may take any time and memory.
        text = Path(read_source.__file__).read_text(encoding="utf-8")
        code = Code("read_source", text, version_of(text.encode()), "read_source.py", kind="environment")
        self._source_reader = library.sandbox(code, READ_LIMITS)
        self._free = asyncio.Semaphore(NUM_AT_A_TIME)
        self._caller_locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._running: dict[tuple[str, str], asyncio.Task[Content]] = {}

    async def admit(self, submission: Submission, who: str = ANONYMOUS.name) -> Content:
        """The content of a submission by the caller `who`, ready to be registered.

        Raises:
            InputRefusedError: It fails a check; with all its problems.
        """
        if problems := list(_unfit_inputs(submission)):
            raise InputRefusedError(problems[:MAX_PROBLEMS])
        content = Content(
            version=submission.version,
            kind=submission.kind,
            source=submission.source,
            entry=submission.entry or "",
            modules=submission.modules,
            limits=submission.limits,
            tests=submission.tests,
        )
        # A caller who submits the same meanwhile waits for the same result.
        key = (content.version, content.model_dump_json(include={"tests"}))
        if key not in self._running:
            self._running[key] = asyncio.create_task(self._run(submission, content, who))
            self._running[key].add_done_callback(lambda _: self._running.pop(key, None))
        return await asyncio.shield(self._running[key])

    async def __aenter__(self) -> Admission:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._source_reader.close()

    async def _run(self, submission: Submission, content: Content, who: str) -> Content:
        lock = asyncio.Lock() if who == ANONYMOUS.name else self._caller_locks[who]
        async with lock, self._free:
            outlines = await self._read(submission)
            check_imports(outlines, self._allowed)
            return await self._run_now(submission, content, outlines[""])

    async def _read(self, submission: Submission) -> dict[str, Outline]:
        """The outlines of the source, under the path "", and of the modules."""
        try:
            task = {"source": submission.source, "modules": submission.modules}
            answer = await self._source_reader.call({"function": "reset", "arguments": {"task": task}}, session=None)
            outlines = msgspec.convert(answer.values[0], dict[str, Outline])
        except CallError as error:
            problem = Problem("syntax", f"the source cannot be compiled: {error}", 1, 1)
            raise InputRefusedError([problem]) from error
        for path, outline in outlines.items():
            if outline.wrong is not None:
                text, line, column = outline.wrong
                raise InputRefusedError([_of_module(path, Problem("syntax", text, line, column))])
        return outlines

    async def _run_now(self, submission: Submission, content: Content, outline: Outline) -> Content:
        code = code_of(submission.name, content)
        limits = self._library.limits_of(content)
        sandbox = self._library.sandbox(code, limits, load_timeout_s=LOAD_TIMEOUT_S)
        try:
            signature = await sandbox.load()
            async with asyncio.timeout(TESTS_TIMEOUT_S):
                problems = await _run_tests(Function(code, sandbox), submission.tests)
        except TimeoutError as error:
            text = f"tests: all of them together took longer than {TESTS_TIMEOUT_S:g} s"
            raise InputRefusedError([Problem("test", text)]) from error
        except CallError as error:
            raise InputRefusedError([_load_problem(error, outline, submission)]) from error
        finally:
            await sandbox.close()
        if problems:
            raise InputRefusedError(problems[:MAX_PROBLEMS])
        stored = StoredSignature(entry=signature.entry, convention=signature.convention)
        return content.model_copy(update={"signature": stored})


async def _run_tests(function: Function, tests: tuple[TestCase, ...]) -> list[Problem]:
    problems = []
    for index, test in enumerate(tests):
        if function.code.kind == "reward":
            trial = await try_rows(function, [test.input])
        else:
            actions = test.input.get("actions", [])
            texts = [str(action) for action in actions] if isinstance(actions, list) else []
            trial = await try_actions(function, test.input.get("task"), texts)
        if problem := _judge(index, test, trial):
            problems.append(problem)
    return problems


def _judge(index: int, test: TestCase, trial: TrialView) -> Problem | None:
    """The problem with a test's result; None if it passes."""
    where, last = f"tests.{index}", trial.results[-1]
    if last.failure:
        return Problem("test", f"{where}: {last.failure.text}", traceback=last.failure.traceback, output=trial.output)
    # "" is the number that counts: of an environment the sum over its turns.
    values = {"": sum(result.reward or 0.0 for result in trial.results), **last.parts, **last.extras}
    expected = test.expected if isinstance(test.expected, dict) else {"": test.expected}
    for name, number in expected.items():
        value, part = values.get(name), f" as '{name}'" if name else ""
        gave = f"gave no part '{name}'" if value is None else f"gave {value:g}{part}"
        if value is None or abs(value - number) > test.tolerance:
            return Problem("test", f"{where}: {gave}, and {number:g} is expected", output=trial.output)
    return None


def _unfit_inputs(submission: Submission) -> Iterator[Problem]:
    """Test cases without an answer: an empty answer would get a number, too."""
    for index, test in enumerate(submission.tests):
        if submission.kind == "reward" and not isinstance(test.input.get("completion"), str):
            field = f"tests.{index}.input.completion"
            yield Problem("field", f"{field}: is missing or not text; it is the answer to score", field=field)


def _load_problem(error: CallError, outline: Outline, submission: Submission) -> Problem:
    names = (submission.entry,) if submission.entry else _ENTRIES[submission.kind]
    line, column = outline.place_of(names)
    rule = "signature" if error.error_type in ("UnfitError", "SeveralFunctionsError") else "load"
    if error.line is not None:
        line, column = error.line, 1
    text = f"line {line}, column {column}: {error}"
    if error.kind == "memory":
        text += ". Raise limits.memory_mb, which reward.memory_mb bounds"
    return Problem(rule, text, line, column, error.traceback, error.output)


def check_imports(outlines: Mapping[str, Outline], allowed_packages: Collection[str]) -> None:
    """Check that a source and its modules import only these, the standard library and allowed packages.

    Args:
        outlines: By path; that of the source under "".

    Raises:
        InputRefusedError: Something else is imported; with line and column of each place.
    """
    known = sys.stdlib_module_names | importable(tuple(allowed_packages)) | top_names(outlines)
    allowed = ", ".join(sorted(allowed_packages)) or "none"
    problems = []
    for path, outline in outlines.items():
        for module, line, column in outline.imports:
            top = module.split(".")[0]
            if module.startswith(".") and "/" not in path:
                why = f"'{module}', and no package holds it. Import a module of `modules` by its whole name"
            elif top and top not in known:
                why = (
                    f"'{top[:MAX_NAME_CHARS]}', which is neither in the standard library nor among "
                    f"reward.allowed_packages ({allowed}) or `modules`. Do without it, or ask for its addition there"
                )
            else:
                continue
            problem = Problem("import", f"line {line}, column {column}: imports {why}", line, column)
            problems.append(_of_module(path, problem))
    if problems:
        raise InputRefusedError(problems[:MAX_PROBLEMS])


def _of_module(path: str, problem: Problem) -> Problem:
    """A problem of the source, or of the module at a path, whose lines are not those of the source."""
    if not path:
        return problem
    return replace(problem, text=f"{path}, {problem.text}", field=f"modules.{path}", line=None, column=None)


@cache
def importable(packages: tuple[str, ...]) -> frozenset[str]:
    """Top-level modules of the named distributions; one that is not installed goes by its own name."""
    normal = {_normal(package) for package in packages}
    modules = {
        module
        for module, distributions in packages_distributions().items()
        if normal & {_normal(distribution) for distribution in distributions}
    }
    return frozenset(modules | {package.replace("-", "_") for package in packages})


def _normal(distribution: str) -> str:
    return re.sub(r"[-_.]+", "-", distribution).lower()
