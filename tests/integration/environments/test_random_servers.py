"""Servers that answer anything: a rollout fails by it with a cause, or plays on, and no other fails.

Real sockets and WebSockets, and a process that speaks MCP; each case by its seed.
"""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import pytest
from structlog.testing import capture_logs

from gspo.common.config.reward import EnvironmentConfig
from gspo.environments.mcp.mcp_sessions import McpSessions
from gspo.environments.server_environment import ServerEnvironment
from gspo.environments.session_server import ServerTurn
from gspo_proto.reward_pb2 import EnvironmentReply, ResetRequest, StepRequest
from tests.support.environments.mcp_server import command
from tests.support.environments.random_answers import random_http, random_websocket
from tests.support.environments.scripted_game import LinesEngine, driver_of, in_flight_of, on_server, played

pytestmark = [pytest.mark.asyncio(loop_scope="function"), pytest.mark.timeout(600)]
FEW, MANY = 60, pytest.param(1000, marks=pytest.mark.long)
CALL = json.dumps([{"name": "add", "arguments": {"a": 1}}])


def check(reply: EnvironmentReply) -> None:
    """Its texts can be sent, and its observation is read as the policy's."""
    reply.SerializeToString()
    json.loads(reply.observation_json or '""')


class BrokenSessions:
    """Sessions whose library fails by an exception that its caller does not know."""

    needs_pings, is_shared = True, False

    async def reset(self, *_asked: Any) -> ServerTurn:
        raise UnicodeError("a label \ud83d is too long")

    async def aclose(self) -> None:
        """Nothing is open."""

    step = num_steps = close = reset


async def test_an_exception_of_a_library_fails_its_rollout_alone() -> None:
    config = EnvironmentConfig(url="http://127.0.0.1:1", name="game", reach_timeout_s=0.1)
    environment = ServerEnvironment(config, BrokenSessions())  # type: ignore[arg-type]
    state = json.dumps({"episode_id": "a", "step_count": 0})
    # A service logs in ASCII; structlog's own default cannot write the exception to every stream.
    with capture_logs():
        replies = (
            await environment.begin(ResetRequest(task_json="{}"), 1.0),
            await environment.step(StepRequest(state_json=state, action="x"), 1.0, "{}"),
            await environment.resume(state, "{}"),
        )
    for reply in replies:
        assert reply.failure.kind == "exception"
        assert "cannot be read (UnicodeError: a label ? is too long)" in reply.failure.text
        reply.SerializeToString()
    await environment.aclose()


@pytest.mark.parametrize("num_rollouts", [FEW, MANY])
@pytest.mark.parametrize("protocol", ["http", "openenv"])
async def test_a_rollout_ends_whatever_its_environment_answers(protocol: str, num_rollouts: int) -> None:
    rng = random.Random(7)  # noqa: S311 - a case is found again by its seed
    serving = random_http if protocol == "http" else random_websocket
    async with serving(rng) as port:
        keys: dict[str, Any] = {"protocol": protocol, "name": "game", "reach_timeout_s": 0.01, "total_timeout_s": 3.0}
        if protocol == "openenv":
            keys |= {"action_field": "guess", "observation_field": rng.choice([None, "said"])}
        config = EnvironmentConfig(url=f"http://127.0.0.1:{port}", step_timeout_s=1.0, **keys)
        async with on_server(config) as remotes:
            driver = driver_of(remotes, LinesEngine(), max_attempts=2)
            for number in range(num_rollouts):
                async with asyncio.timeout(30):
                    rollout = await played(driver, in_flight_of(number, total_timeout_s=3.0, step_timeout_s=1.0))
                rollout.SerializeToString()


@pytest.mark.parametrize("num_sessions", [FEW, MANY])
@pytest.mark.parametrize("transport", ["http", "stdio"])
async def test_a_turn_ends_whatever_an_mcp_server_answers(transport: str, num_sessions: int) -> None:
    rng = random.Random(7)  # noqa: S311 - a case is found again by its seed
    async with random_http(rng, is_mcp=True) as port:
        for seed in range(num_sessions if transport == "http" else num_sessions // 20):
            http = {"url": f"http://127.0.0.1:{port}/mcp"}
            mcp: dict[str, Any] = http if transport == "http" else command("random")
            if transport == "stdio":
                mcp["command"] += [str(seed)]
            config = EnvironmentConfig.model_validate({"mcp": mcp | {"timeout_s": 0.3}, "reach_timeout_s": 2.0})
            environment = ServerEnvironment(config, McpSessions(config, "bubblewrap"))
            async with asyncio.timeout(30):
                begun = await environment.begin(ResetRequest(task_json="{}"), 5.0)
                check(begun)
                for _ in range(0 if begun.HasField("failure") else 3):
                    check(await environment.step(StepRequest(state_json=begun.state_json, calls_json=CALL), 5.0, "{}"))
                await environment.aclose()
