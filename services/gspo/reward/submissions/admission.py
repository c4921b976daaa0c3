"""The checks of a submission before it is registered.

It must compile, import only allowed packages, load in the sandbox, follow a convention, and pass its test cases. Every
refusal names its rule and, for a problem of the source, line and column.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Collection, Iterator

from gspo.reward.functions.library import Function, Library, code_of
from gspo.reward.registry.records import Content, StoredSignature
from gspo.reward.registry.submission import Submission, TestCase
from gspo.reward.sandbox.calls import CallError
from gspo.reward.sandbox.values import Failure
from gspo.reward.submissions.callers import ANONYMOUS
from gspo.reward.submissions.source_check import (
    MAX_PROBLEMS,
    Outline,
    Problem,
    SourceReader,
    SubmissionRefusedError,
    check_imports,
)
from gspo.reward.submissions.trials import Trial, try_actions, try_rows

# Each is a process that imports the function's packages; many at a time would take the cores from scoring. A caller has
# one at a time, so that its hanging submissions delay no other caller. Without tokens all callers are the same.
NUM_AT_A_TIME = 6
# Much shorter than for a run's own functions: packages are imported before.
LOAD_TIMEOUT_S = 10.0
# All test cases of a submission together; the caller waits for them.
TESTS_TIMEOUT_S = 120.0
_ENTRIES = {"reward": ("reward", "compute_score", "reward_func"), "environment": ("reset", "step")}


class Admission:
    """Checks submissions, a few at a time, until the end of its block.

    Args:
        library: Its limits apply if a submission has none.
        allowed_packages: Packages that may be imported besides the standard library.
    """

    def __init__(self, library: Library, allowed_packages: Collection[str]) -> None:
        self._library, self._allowed = library, tuple(allowed_packages)
        self._source_reader = SourceReader(library.sandbox)
        self._free = asyncio.Semaphore(NUM_AT_A_TIME)
        self._caller_locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._running: dict[tuple[str, str], asyncio.Task[Content]] = {}

    async def admit(self, submission: Submission, who: str = ANONYMOUS.name) -> Content:
        """The content of a submission by the caller `who`, ready to be registered.

        Raises:
            SubmissionRefusedError: It fails a check; with all its problems.
        """
        if problems := list(_unfit_inputs(submission)):
            raise SubmissionRefusedError(problems[:MAX_PROBLEMS])
        content = Content(
            version=submission.version,
            kind=submission.kind,
            source=submission.source,
            entry=submission.entry or "",
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
            outline = await self._source_reader.read(submission.source)
            check_imports(outline, self._allowed)
            return await self._run_now(submission, content, outline)

    async def _run_now(self, submission: Submission, content: Content, outline: Outline) -> Content:
        code = code_of(submission.name, content)
        limits = self._library.limits_of(content)
        sandbox = self._library.sandbox(code, limits, load_timeout_s=LOAD_TIMEOUT_S)
        try:
            signature = await sandbox.load()
            async with asyncio.timeout(TESTS_TIMEOUT_S):
                problems = await self._run_tests(Function(code, sandbox), submission.tests)
        except TimeoutError as error:
            text = f"tests: all of them together took longer than {TESTS_TIMEOUT_S:g} s"
            raise SubmissionRefusedError([Problem("test", text)]) from error
        except CallError as error:
            raise SubmissionRefusedError([_load_problem(error, outline, submission)]) from error
        finally:
            await sandbox.close()
        if problems:
            raise SubmissionRefusedError(problems[:MAX_PROBLEMS])
        stored = StoredSignature(entry=signature.entry, convention=signature.convention)
        return content.model_copy(update={"signature": stored})

    async def _run_tests(self, function: Function, tests: tuple[TestCase, ...]) -> list[Problem]:
        problems = []
        for index, test in enumerate(tests):
            trial = await self._try(function, test)
            if problem := _judge(index, test, trial):
                problems.append(problem)
        return problems

    async def _try(self, function: Function, test: TestCase) -> Trial:
        if function.code.kind == "reward":
            return await try_rows(function, [test.input])
        actions = test.input.get("actions", [])
        actions = [str(action) for action in actions] if isinstance(actions, list) else []
        return await try_actions(function, test.input.get("task"), actions)


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


def _judge(index: int, test: TestCase, trial: Trial) -> Problem | None:
    """The problem with a test's result; None if it passes."""
    where = f"tests.{index}"
    result = trial.results[0] if trial.results else trial.total
    if isinstance(result, Failure):
        return Problem("test", f"{where}: {result.reason}", None, None, result.traceback, trial.output)
    reward = result if isinstance(result, float | int) else result.reward
    parts = {} if isinstance(result, float | int) else {**result.parts, **result.extras}
    expected = test.expected if isinstance(test.expected, dict) else {"": test.expected}
    for name, number in expected.items():
        value = parts.get(name) if name else reward
        if value is None:
            return Problem("test", f"{where}: gave no part '{name}', and {number:g} is expected", output=trial.output)
        if abs(value - number) > test.tolerance:
            part = f" as '{name}'" if name else ""
            return Problem("test", f"{where}: gave {value:g}{part}, and {number:g} is expected", output=trial.output)
    return None
