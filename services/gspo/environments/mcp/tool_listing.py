"""The tools of a run's MCP servers: each server is asked once, and they are described as a chat template takes them.

Also the check before a run: every trouble of a server is an error of its key in the configuration.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import structlog

from gspo.common.config.gateway import KEY_VARIABLE
from gspo.common.config.reward import EnvironmentConfig
from gspo.common.config.schema import Config
from gspo.common.errors import InputError, nearest
from gspo.environments.session_server import ServerTroubleError

if TYPE_CHECKING:
    from gspo.reward.sandbox.launch import LevelName

_PAUSE_S = 1.0
log = structlog.get_logger()


async def with_listed_tools(config: Config, *, is_patient: bool = False) -> Config:
    """The configuration; where environments have MCP servers, a copy with the descriptions of their tools.

    Args:
        is_patient: Ask an unreachable server again for reach_timeout_s.

    Raises:
        InputError: A server cannot be asked, or lists no tool.
    """
    minimum = config.reward.sandbox_minimum
    if config.environment.mcp.used:
        tools = await listed_tools(config.environment, "environment", minimum, is_patient=is_patient)
        config = config.with_keys(environment={"tools": tools})
    sources = list(config.data.sources)
    for index, source in enumerate(sources):
        if source.environment is not None and source.environment.mcp.used:
            key = f"data.sources.{index}.environment"
            tools = await listed_tools(source.environment, key, minimum, is_patient=is_patient)
            environment = source.environment.model_copy(update={"tools": tools})
            sources[index] = source.model_copy(update={"environment": environment})
    return config.with_keys(data={"sources": tuple(sources)}) if sources else config


async def listed_tools(
    environment: EnvironmentConfig, where: str, sandbox_minimum: LevelName, *, is_patient: bool = False
) -> tuple[dict[str, Any], ...]:
    """The descriptions of the tools that the policy may call.

    Args:
        where: The environment's place in the configuration.

    Raises:
        InputError: The server cannot be asked, or has not the tools that the configuration names.
    """
    # Here: the package mcp takes a second to import, and a coordinator without MCP has not the sandbox's packages.
    from gspo.environments.mcp.mcp_connection import McpConnection
    from gspo.reward.sandbox.levels import find_agent_level
    from gspo.reward.sandbox.memory_watch import MemoryWatch

    config = environment.mcp
    where = f"{where}.mcp"
    for number, path in enumerate(config.reads):
        if not path.exists():
            raise InputError(f"{where}.reads.{number}", f"{path} does not exist", "Give a file or folder to read")
    level = None if config.url else await find_agent_level(sandbox_minimum)
    deadline_s = asyncio.get_running_loop().time() + environment.reach_timeout_s
    while True:
        connection = McpConnection(config, level, MemoryWatch())
        try:
            await connection.open(environment.reach_timeout_s)
            tools = await connection.tools()
            break
        except ServerTroubleError as error:
            may_return = is_patient and error.kind in ("environment_full", "environment_unreachable")
            if not may_return or asyncio.get_running_loop().time() > deadline_s:
                raise _refusal(error, f"{where}.{config.kind}") from error
            log.warning(error.kind, server=config.place, detail=f"asking again for its tools: {error}")
            await asyncio.sleep(_PAUSE_S)
        finally:
            await connection.close()
    listed = {
        tool.name: {
            "type": "function",
            "function": {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema},
        }
        for tool in tools
    }
    if not listed:
        raise InputError(where, f"{config.place} lists no tool", "Give the server a tool, or leave mcp out")
    for number, name in enumerate(config.tools):
        if name not in listed:
            raise InputError(f"{where}.tools.{number}", f"{config.place} has no tool '{name}'", nearest(name, listed))
    return tuple(listed[name] for name in config.tools or listed)


def _refusal(error: ServerTroubleError, key: str) -> InputError:
    if error.kind == "forbidden":
        return InputError(key, str(error), f"Set the environment variable {KEY_VARIABLE} to the server's key")
    if key.endswith("url"):
        fix = "Start the server, or correct its address: that of streamable HTTP, which often ends in /mcp"
        return InputError(key, str(error), fix)
    fix = "Correct the command; it runs without network, and reads the system, Python and mcp.reads alone"
    return InputError(key, str(error), fix)
