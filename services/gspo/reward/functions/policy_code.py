"""The built-ins that run the policy's code: `code_tests`, and the environment `tools`, each outside its sandbox.

The policy's code gets a process of its own, which ends with the call. If a limit kills the process, the policy learns
from it: the answer scores 0, and a tool's answer is the reason. A policy that could turn its own failures into dropped
rollouts would learn to.

`code_tests` gives the share of unit tests that the code in an answer passes, or 1 only where all pass. The results of
the calls come out of the sandbox and are compared here. So an answer cannot read the right results, patch the
comparison, or spoil the next answer. A test, in the column `tests` (or args.tests for all), is one of

- `{"call": "add(1, 2)", "expected": 3}`, compared by value
- `{"stdin": "1 2", "expected": "3"}`, a whole program, compared by its output without white space at the end of lines
- `"assert add(1, 2) == 3"`, the same as the first; other assertions are refused
"""

import ast
import asyncio
import json
import re
from dataclasses import dataclass
from typing import Any

from gspo.reward.functions.arguments import text_of
from gspo.reward.sandbox.calls import Answer, CallError, Question, Signature
from gspo.reward.sandbox.execution import Sandbox

_FENCED = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL | re.IGNORECASE)
# The tool whose calls run the policy's code.
_RUNS_CODE = "python"


class ToolEnvironment(Sandbox):
    """The environment `tools`, with builtins/tools.py loaded."""

    async def call(self, question: Question, *, session: str | None = "") -> Answer:
        """Answer one question.

        Raises:
            CallError: It failed, and not because of the policy's code.
        """
        action = question["arguments"].get("action")
        calls = action["calls"] if isinstance(action, dict) else []
        if not any(call["name"] == _RUNS_CODE for call in calls):
            return await super().call(question, session=session)
        try:
            return await super().call(question, session=None)
        except CallError as error:
            if error.loading:
                raise
            content = f"error: {error}"
            messages = [{"role": "tool", "name": call["name"], "content": content} for call in calls]
            state = question["arguments"]["state"]
            return Answer([state, messages, 0.0, False], error.output)


class UnreadableTestError(Exception):
    """A test of the data set that cannot be read; the message names the forms."""


@dataclass(frozen=True)
class UnitTest:
    """One run of the answer's code, and its expected result."""

    run: dict[str, str]
    expected: Any

    def passed(self, result: dict[str, Any]) -> bool:
        """Whether the result of the run is the right one."""
        if "stdin" in self.run:
            return _lines(str(result.get("stdout", ""))) == _lines(str(self.expected))
        if "value" in result:
            return same(result["value"], self.expected)
        return "text" in result and result["text"] == shown(self.expected)


class CodeTests(Sandbox):
    """The function `code_tests`, with builtins/code_tests.py loaded.

    `args` are `tests`, for every answer instead of the column, and `partial`: a share for some of the tests passed,
    instead of 1 for all and 0 otherwise.
    """

    signature = Signature("code_tests", "trl", frozenset({"completions", "tests", "partial"}), (), takes_any=False)

    async def call(self, question: Question, *, session: str | None = "") -> Answer:  # noqa: ARG002 - one an answer
        """A score for each answer; one whose tests cannot be read fails."""
        arguments = question["arguments"]
        completions, tests = arguments["completions"], arguments.get("tests")
        if not isinstance(tests, list):
            raise CallError("exception", "there are no tests: give a column tests, or args.tests")
        # A column has a list for each answer; of args.tests each item is one test.
        is_column = len(tests) == len(completions) and all(
            isinstance(item, list) or (isinstance(item, str) and item[:1] == "[") for item in tests
        )
        pairs = zip(completions, tests if is_column else [tests] * len(completions), strict=True)
        partial = bool(arguments.get("partial", False))
        values = await asyncio.gather(*(self._score(text_of(text), tests, partial) for text, tests in pairs))
        return Answer(values)

    async def _score(self, text: str, tests: Any, partial: bool) -> Any:
        try:
            unit_tests = read_tests(tests)
        except UnreadableTestError as error:
            return {"error": {"type": "UnfitError", "text": str(error), "kind": "exception"}}
        task = {"code": code_of(text), "runs": [test.run for test in unit_tests]}
        try:
            answer = await super().call({"function": "reset", "arguments": {"task": task}}, session=None)
        except CallError as error:
            if error.loading:
                raise
            return 0.0  # the answer's own fault
        results = answer.values[0] if isinstance(answer.values, list) and answer.values else []
        if not isinstance(results, list) or len(results) != len(unit_tests):
            return 0.0  # the answer's code reached the runner and broke it
        pairs = zip(unit_tests, results, strict=True)
        try:
            num_passed = sum(test.passed(result) for test, result in pairs if isinstance(result, dict))
        except RecursionError:
            return 0.0  # nested deeper than any expected value is
        share = num_passed / len(unit_tests)
        return share if partial else float(share == 1.0)


def read_tests(column: Any) -> list[UnitTest]:
    """The tests of one answer.

    Raises:
        UnreadableTestError: There is none, or one is of none of the three forms.
    """
    try:
        tests = json.loads(column) if isinstance(column, str) else column
    except ValueError as error:
        raise UnreadableTestError(f"its tests are not JSON: {error}") from error
    if not isinstance(tests, list) or not tests:
        raise UnreadableTestError("it has no tests: the column `tests` is a list of them")
    return [_read_test(test) for test in tests]


def _read_test(test: Any) -> UnitTest:
    if isinstance(test, str):
        return _read_assertion(test)
    if isinstance(test, dict) and "expected" in test:
        for form in ("call", "stdin"):
            if isinstance(test.get(form), str):
                return UnitTest({form: test[form]}, test["expected"])
    raise UnreadableTestError(
        f"a test is {str(test)[:100]}; write {{call, expected}}, {{stdin, expected}} or an assert"
    )


def _read_assertion(text: str) -> UnitTest:
    """`assert CALL == LITERAL`, either way round."""
    try:
        statement = ast.parse(text.strip()).body[0]
        compared = statement.test if isinstance(statement, ast.Assert) else None
        if isinstance(compared, ast.Compare) and len(compared.ops) == 1 and isinstance(compared.ops[0], ast.Eq):
            for call, literal in ((compared.left, compared.comparators[0]), (compared.comparators[0], compared.left)):
                try:
                    return UnitTest({"call": ast.unparse(call)}, ast.literal_eval(literal))
                except ValueError:
                    continue
    except (SyntaxError, IndexError):
        pass
    raise UnreadableTestError(f"a test is {text[:100]!r}; of assertions only `assert CALL == LITERAL` can be read")


def shown(value: Any) -> str:
    """A value that JSON would change, as builtins/code_tests.py shows it."""
    return f"set of {sorted(map(repr, value))}" if isinstance(value, set | frozenset) else repr(value)


def same(value: Any, expected: Any) -> bool:
    """Equal, and of one kind: neither 1 for True nor a list for a tuple."""
    if isinstance(value, list):
        pairs = type(value) is type(expected) and len(value) == len(expected)
        return pairs and all(same(*pair) for pair in zip(value, expected, strict=True))
    if isinstance(value, dict):
        keys = isinstance(expected, dict) and value.keys() == expected.keys()
        return keys and all(same(value[key], expected[key]) for key in value)
    return isinstance(value, bool) == isinstance(expected, bool) and bool(value == expected)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]


def code_of(text: str) -> str:
    """The code in an answer: its last fenced block of Python, else all of it."""
    fenced = _FENCED.findall(text)
    return fenced[-1] if fenced else text
