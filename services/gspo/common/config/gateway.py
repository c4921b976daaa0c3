"""The sections `gateway`, `agent` and `environment.mcp`: programs of others.

They talk to the policy, play the run's rollouts, or give tools to its conversations.
"""

import re
from operator import attrgetter
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, NonNegativeInt, PositiveFloat, PositiveInt, field_validator

from gspo.common.config.fields import ON_RESUME, FilePath, HttpAddress, Owner, Section, no_password, of_kind
from gspo.common.errors import ConfigError

AGENT_PART = "agent"
_HOST, _ADDRESS = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*"), re.compile(r"[0-9.]+")
_HIGHEST_PORT = 65535
# The environment variable with the key of an environment's server.
KEY_VARIABLE = "GSPO_ENVIRONMENT_API_KEY"
_SANDBOXES = of_kind("agent.path or agent.command", "path", "command")
_PROGRAM = of_kind("environment.mcp.command", "command")


def _host_and_port(address: str) -> str:
    """Check an address that a sandboxed agent may reach: there the host's name stands for a relay to it."""
    host, _, port = address.rpartition(":")
    if not _HOST.fullmatch(host) or not port.isdecimal() or not 0 < int(port) <= _HIGHEST_PORT:
        raise ConfigError("", address, "is not HOST:PORT", "Write the name of a host and a port: example.org:443")
    if _ADDRESS.fullmatch(host) and not host.startswith("127."):
        fix = "Write the host's name; /etc/hosts of this machine can give it one"
        raise ConfigError("", address, "has an address in place of a name, and agents are relayed by names", fix)
    return address


HostAndPort = Annotated[str, AfterValidator(_host_and_port)]


class GatewayConfig(Section):
    """An endpoint that speaks the APIs of OpenAI and Anthropic."""

    may_change = True
    OWNER = Owner("gateway.replicas: 1", attrgetter("replicas"), ("replicas",))

    replicas: NonNegativeInt = Field(
        0, le=64, description="Gateways that `gspo run` starts; services.gateway_port is that of the first"
    )
    model_name: str = Field("policy", min_length=1, description="Name by which clients ask for the policy")
    tool_parser: str | None = Field(
        None, description="vLLM's name of the parser that reads tool calls, such as hermes; null: calls stay text"
    )
    reasoning_parser: str | None = Field(
        None, description="vLLM's name of the parser that separates thoughts, such as qwen3; null: they stay text"
    )
    request_timeout_s: PositiveFloat = Field(
        600.0, description="Longest time of one answer, with weight updates and the loss of a generator within"
    )


class AgentConfig(Section):
    """Agents that play the rollouts: any program that speaks the API of OpenAI or Anthropic."""

    KINDS = ("external", "path", "command")
    OWNER = Owner("agent.path, agent.command, or agent.external: true", attrgetter("used"), KINDS)
    external: bool = Field(
        False, description="Offer each rollout at the gateway's /v1/tasks/lease, for workers that you start"
    )
    path: FilePath | None = Field(
        None, description="Python file with `async def play(task)`, which `gspo run` plays the rollouts with, sandboxed"
    )
    entry: Annotated[str, of_kind("agent.path", "path")] = Field(
        "play", min_length=1, description="Name of the function in agent.path"
    )
    command: tuple[str, ...] = Field(
        (), description="A program of any language and its arguments, run for each rollout, sandboxed, instead of path"
    )
    reads: Annotated[tuple[FilePath, ...], _SANDBOXES] = Field(
        (), description="Further files and folders that the sandboxed agent may read; links to them are in its folder"
    )
    hosts: Annotated[tuple[HostAndPort, ...], _SANDBOXES] = Field(
        (), description="Addresses that the sandboxed agent may reach beside the gateway, such as example.org:443"
    )
    workers: Annotated[PositiveInt, _SANDBOXES] = Field(
        8,
        description="Rollouts that the agent plays at a time, each in a sandbox of its own",
        json_schema_extra=ON_RESUME,
    )
    memory_mb: Annotated[PositiveInt, _SANDBOXES] = Field(
        2048,
        description="Memory of a sandbox with all its processes, in MiB; files in its folders are not counted",
        json_schema_extra=ON_RESUME,
    )
    weight: float | None = Field(
        1.0, description="Factor of the reward that the agent returns; null: reward.functions alone score the rollouts"
    )
    answer_tokens: PositiveInt | None = Field(
        None,
        description="Tokens of one answer; null: no limit but algorithm.response_length, which bounds all tokens of "
        "a rollout behind its first context",
        json_schema_extra=ON_RESUME,
    )
    sampling: Literal["run", "client"] = Field(
        "run",
        description="Whose temperature rollouts are sampled at: the run's, or that of the agent's requests, one in all "
        "of a rollout; evaluations keep theirs",
    )
    max_rollouts: PositiveInt = Field(
        64, description="Rollouts that one gateway keeps open or played at a time", json_schema_extra=ON_RESUME
    )
    lease_s: PositiveFloat = Field(
        60.0,
        description="A worker that neither calls the model nor sends a heartbeat for so long loses its rollout",
        json_schema_extra=ON_RESUME,
    )
    timeout_s: PositiveFloat = Field(
        600.0, description="Longest rollout; workers end it then", json_schema_extra=ON_RESUME
    )

    @property
    def is_started(self) -> bool:
        """Whether `gspo run` starts the agent, in sandboxes."""
        return self.kind in ("path", "command")


class McpConfig(Section):
    """A server that speaks the Model Context Protocol (MCP): the policy of a conversation calls its tools."""

    KINDS = ("command", "url")
    OWNER = Owner("environment.mcp.command or url", attrgetter("used"), KINDS)
    command: tuple[str, ...] = Field(
        (),
        description="A program that speaks MCP over its standard input and output, with its arguments; each generator "
        "starts it in a sandbox without network",
    )
    url: Annotated[HttpAddress, no_password(KEY_VARIABLE)] | None = Field(
        None,
        description="URL of a server of yours that speaks MCP over streamable HTTP, such as http://127.0.0.1:8000/mcp; "
        "the key is in GSPO_ENVIRONMENT_API_KEY, if it wants one",
        json_schema_extra=ON_RESUME,
    )
    reads: Annotated[tuple[FilePath, ...], _PROGRAM] = Field(
        (), description="Files and folders that command may read; links to them are in its working folder"
    )
    per: Literal["rollout", "shared"] = Field(
        "rollout",
        description="rollout: each has a process of command of its own, or a session of url; shared: all rollouts of a "
        "generator have one, for tools without state",
    )
    tools: tuple[str, ...] = Field((), description="Names of the tools that the policy may call; [] for all")
    max_calls: PositiveInt | None = Field(
        None,
        description="Calls of one rollout, of which further ones get an error as their answer; null: no limit but "
        "environment.max_turns",
        json_schema_extra=ON_RESUME,
    )
    timeout_s: PositiveFloat = Field(
        10.0, description="Longest call; then the policy gets an error as its answer", json_schema_extra=ON_RESUME
    )
    max_result_chars: PositiveInt = Field(
        8192,
        description="Characters of a result that the policy sees; the rest is cut off",
        json_schema_extra=ON_RESUME,
    )
    memory_mb: Annotated[PositiveInt, _PROGRAM] = Field(
        2048,
        description="Memory of a server of command with all its processes, in MiB",
        json_schema_extra=ON_RESUME,
    )

    @property
    def place(self) -> str:
        """Its address, or its command line, for messages."""
        return self.url or " ".join(self.command)

    @field_validator("tools")
    @classmethod
    def _are_different(cls, tools: tuple[str, ...]) -> tuple[str, ...]:
        for place, name in enumerate(tools):
            if name in tools[:place]:
                raise ConfigError(str(place), name, "is there twice", "Leave one out")
        return tools
