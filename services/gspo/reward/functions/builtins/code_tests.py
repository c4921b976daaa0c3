"""The part of `code_tests` inside the sandbox: it runs the code of one answer, and then calls of it.

functions/policy_code.py compares the results. The right ones never come in here, so no answer can look them up. It is
an environment without steps, because an environment's functions may return any JSON value.
"""

import ast
import contextlib
import io
import json
import sys
from typing import Any


def reset(task: dict[str, Any]) -> tuple[Any, str]:
    """Run `code` once for each of `runs`: {"call": expression} or {"stdin": text}; their results, in order.

    A result is {"value": JSON}, {"text": repr of another value}, {"stdout": text} or {"error": class: text}.
    """
    return [run(task["code"], each) for each in task["runs"]], ""


def step(state: Any, action: str) -> tuple[Any, str, float, bool]:
    """End at once: there are no steps."""
    return state, action, 0.0, True


def run(code: str, each: dict[str, Any]) -> dict[str, Any]:
    """One run in names of its own."""
    names: dict[str, Any] = {"__name__": "__main__"}
    printed = io.StringIO()
    sys.stdin = io.StringIO(each.get("stdin", ""))
    try:
        with contextlib.redirect_stdout(printed):
            exec(compile(code, "answer.py", "exec"), names)  # noqa: S102 - what the sandbox is for
            if "call" in each:
                return value_of(eval(compile(ast.parse(each["call"], mode="eval"), "test", "eval"), names))  # noqa: S307
    except SystemExit as error:
        if "call" in each or error.code not in (None, 0):
            return {"error": f"SystemExit: {error.code}"}
    except BaseException as error:  # noqa: BLE001 - whatever the answer does wrong is its result
        return {"error": f"{type(error).__name__}: {error}"[:300]}
    return {"stdout": printed.getvalue()}


def value_of(value: Any) -> dict[str, Any]:
    """A result as JSON; values that JSON would change (tuples, sets, keys other than text) by their repr."""
    try:
        text = json.dumps(value, allow_nan=False)
        if json.loads(text) == value:
            return {"value": json.loads(text)}
    except (TypeError, ValueError, RecursionError):
        pass
    if isinstance(value, set | frozenset):
        return {"text": f"set of {sorted(map(repr, value))}"}
    return {"text": repr(value)[:10_000]}
