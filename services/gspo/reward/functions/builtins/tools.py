"""The built-in environment `tools`, inside its sandbox: a calculator, and Python programs.

An episode has no state. The reply to a turn with calls is their results; a turn without calls ends the episode. The
rewards come from the run's reward functions. services/gspo/reward/functions/policy_code.py is its part outside.
"""

import ast
import contextlib
import io
import operator
from collections.abc import Callable
from typing import Any

Action = dict[str, Any] | str
_SHOWN_CHARS = 2000
# A longer number, and a power that would make one, is refused: it takes time and is of no use.
_MOST_BITS = 4096
_OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_SIGNS: dict[type, Callable[[Any], Any]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}


def reset(task: Any) -> tuple[dict[str, Any], str]:  # noqa: ARG001 - the convention of environments
    """An episode begins with its prompt alone."""
    return {}, ""


def step(state: dict[str, Any], action: Action) -> tuple[dict[str, Any], Any, float, bool]:
    """The results of a turn's tool calls, in their order; done if there is no call."""
    calls = action["calls"] if isinstance(action, dict) else []
    if not calls:
        return state, "", 0.0, True
    messages = [{"role": "tool", "name": call["name"], "content": answer(call)} for call in calls]
    return state, messages, 0.0, False


def answer(call: dict[str, Any]) -> str:
    """The result of one call, as text."""
    arguments = call["arguments"]
    if call["name"] == "calculator":
        return calculate(str(arguments.get("expression", "")))
    return run(str(arguments.get("code", "")))


def calculate(expression: str) -> str:
    """The value of an arithmetic expression, or an error message."""
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body)
        return str(value)
    except ZeroDivisionError:
        return "error: division by zero"
    except (SyntaxError, ValueError, OverflowError, MemoryError, RecursionError, TypeError) as error:
        reason = error.msg if isinstance(error, SyntaxError) else str(error)
        return f"error: {reason}"[:200]


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return node.value
    if isinstance(node, ast.UnaryOp) and type(node.op) in _SIGNS:
        return _SIGNS[type(node.op)](_value(node.operand))
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        first, second = _value(node.left), _value(node.right)
        whole = isinstance(first, int) and isinstance(second, int)
        if isinstance(node.op, ast.Pow) and whole and first.bit_length() * max(1, second) > _MOST_BITS:
            raise ValueError("the number is too large")
        return _checked(_OPERATORS[type(node.op)](first, second))
    raise ValueError("only numbers, + - * / // % ** and brackets are known")


def _checked(value: Any) -> Any:
    if isinstance(value, complex):
        raise ValueError("the result is not a real number")
    if isinstance(value, int) and value.bit_length() > _MOST_BITS:
        raise ValueError("the number is too large")
    return value


def run(code: str) -> str:
    """The output of a program, and its exception if it ended by one."""
    printed = io.StringIO()
    failure = ""
    try:
        with contextlib.redirect_stdout(printed):
            exec(compile(code, "program.py", "exec"), {"__name__": "__main__"})  # noqa: S102 - what the sandbox is for
    except BaseException as error:  # noqa: BLE001 - whatever the program does wrong is its result
        failure = f"{type(error).__name__}: {error}"
    shown = printed.getvalue()
    if len(shown) > _SHOWN_CHARS:
        shown = f"{shown[:_SHOWN_CHARS]}... ({len(shown)} characters)"
    return "\n".join(part for part in (shown.rstrip("\n"), failure[:500]) if part) or "(it printed nothing)"
