"""The built-in tools as a chat template describes them, and what a tool's description must have.

What the tools do is the reward service's (builtins/tools.py); who calls them is the generator's. It imports nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def _tool(name: str, description: str, parameter: str, meaning: str) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {
                "type": "object",
                "properties": {parameter: {"type": "string", "description": meaning}},
                "required": [parameter],
            },
        },
    }


BUILTIN_TOOLS: Mapping[str, dict[str, Any]] = {
    "calculator": _tool(
        "calculator",
        "Work out an arithmetic expression.",
        "expression",
        "Numbers with + - * / // % ** and brackets",
    ),
    "python": _tool("python", "Run a Python program and read what it prints.", "code", "The program"),
}


def tool_problem(tool: str | Mapping[str, Any]) -> str:
    """Why this is no tool that can be described and called, with what to do; empty where it is one."""
    if isinstance(tool, str):
        known = ", ".join(BUILTIN_TOOLS)
        return "" if tool in BUILTIN_TOOLS else f"'{tool}' is no built-in tool. Built in are {known}"
    function = tool.get("function")
    if tool.get("type") != "function" or not isinstance(function, dict) or not isinstance(function.get("name"), str):
        return f"{tool!r:.80} is no description of a tool. Write {{type: function, function: {{name: ..., ...}}}}"
    parameters = function.get("parameters", {})
    if not isinstance(parameters, dict) or not isinstance(parameters.get("properties", {}), dict):
        return f"the parameters of '{function['name']}' are no JSON schema of an object. Give properties by name"
    return ""
