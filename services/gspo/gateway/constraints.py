"""The keys of a request that the gateway refuses, in the words of each API that clients speak."""

from collections.abc import Mapping
from typing import Any

from gspo.common.chat_messages import is_media

# Of Anthropic's API any and tool, of OpenAI's the others.
_FORCED = ("required", "any", "tool", "function", "allowed_tools", "custom")


def constraint(body: Mapping[str, Any]) -> str:
    """The first key of a request by which an engine would cut the distribution of tokens; empty without any."""
    if _type_of(body.get("response_format")) not in ("", "text"):
        return "response_format"
    if _type_of(_part(body.get("text"), "format")) not in ("", "text"):
        return "text.format"
    choice = body.get("tool_choice")
    if _type_of(choice) in _FORCED:
        return "tool_choice"
    if body.get("parallel_tool_calls") is False:
        return "parallel_tool_calls"
    if _part(choice, "disable_parallel_tool_use") is True:
        return "tool_choice.disable_parallel_tool_use"
    tools = body.get("tools")
    for number, tool in enumerate(tools if isinstance(tools, list) else ()):
        for name, holder in (("function.", _part(tool, "function")), ("", tool)):
            if _part(holder, "strict") is True:
                return f"tools.{number}.{name}strict"
    return ""


def media_part(body: Mapping[str, Any]) -> tuple[str, str]:
    """The key of a request's messages and the type of their first part with an image, sound or file; empty without."""
    for key in ("messages", "input"):
        if kind := _media_in(body.get(key)):
            return key, kind
    return "", ""


def _media_in(value: Any) -> str:
    """The type of the first such part of messages, contents and tool results, which lie in one another."""
    waiting = [value]
    while waiting:
        part = waiting.pop()
        if isinstance(part, list):
            waiting += reversed(part)
        elif isinstance(part, dict):
            if is_media(part.get("type")):
                return str(part["type"])
            waiting.append(part.get("content"))
    return ""


def wants_calls(body: Mapping[str, Any]) -> bool:
    """Whether tool calls are to be read from the answer, which takes a parser."""
    return bool(body.get("tools")) and _type_of(body.get("tool_choice")) != "none"


def _type_of(value: Any) -> str:
    return str(value if isinstance(value, str) else _part(value, "type") or "")


def _part(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, dict) else None
