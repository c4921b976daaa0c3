"""The sections `reward` and `environment`, which the reward service runs: functions that score answers, conversations.

They hold limits, the registry of functions, and the tools of an environment.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal
from urllib.parse import urlsplit

from pydantic import Field, PositiveFloat, PositiveInt, field_validator

from gspo.common.config.fields import (
    FIXED,
    ON_RESUME,
    FilePath,
    FreeMapping,
    HttpAddress,
    Owner,
    RunName,
    Section,
    VersionText,
    no_password,
    of_kind,
)
from gspo.common.config.gateway import KEY_VARIABLE, McpConfig
from gspo.common.errors import NO_VALUE, ConfigError

# Values of `reward.functions.N.builtin`; the reward service has a file or a client for each.
Builtin = Literal[
    "exact_match",
    "numeric",
    "math_equivalence",
    "regex",
    "json_schema",
    "code_tests",
    "length_penalty",
    "repetition_penalty",
    "reward_model",
    "llm_judge",
]
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


_FILE = of_kind("path", "path")
_REGISTERED = of_kind("the name of a registered version alone", "name")
_HERE = of_kind("path, builtin or a registered name in place of url", "path", "builtin", "name")
_SERVER = of_kind("environment.url", "url")
_OPENENV = Owner("environment.protocol: openenv", attrgetter("is_openenv"))
_REACHED = of_kind("environment.url or mcp", "url", "mcp")
_NO_MCP = Owner("mcp, whose server has keys of its own", lambda code: code.kind != "mcp", is_rival=True)
_LISTED = Owner(
    "mcp, whose server lists its tools, of which environment.mcp.tools chooses",
    lambda code: code.kind != "mcp",
    is_rival=True,
)
_NO_OPENENV = Owner("protocol: openenv, whose actions have none", lambda code: not code.is_openenv, is_rival=True)
_TURN_LIMIT = Owner("environment.turn_tokens", lambda environment: environment.turn_tokens is not None)


class CodeSection(Section):
    """A reward function or an environment: a file, a built-in, an address, or a name registered over REST."""

    if TYPE_CHECKING:
        name: RunName | None

    @property
    def kind(self) -> str:
        """As in Section. A name alone is a kind too: of the registry."""
        return super().kind or ("name" if self.name else "")

    @property
    def registered(self) -> bool:
        """Whether it is a name of the registry."""
        return self.kind == "name"

    @property
    def label(self) -> str:
        """Name in tasks, scores, logs and metrics; empty where there is none."""
        value = getattr(self, self.kind, None)
        if self.name or value is None:
            return self.name or ""
        if isinstance(value, McpConfig):
            return _host_label(value.url) if value.url else "mcp"
        return value.stem if isinstance(value, Path) else _host_label(value) if self.kind == "url" else str(value)


class RewardFunction(CodeSection):
    """One function that scores answers: a file, a built-in, an HTTP address, or a name registered over REST."""

    KINDS = ("path", "builtin", "url")
    REMOVED: ClassVar[Mapping[str, Any]] = {"replay": False}
    path: FilePath | None = Field(
        None, description="Python file with `reward(prompts, completions, **columns)` or verl's `compute_score`"
    )
    builtin: Builtin | None = Field(None, description="A function that comes with gspo, instead of a file")
    url: HttpAddress | None = Field(None, description="URL of your own scoring server, with OpenRLHF's remote protocol")
    name: RunName | None = Field(
        None,
        description="Name in logs and metrics; default: of the file, built-in or host. Alone: a registered function",
    )
    version: Annotated[VersionText | None, _REGISTERED] = Field(
        None, description="Version of a registered function, or 8 or more of its first characters; default: active"
    )
    entry: Annotated[str | None, _FILE] = Field(
        None, description="Name of the function, where the file holds more than one"
    )
    args: FreeMapping = Field(
        default_factory=dict, description="Further keyword arguments of the function, such as a built-in's options"
    )
    weight: float = Field(1.0, description="Factor of this function's value in the summed reward")
    timeout_s: PositiveFloat | None = Field(None, description="Longest a call may take; reward.timeout_s by default")
    memory_mb: Annotated[PositiveInt | None, _HERE] = Field(
        None, description="Address space of its process, in MiB; reward.memory_mb by default"
    )
    part_weights: dict[str, float] = Field(
        default_factory=dict, description="Factors of named parts of the value; default 1"
    )
    reads: Annotated[tuple[FilePath, ...], _HERE] = Field(
        (), description="Further files and folders that its code may read and import"
    )

    def problems(self) -> Iterator[ConfigError]:
        if not self.used:
            fix = "Set path, builtin, url, or the name of a registered function"
            yield ConfigError("path", NO_VALUE, "is missing", fix)


class RegistryQuotas(Section):
    """Limits of the functions registered over REST. Beyond them, submissions are refused until versions are removed."""

    may_change = True

    versions: PositiveInt = Field(1000, description="Versions of all names together")
    versions_per_name: PositiveInt = Field(200, description="Versions of one name")
    total_mb: PositiveInt = Field(128, description="Sources and test cases of all versions together, in MiB")
    name_mb: PositiveInt = Field(32, description="Sources and test cases of one name's versions, in MiB")


class RewardConfig(Section):
    """The reward of an answer."""

    may_change = True

    functions: tuple[RewardFunction, ...] = Field(
        (), description="Reward functions, summed by weight; may be empty with an environment", json_schema_extra=FIXED
    )
    timeout_s: PositiveFloat = Field(10.0, description="Longest call; then its process is killed")
    memory_mb: PositiveInt = Field(2048, description="Address space of the process that runs user code, in MiB")
    cpu_s: PositiveFloat | None = Field(
        None, description="Processor time of a call, over all its threads; null: timeout_s alone"
    )
    batch_size: PositiveInt = Field(64, description="Most answers in one call of a function")
    replicas: PositiveInt = Field(
        1, le=64, description="Reward services that `gspo run` starts; services.reward_port is that of the first"
    )
    workers: PositiveInt = Field(2, description="Parallel calls of one function")
    on_failure: Literal["rollout", "group"] = Field(
        "rollout", description="A failed score removes its rollout, or its whole group"
    )
    max_failure_share: float = Field(
        0.5, gt=0, le=1, description="Share of failed scores above which the run is paused; 1: never"
    )
    failure_window: PositiveInt = Field(256, description="Training rollouts over which max_failure_share is measured")
    sandbox_minimum: Literal["bubblewrap", "landlock", "rlimits"] = Field(
        "landlock", description="Least confinement level of user code; the machine's strongest level is used"
    )
    registry: FilePath | None = Field(
        None, description="Folder of this machine's copy of registered functions; default: .rewards in run.directory"
    )
    allowed_packages: tuple[str, ...] = Field(
        ("numpy", "sympy", "math-verify", "regex", "rapidfuzz", "jsonschema"),
        description="Packages that a submitted function may import besides the standard library",
    )
    tokens: FilePath | None = Field(
        None, description="File of user tokens for REST: lines of NAME, ROLE (submit or read) and TOKEN"
    )
    calls_per_minute: PositiveInt = Field(
        600, description="Submissions, trials, activations or removals of one caller in a minute, each"
    )
    quotas: RegistryQuotas = Field(default_factory=RegistryQuotas)


class EnvironmentConfig(CodeSection):
    """A multi-turn environment: a file, a built-in, a server, or a name registered over REST; none is single-turn."""

    KINDS = ("path", "builtin", "url", "mcp")
    OWNER = Owner("environment.path, builtin, url, mcp or name", attrgetter("used"), (*KINDS, "name"))
    path: FilePath | None = Field(None, description="Python file with `reset(task)` and `step(state, action)`")
    builtin: Literal["tools"] | None = Field(
        None, description="An environment that comes with gspo: tools answers the calls of environment.tools"
    )
    url: Annotated[HttpAddress, no_password(KEY_VARIABLE)] | None = Field(
        None,
        description="URL of a server of yours with the environment, which keeps its state; the key is in "
        "GSPO_ENVIRONMENT_API_KEY, if it wants one",
        json_schema_extra=ON_RESUME,
    )
    protocol: Annotated[Literal["http", "openenv"], _SERVER] = Field(
        "http", description="How the server of url is asked: reset, step and close over HTTP, or OpenEnv's WebSocket"
    )
    action_field: Annotated[str, _OPENENV] = Field(
        "message", description="Field of OpenEnv's action that takes the policy's text"
    )
    observation_field: Annotated[str | None, _OPENENV] = Field(
        None, description="Field of OpenEnv's observation that the policy sees; null: all of them, as JSON"
    )
    ping_every_s: Annotated[PositiveFloat, _SERVER] = Field(
        10.0,
        description="Time between two pings of a session of url; half of the server's time to live or less",
        json_schema_extra=ON_RESUME,
    )
    reach_timeout_s: Annotated[PositiveFloat, _REACHED] = Field(
        30.0,
        description="Longest that the server of url or mcp may be unreachable; then the attempt fails as "
        "environment_unreachable",
        json_schema_extra=ON_RESUME,
    )
    replay: Annotated[bool, _SERVER] = Field(
        False,
        description="The environment of url is deterministic: a lost session is made again by the same actions, whose "
        "answers are compared; otherwise the rollout begins anew",
        json_schema_extra=ON_RESUME,
    )
    name: RunName | None = Field(
        None,
        description="Name in logs and metrics; default: of the file, built-in or host. Alone: a registered environment",
    )
    version: Annotated[VersionText | None, _REGISTERED] = Field(
        None, description="Version of a registered environment, or 8 or more of its first characters; default: active"
    )
    entry: Annotated[str | None, _FILE] = Field(
        None, description="Object or class with reset and step; default: the file itself"
    )
    reads: Annotated[tuple[FilePath, ...], _FILE] = Field(
        (), description="Further files and folders that its code may read and import"
    )
    memory_mb: Annotated[PositiveInt | None, _HERE, _NO_MCP] = Field(
        None, description="Address space of its process, in MiB; reward.memory_mb by default"
    )
    weight: Annotated[float, _NO_MCP] = Field(
        1.0, description="Factor of the summed step rewards, the part environment of the score"
    )
    tools: Annotated[tuple[str | FreeMapping, ...], _LISTED, _NO_OPENENV] = Field(
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
    long_turn: Annotated[Literal["close", "end"], _TURN_LIMIT] = Field(
        "close",
        description="At turn_tokens: close the turn and let the environment answer, or end the rollout",
        json_schema_extra=ON_RESUME,
    )
    step_timeout_s: Annotated[PositiveFloat, _NO_MCP] = Field(
        10.0,
        description="Longest step of the environment; then the rollout ends as step_time_limit",
        json_schema_extra=ON_RESUME,
    )
    total_timeout_s: PositiveFloat = Field(
        300.0, description="Longest rollout; then it ends as time_limit", json_schema_extra=ON_RESUME
    )
    mcp: McpConfig = Field(default_factory=McpConfig)

    @property
    def is_openenv(self) -> bool:
        """Whether its server speaks OpenEnv's WebSocket."""
        return self.url is not None and self.protocol == "openenv"

    @property
    def on_server(self) -> bool:
        """Whether a server of the user's answers, and not a function in the reward service."""
        return self.kind in ("url", "mcp")

    @property
    def place(self) -> str:
        """The address or the command line of its server, for messages; empty where there is none."""
        return self.url or self.mcp.place

    @property
    def longest_step_s(self) -> float:
        """Limit of one step; an MCP server's calls have limits of their own, and the whole conversation has one."""
        return self.total_timeout_s if self.kind == "mcp" else self.step_timeout_s

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

    def problems(self) -> Iterator[ConfigError]:
        names = [tool for tool in self.tools if isinstance(tool, str)]
        if self.builtin == "tools" and len(names) < max(1, len(self.tools)):
            yield ConfigError(
                "tools",
                NO_VALUE,
                "the built-in environment answers calls of built-in tools alone",
                f"List names of {', '.join(BUILTIN_TOOLS)}",
            )
        if names and self.builtin is None:
            yield ConfigError(
                "tools",
                NO_VALUE,
                f"'{names[0]}' is a built-in tool, and an environment of yours answers its own",
                "Describe its tools, or set environment.builtin: tools",
            )


def _host_label(url: str | None) -> str:
    """The name of a function or environment by its host and port."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", urlsplit(url or "").netloc.rpartition("@")[2])


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
