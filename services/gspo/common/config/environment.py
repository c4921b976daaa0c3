"""The section `environment`: what a rollout plays instead of giving one answer, its limits, and the tools in it.

It runs nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt, field_validator, model_validator

from gspo.common.config.fields import ON_RESUME, FreeMapping, RunName, Section, VersionText
from gspo.common.errors import in_yaml
from gspo.common.tools import BUILTIN_TOOLS, tool_problem

# The name under which an episode's summed step rewards are a part of the score, beside those of reward functions.
ENVIRONMENT_PART = "environment"
ToolFormat = Literal["hermes", "qwen3_coder"]


class EnvironmentConfig(Section):
    """A multi-turn environment: a file, a built-in, or a name registered over REST; none of them is single-turn."""

    path: Path | None = Field(None, description="Python file with `reset(task)` and `step(state, action)`")
    builtin: Literal["tools"] | None = Field(
        None, description="An environment that comes with gspo: tools answers the calls of environment.tools"
    )
    name: RunName | None = Field(
        None,
        description="Name in logs and metrics; the file's or built-in's by default. Alone: an environment registered "
        "over REST",
    )
    version: VersionText | None = Field(
        None, description="Version of a registered environment, or its first 8 or more characters; else its active one"
    )
    entry: str | None = Field(None, description="Object or class of the file that has reset and step, if not the file")
    reads: tuple[Path, ...] = Field(
        (),
        description="Files and folders beside its own file that it may read and import from; everything else is hidden",
    )
    memory_mb: PositiveInt | None = Field(
        None, description="Address space of its process, in MiB; reward.memory_mb by default"
    )
    weight: float = Field(
        1.0, description="Factor of an episode's summed step rewards in the reward, where they are its part environment"
    )
    tools: tuple[str | FreeMapping, ...] = Field(
        (),
        description="What the policy may call, in the chat template's words: names of built-in tools (calculator, "
        "python) or, for an environment of yours, descriptions {type: function, function: {name, ...}}",
    )
    tool_format: ToolFormat = Field(
        "hermes", description="How the policy writes calls: hermes (Hermes, Qwen2.5, Qwen3) or qwen3_coder's XML"
    )
    max_turns: PositiveInt = Field(
        8, description="Turns of the policy; one more ends the rollout as turn_limit", json_schema_extra=ON_RESUME
    )
    turn_tokens: PositiveInt | None = Field(
        None,
        description="Tokens of one turn; null leaves it to algorithm.response_length, which holds for all turns and "
        "observations together",
        json_schema_extra=ON_RESUME,
    )
    long_turn: Literal["close", "end"] = Field(
        "close",
        description="A turn cut off at turn_tokens: close it and let the environment answer, or end the rollout as "
        "turn_token_limit",
        json_schema_extra=ON_RESUME,
    )
    step_timeout_s: PositiveFloat = Field(
        10.0,
        description="Longest a step of the environment may take; longer ends the rollout as step_time_limit",
        json_schema_extra=ON_RESUME,
    )
    total_timeout_s: PositiveFloat = Field(
        300.0,
        description="Longest a rollout may take; what is not over then ends as time_limit",
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
            if problem := tool_problem(tool):
                raise ValueError(f"environment.tools.{place}: {problem}")
            name = tool if isinstance(tool, str) else str(tool["function"]["name"])
            if name in names:
                raise ValueError(f"environment.tools.{place}: '{name}' is there twice. Leave one out")
            names.add(name)
        return tools

    @model_validator(mode="after")
    def _is_one_thing(self) -> EnvironmentConfig:
        if not self.used:
            for key, field in type(self).model_fields.items():
                if (value := getattr(self, key)) != field.default:
                    raise ValueError(
                        f"environment.{key}: {in_yaml(value)} belongs to an environment, and there is none. "
                        "Set environment.path, builtin or name"
                    )
            return self
        if self.path is not None and self.builtin is not None:
            raise ValueError("environment.builtin: stands beside path, and it is one of them. Leave one out")
        if self.version is not None and not self.registered:
            raise ValueError("environment.version: only a registered environment has one. Leave it out")
        for key in ("entry", "reads"):
            if getattr(self, key) and self.path is None:
                raise ValueError(f"environment.{key}: belongs to a file. Leave it out, or set environment.path")
        return self

    @model_validator(mode="after")
    def _tools_are_somebodys(self) -> EnvironmentConfig:
        names = [tool for tool in self.tools if isinstance(tool, str)]
        if self.builtin == "tools" and len(names) < max(1, len(self.tools)):
            raise ValueError(
                "environment.tools: the built-in environment answers calls of built-in tools alone. "
                f"List names of {', '.join(BUILTIN_TOOLS)}"
            )
        if names and self.builtin is None:
            raise ValueError(
                f"environment.tools: '{names[0]}' is a built-in tool, and an environment of yours answers its own. "
                "Describe its tools, or set environment.builtin: tools"
            )
        if self.turn_tokens is None and self.long_turn == "end":
            raise ValueError("environment.long_turn: end needs a limit that ends turns. Set environment.turn_tokens")
        return self
