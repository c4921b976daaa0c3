"""The section `environment`: what a rollout plays instead of giving one answer, its limits, and the tools in it.

It runs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt, field_validator, model_validator

from gspo.common.config.fields import ON_RESUME, FilePath, FreeMapping, RunName, Section, VersionText
from gspo.common.errors import NO_VALUE, ConfigError

# The name under which an episode's summed step rewards are a part of the score, beside those of reward functions.
ENVIRONMENT_PART = "environment"
ToolFormat = Literal["hermes", "qwen3_coder"]


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


# As a chat template describes them; the reward service runs them.
BUILTIN_TOOLS: Mapping[str, dict[str, Any]] = {
    "calculator": _tool(
        "calculator",
        "Work out an arithmetic expression.",
        "expression",
        "Numbers with + - * / // % ** and brackets",
    ),
    "python": _tool("python", "Run a Python program and read what it prints.", "code", "The program"),
}


class EnvironmentConfig(Section):
    """A multi-turn environment: a file, a built-in, or a name registered over REST; none of them is single-turn."""

    path: FilePath | None = Field(None, description="Python file with `reset(task)` and `step(state, action)`")
    builtin: Literal["tools"] | None = Field(
        None, description="An environment that comes with gspo: tools answers the calls of environment.tools"
    )
    name: RunName | None = Field(
        None,
        description="Name in logs and metrics; default: of the file or built-in. Alone: a registered environment",
    )
    version: VersionText | None = Field(
        None, description="Version of a registered environment, or 8 or more of its first characters; default: active"
    )
    entry: str | None = Field(None, description="Object or class with reset and step; default: the file itself")
    reads: tuple[FilePath, ...] = Field(
        (),
        description="Further files and folders that its code may read and import",
    )
    memory_mb: PositiveInt | None = Field(
        None, description="Address space of its process, in MiB; reward.memory_mb by default"
    )
    weight: float = Field(1.0, description="Factor of the summed step rewards, the part environment of the score")
    tools: tuple[str | FreeMapping, ...] = Field(
        (),
        description="Tools of the policy: built-in names (calculator, python), or for your own environment "
        "descriptions {type: function, function: {name, ...}}",
    )
    tool_format: ToolFormat = Field(
        "hermes", description="How the policy writes calls: hermes (Hermes, Qwen2.5, Qwen3) or qwen3_coder's XML"
    )
    max_turns: PositiveInt = Field(
        8, description="Turns of the policy; one more ends the rollout as turn_limit", json_schema_extra=ON_RESUME
    )
    turn_tokens: PositiveInt | None = Field(
        None,
        description="Tokens of one turn; null: no limit but algorithm.response_length, which bounds the whole "
        "conversation",
        json_schema_extra=ON_RESUME,
    )
    long_turn: Literal["close", "end"] = Field(
        "close",
        description="At turn_tokens: close the turn and let the environment answer, or end the rollout",
        json_schema_extra=ON_RESUME,
    )
    step_timeout_s: PositiveFloat = Field(
        10.0,
        description="Longest step of the environment; then the rollout ends as step_time_limit",
        json_schema_extra=ON_RESUME,
    )
    total_timeout_s: PositiveFloat = Field(
        300.0,
        description="Longest rollout; then it ends as time_limit",
        json_schema_extra=ON_RESUME,
    )

    @property
    def used(self) -> bool:
        """Whether rollouts are conversations."""
        return bool(self.path or self.builtin or self.name)

    @property
    def label(self) -> str:
        """Name in tasks, logs and metrics; empty where there is none."""
        return self.name or self.builtin or (self.path.stem if self.path else "")

    @property
    def registered(self) -> bool:
        """Whether it is a name of the registry."""
        return self.name is not None and self.path is None and self.builtin is None

    @property
    def descriptions(self) -> list[dict[str, Any]]:
        """The tools as a chat template takes them."""
        return [BUILTIN_TOOLS[tool] if isinstance(tool, str) else tool for tool in self.tools]

    @field_validator("tools")
    @classmethod
    def _tools_can_be_called(cls, tools: tuple[str | dict[str, Any], ...]) -> tuple[str | dict[str, Any], ...]:
        names: set[str] = set()
        for place, tool in enumerate(tools):
            _check_tool(str(place), tool)
            name = tool if isinstance(tool, str) else str(tool["function"]["name"])
            if name in names:
                raise ConfigError(str(place), NO_VALUE, f"'{name}' is there twice", "Leave one out")
            names.add(name)
        return tools

    @model_validator(mode="after")
    def _is_one_thing(self) -> EnvironmentConfig:
        if not self.used:
            for key, field in type(self).model_fields.items():
                if (value := getattr(self, key)) != field.default:
                    raise ConfigError(
                        key,
                        value,
                        "belongs to an environment, and there is none",
                        "Set environment.path, builtin or name",
                    )
            return self
        if self.path is not None and self.builtin is not None:
            raise ConfigError("builtin", NO_VALUE, "stands beside path, and it is one of them", "Leave one out")
        if self.version is not None and not self.registered:
            raise ConfigError("version", NO_VALUE, "only a registered environment has one", "Leave it out")
        for key in ("entry", "reads"):
            if getattr(self, key) and self.path is None:
                raise ConfigError(key, NO_VALUE, "belongs to a file", "Leave it out, or set environment.path")
        return self

    @model_validator(mode="after")
    def _tools_are_somebodys(self) -> EnvironmentConfig:
        names = [tool for tool in self.tools if isinstance(tool, str)]
        if self.builtin == "tools" and len(names) < max(1, len(self.tools)):
            raise ConfigError(
                "tools",
                NO_VALUE,
                "the built-in environment answers calls of built-in tools alone",
                f"List names of {', '.join(BUILTIN_TOOLS)}",
            )
        if names and self.builtin is None:
            raise ConfigError(
                "tools",
                NO_VALUE,
                f"'{names[0]}' is a built-in tool, and an environment of yours answers its own",
                "Describe its tools, or set environment.builtin: tools",
            )
        if self.turn_tokens is None and self.long_turn == "end":
            raise ConfigError("long_turn", "end", "needs a limit that ends turns", "Set environment.turn_tokens")
        return self


def _check_tool(key: str, tool: str | Mapping[str, Any]) -> None:
    """Refuse a tool that cannot be described and called."""
    if isinstance(tool, str):
        if tool not in BUILTIN_TOOLS:
            raise ConfigError(
                key, NO_VALUE, f"'{tool}' is not a built-in tool", f"Built in are {', '.join(BUILTIN_TOOLS)}"
            )
        return
    function = tool.get("function")
    if tool.get("type") != "function" or not isinstance(function, dict) or not isinstance(function.get("name"), str):
        fix = "Write {type: function, function: {name: ..., ...}}"
        raise ConfigError(key, tool, "does not describe a tool", fix)
    parameters = function.get("parameters", {})
    if not isinstance(parameters, dict) or not isinstance(parameters.get("properties", {}), dict):
        rule = f"the parameters of '{function['name']}' are not a JSON schema of an object"
        raise ConfigError(key, NO_VALUE, rule, "Give properties by name")
