"""Sessions of OpenEnv's servers, over real WebSocket: a server with the messages of openenv 0.10.

OpenEnv's own server: test_openenv_example.py.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import pytest_asyncio
from structlog.testing import capture_logs
from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.datastructures import Headers
from websockets.http11 import Request, Response

from gspo.common.config.reward import EnvironmentConfig
from gspo.generation.rollout.in_flight import InFlightRollout
from gspo_proto import rollout_pb2
from gspo_proto.rollout_pb2 import Rollout
from tests.support.environments.scripted_game import (
    LINES,
    LinesEngine,
    driver_of,
    game,
    in_flight_of,
    on_server,
    played,
)

pytestmark = [pytest.mark.asyncio(loop_scope="function"), pytest.mark.timeout(60)]


class OpenEnvGame:
    """The game behind /ws: a session for each connection.

    Attributes:
        num_sessions: Connections that have a place now.
        cuts: Connections that are cut at their second step.
        replies: Sent in place of the next answers to steps.
        num_steps: That of all sessions.
        drifts: The second session says something else to its first step.
    """

    def __init__(self, places: int) -> None:
        self.places, self.num_sessions, self.cuts = places, 0, 0
        self.replies: list[Any] = []
        self.tasks: list[dict[str, Any]] = []
        self.num_steps, self.drifts = 0, False

    async def play(self, connection: ServerConnection) -> None:
        assert connection.request is not None
        assert connection.request.path == "/ws"
        if self.num_sessions >= self.places:
            await self._send(connection, "error", {"message": "at capacity", "code": "CAPACITY_REACHED"})
            return
        self.num_sessions += 1
        try:
            await self._session(connection)
        finally:
            self.num_sessions -= 1

    async def _session(self, connection: ServerConnection) -> None:
        state, steps = {}, 0
        async for text in connection:
            message = json.loads(text)
            if message["type"] == "reset":
                self.tasks.append(message["data"])
                state, observed = game().reset(message["data"])
                await self._observe(connection, observed, None, done=False)
                continue
            steps, self.num_steps = steps + 1, self.num_steps + 1
            if steps == 2 and self.cuts:
                self.cuts -= 1
                connection.transport.abort()
            elif self.replies:
                await connection.send(self.replies.pop(0))
            else:
                state, observed, reward, done = game().step(state, message["data"]["guess"])
                if self.drifts and steps == 1 and len(self.tasks) == 2:
                    observed = "maybe"
                await self._observe(connection, observed, reward, done=done)

    async def _observe(self, connection: ServerConnection, observed: str, reward: float | None, *, done: bool) -> None:
        observation = {"said": observed, "metadata": {}}
        await self._send(connection, "observation", {"observation": observation, "reward": reward, "done": done})

    async def _send(self, connection: ServerConnection, message_type: str, data: dict[str, Any]) -> None:
        await connection.send(json.dumps({"type": message_type, "data": data}))


@asynccontextmanager
async def serving(game_server: OpenEnvGame, port: int = 0) -> AsyncIterator[Server]:
    async with serve(game_server.play, "127.0.0.1", port) as server:
        yield server


@pytest.fixture
def openenv() -> OpenEnvGame:
    return OpenEnvGame(places=2)


@pytest_asyncio.fixture(loop_scope="function")
async def config(openenv: OpenEnvGame) -> AsyncIterator[EnvironmentConfig]:
    async with serving(openenv) as server:
        port = next(iter(server.sockets)).getsockname()[1]
        yield EnvironmentConfig(
            url=f"http://127.0.0.1:{port}",
            protocol="openenv",
            name="game",
            action_field="guess",
            observation_field="said",
            reach_timeout_s=2.0,
        )


async def ended(openenv: OpenEnvGame) -> bool:
    """Whether every session ends within a while."""
    for _ in range(200):
        if not openenv.num_sessions:
            return True
        await asyncio.sleep(0.01)
    return False


async def test_rollouts_are_the_same_as_with_a_function_and_wait_for_a_place(
    openenv: OpenEnvGame, config: EnvironmentConfig
) -> None:
    as_function = await played(driver_of(None, LinesEngine()), in_flight_of())
    async with on_server(config) as remotes:
        driver = driver_of(remotes, LinesEngine(turn_s=0.02))
        rollouts = await asyncio.gather(*(played(driver, in_flight_of(number)) for number in range(5)))
        assert await ended(openenv)
    for rollout in rollouts:
        assert rollout.token_ids == as_function.token_ids
        assert rollout.episode.reward == as_function.episode.reward == 1 - 3 / 16
        assert rollout.outcome == rollout_pb2.OUTCOME_ENVIRONMENT_DONE
    assert {task["number"] for task in openenv.tasks} == {20}
    assert len({task["episode_id"] for task in openenv.tasks}) == 5


async def test_a_connection_that_is_cut_costs_an_attempt(openenv: OpenEnvGame, config: EnvironmentConfig) -> None:
    openenv.cuts = 1
    async with on_server(config) as remotes:
        rollout = in_flight_of()
        finished = await played(driver_of(remotes, LinesEngine()), rollout)
        assert (rollout.num_lost, finished.episode.reward) == (1, 1 - 3 / 16)
        assert await ended(openenv)


@pytest.mark.parametrize(
    ("reply", "kind", "text"),
    [
        ('{"type": "error", "data": {"message": "no", "code": "EXECUTION_ERROR"}}', "exception", "EXECUTION_ERROR"),
        ('{"type": "state", "data": {}}', "invalid_return", "neither an observation nor an error"),
        ("[", "invalid_return", "something else than JSON"),
        (b"\xff\xfe", "invalid_return", "something else than JSON"),
        (
            '{"type": "observation", "data": {"observation": {"a": 1}, "done": false}}',
            "invalid_return",
            "the field said",
        ),
        ('"' + "a" * 2**21 + '"', "output_too_large", "more than 1048576 bytes"),
    ],
)
async def test_a_hostile_message_fails_the_rollout_with_its_cause(
    openenv: OpenEnvGame, config: EnvironmentConfig, reply: str | bytes, kind: str, text: str
) -> None:
    openenv.replies = [reply]
    async with on_server(config) as remotes:
        rollout = await played(driver_of(remotes, LinesEngine()), in_flight_of())
        assert await ended(openenv)
    assert rollout.episode.failure_kind == kind
    assert text in rollout.episode.failure


@pytest.mark.parametrize("target", ["ws://127.0.0.1:{port}/inside", "http://[::1", "ws://a:99999/", "//x", ""])
async def test_a_redirect_is_a_failed_rollout_and_is_not_followed(config: EnvironmentConfig, target: str) -> None:
    visits = list[str]()

    async def redirect(connection: ServerConnection, request: Request) -> Response:
        visits.append(request.path)
        location = target.format(port=connection.local_address[1])
        return Response(302, "Found", Headers({"location": location, "content-length": "0", "connection": "close"}))

    async with serve(OpenEnvGame(1).play, "127.0.0.1", 0, process_request=redirect) as server:
        moved_away = config.model_copy(
            update={"url": f"http://127.0.0.1:{next(iter(server.sockets)).getsockname()[1]}"}
        )
        async with on_server(moved_away) as remotes:
            rollout = await played(driver_of(remotes, LinesEngine()), in_flight_of())
    assert rollout.episode.failure_kind == "exception"
    assert "answered HTTP 302, and a redirect is not followed" in rollout.episode.failure
    assert visits == ["/ws"]


async def test_without_a_field_the_policy_sees_the_whole_observation(config: EnvironmentConfig) -> None:
    async with on_server(config.model_copy(update={"observation_field": None})) as remotes:
        rollout = await played(driver_of(remotes, LinesEngine(("8", "20"))), in_flight_of())
    assert json.loads(rollout.episode.turns_json)[1]["content"] == '{"said": "higher"}'


async def moved(openenv: OpenEnvGame, config: EnvironmentConfig) -> tuple[InFlightRollout, Rollout]:
    """A rollout that another generator finishes, whose first one dies after two turns."""
    async with on_server(config) as dying, on_server(config) as living:
        rollout, first = in_flight_of(), driver_of(dying, LinesEngine(turn_s=0.2))
        driving = asyncio.create_task(first.drive(rollout))
        while rollout.state.num_turns < 2:
            await asyncio.sleep(0.01)
        saved = rollout.state.SerializeToString()
        driving.cancel()
        await asyncio.gather(driving, return_exceptions=True)
        first.hand_over(rollout, None)
        assert await ended(openenv), "its connection cannot be handed over"
        second = in_flight_of(saved=saved)
        finished = await played(driver_of(living, LinesEngine()), second)
        assert await ended(openenv)
    return second, finished


async def test_another_generator_begins_anew(openenv: OpenEnvGame, config: EnvironmentConfig) -> None:
    rollout, finished = await moved(openenv, config)
    assert (rollout.num_lost, finished.episode.reward) == (1, 1 - 3 / 16)


async def test_another_generator_replays_a_deterministic_session(
    openenv: OpenEnvGame, config: EnvironmentConfig
) -> None:
    as_function = await played(driver_of(None, LinesEngine()), in_flight_of())
    rollout, finished = await moved(openenv, config.model_copy(update={"replay": True}))
    assert (rollout.num_lost, finished.episode.reward) == (0, 1 - 3 / 16)
    assert finished.token_ids == as_function.token_ids
    assert openenv.num_steps > len(LINES), "no step was asked for again"
    assert len({task["episode_id"] for task in openenv.tasks}) == 2


async def test_a_replay_with_other_answers_begins_anew(openenv: OpenEnvGame, config: EnvironmentConfig) -> None:
    openenv.drifts = True
    with capture_logs() as log:
        rollout, finished = await moved(openenv, config.model_copy(update={"replay": True}))
    assert (rollout.num_lost, finished.episode.reward) == (1, 1 - 3 / 16)
    (line,) = [line for line in log if line["event"] == "replay_differs"]
    assert "step 1 of a replay" in line["detail"]
    assert line["detail"].endswith("environment.replay should be false")


async def test_a_connection_that_is_cut_costs_nothing_with_replay(
    openenv: OpenEnvGame, config: EnvironmentConfig
) -> None:
    openenv.cuts = 1
    async with on_server(config.model_copy(update={"replay": True})) as remotes:
        rollout = in_flight_of()
        finished = await played(driver_of(remotes, LinesEngine()), rollout)
        assert (rollout.num_lost, finished.episode.reward) == (0, 1 - 3 / 16)
        assert await ended(openenv)
