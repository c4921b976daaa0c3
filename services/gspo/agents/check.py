"""The check of an agent before a run: its files, and its import within the sandbox. No rollout is played."""

import asyncio

from gspo.agents.agent_sandbox import AgentSandbox
from gspo.agents.player.loading import UnfitAgentError
from gspo.agents.relay import Streams
from gspo.agents.worker import RolloutLostError
from gspo.common.config.schema import Config
from gspo.common.errors import InputError
from gspo.reward.sandbox.levels import find_agent_level
from gspo.reward.sandbox.memory_watch import MemoryWatch


def check(config: Config) -> None:
    """Refuse an agent that cannot play.

    Raises:
        InputError: Names the key.
    """
    asyncio.run(_check(config))


async def _check(config: Config) -> None:
    agent = config.agent
    if not agent.is_started:
        kind = "agent.external is set, so its agents are started elsewhere" if agent.external else "there is no agent"
        raise InputError(
            "agent",
            f"has neither path nor command: {kind}",
            "Set agent.path or agent.command, or start no such service",
        )
    if agent.path is not None and not agent.path.is_file():
        rule = f"{agent.path} is no file" if agent.path.exists() else f"{agent.path} does not exist"
        raise InputError("agent.path", rule, "Name a Python file with `async def play(task)`")
    for number, path in enumerate(agent.reads):
        if not path.exists():
            raise InputError(f"agent.reads.{number}", f"{path} does not exist", "Give a file or folder to read")
    names = [path.name for path in agent.reads]
    if twice := {name for name in names if names.count(name) > 1}:
        rule = f"has several paths that end in {min(twice)}, and the agent's folder has one link of a name"
        raise InputError("agent.reads", rule, "Rename one")
    level = await find_agent_level(config.reward.sandbox_minimum)
    sandbox = AgentSandbox(agent, level, _nowhere, MemoryWatch(), max_connections=1)
    where, value = ("agent.path", agent.path) if agent.path else ("agent.command.0", agent.command[0])
    try:
        await sandbox.start()
    except (UnfitAgentError, RolloutLostError) as error:
        fix = error.fix if isinstance(error, UnfitAgentError) else "Look at the sandbox: gspo doctor"
        raise InputError(where, f"{value} {error}", fix) from error
    finally:
        await sandbox.close()


async def _nowhere() -> Streams:
    raise ConnectionError("a check has no gateway")
