"""Environments on servers, over real HTTP: the same game as a function, and every way in which a server can fail.

The engine is scripted: it says the test's lines, so that the rollouts of two environments can be compared.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Iterator
from typing import Any, cast

import pytest

from gspo.common.config.engines import GenerationConfig
from gspo.common.config.reward import EnvironmentConfig
from gspo.environments.server_environment import ServerEnvironment
from gspo.generation.engine import api
from gspo.generation.engine.api import EngineLike
from gspo.generation.rollout.driver import RolloutDriver
from gspo.generation.rollout.episodes import Episodes
from gspo_proto import rollout_pb2
from gspo_proto.reward_pb2 import ResetRequest, StepRequest
from tests.support.environments.game_server import BODIES, EnvironmentServer, environment_server
from tests.support.environments.scripted_game import (
    LINES,
    NUMBER,
    TOKENIZER,
    GameFunction,
    LinesEngine,
    driver_of,
    in_flight_of,
    on_server,
    played,
)

pytestmark = [pytest.mark.asyncio(loop_scope="function"), pytest.mark.timeout(180)]


@pytest.fixture
def server() -> Iterator[EnvironmentServer]:
    with environment_server() as running:
        yield running


def config_of(server: EnvironmentServer, **keys: Any) -> EnvironmentConfig:
    return EnvironmentConfig(**{"url": server.url, "name": "game", "reach_timeout_s": 3.0, **keys})


async def num_left(server: EnvironmentServer, expected: int = 0, within_s: float = 5.0) -> int:
    """Sessions on the server, once they are as many as expected, or after a while."""
    deadline = time.monotonic() + within_s
    while (num := await asyncio.to_thread(server.count)) != expected and time.monotonic() < deadline:
        await asyncio.sleep(0.02)
    return num


async def nobody_goes_on() -> bool:
    return False


async def test_a_rollout_is_the_same_as_with_the_environment_as_a_function(server: EnvironmentServer) -> None:
    as_function = await played(driver_of(None, LinesEngine()), in_flight_of())
    async with on_server(config_of(server)) as remotes:
        by_server = await played(driver_of(remotes, LinesEngine()), in_flight_of())
        assert await num_left(server) == 0
    assert as_function.outcome == rollout_pb2.OUTCOME_ENVIRONMENT_DONE
    assert as_function.episode.reward == by_server.episode.reward == 1 - 3 / 16
    for rollout in (as_function, by_server):
        for field in ("state_json", "started_unix_s", "finished_unix_s"):
            rollout.ClearField(field)
        rollout.episode.ClearField("version")
    assert by_server == as_function


async def test_another_generator_goes_on_with_the_session(server: EnvironmentServer) -> None:
    whole = await played(driver_of(None, LinesEngine()), in_flight_of())
    async with on_server(config_of(server)) as dying, on_server(config_of(server)) as living:
        rollout = in_flight_of()
        first = driver_of(dying, LinesEngine(turn_s=0.3))
        driving = asyncio.create_task(first.drive(rollout))
        while rollout.state.num_turns < 3:
            await asyncio.sleep(0.01)
        saved = rollout.snapshot(api.Tokens([], [], []), 1).SerializeToString()
        driving.cancel()
        await asyncio.gather(driving, return_exceptions=True)
        first.hand_over(rollout, None)
        continued = await played(driver_of(living, LinesEngine()), in_flight_of(saved=saved))
        assert (continued.token_ids, continued.episode.reward) == (whole.token_ids, whole.episode.reward)
        assert json.loads(continued.state_json)["episode_id"] == json.loads(rollout.state.state_json)["episode_id"]
        assert await num_left(server) == 0


async def test_a_session_that_went_further_than_the_save_is_not_continued(server: EnvironmentServer) -> None:
    async with on_server(config_of(server)) as dying, on_server(config_of(server)) as living:
        rollout = in_flight_of()
        first = driver_of(dying, LinesEngine(turn_s=0.2))
        driving = asyncio.create_task(first.drive(rollout))
        while rollout.state.num_turns < 2:
            await asyncio.sleep(0.01)
        saved = rollout.snapshot(api.Tokens([], [], []), 1).SerializeToString()
        while rollout.state.num_turns < 3:
            await asyncio.sleep(0.01)
        driving.cancel()
        await asyncio.gather(driving, return_exceptions=True)
        first.hand_over(rollout, None)
        engine, second = LinesEngine(), in_flight_of(saved=saved)
        continued = await played(driver_of(living, engine), second)
        assert (second.num_lost, engine.num_requests) == (1, len(LINES))
        assert continued.episode.reward == 1 - 3 / 16
        assert await num_left(server) == 0


async def test_a_full_server_is_waited_for() -> None:
    with environment_server(places=2) as server:
        async with on_server(config_of(server)) as remotes:
            driver = driver_of(remotes, LinesEngine(turn_s=0.02))
            rollouts = await asyncio.gather(*(played(driver, in_flight_of(number)) for number in range(6)))
            assert {rollout.outcome for rollout in rollouts} == {rollout_pb2.OUTCOME_ENVIRONMENT_DONE}
            assert await num_left(server) == 0


async def test_a_full_server_is_not_waited_for_without_end() -> None:
    with environment_server(places=0) as server:
        async with on_server(config_of(server, total_timeout_s=1.5)) as remotes:
            began_s = time.monotonic()
            rollout = await played(driver_of(remotes, LinesEngine()), in_flight_of())
            assert time.monotonic() - began_s < 4
    assert (rollout.episode.failure_kind, len(rollout.token_ids)) == ("environment_full", 0)
    assert "environment_full for 1.5 s (environment.total_timeout_s)" in rollout.episode.failure


async def test_a_server_that_is_killed_and_comes_back_costs_an_attempt(server: EnvironmentServer) -> None:
    async with on_server(config_of(server)) as remotes:
        rollout = in_flight_of()
        driving = asyncio.create_task(played(driver_of(remotes, LinesEngine(turn_s=0.2)), rollout))
        while rollout.state.num_turns < 3:
            await asyncio.sleep(0.01)
        server.kill()
        await asyncio.sleep(0.5)
        await asyncio.to_thread(server.start)
        finished = await driving
        assert rollout.num_lost == 1
        assert finished.episode.reward == 1 - 3 / 16
        assert finished.num_turns == len(LINES)
        assert await num_left(server) == 0


async def test_a_dead_server_fails_every_attempt_within_its_limit(server: EnvironmentServer) -> None:
    async with on_server(config_of(server, reach_timeout_s=0.5)) as remotes:
        rollout = in_flight_of()
        driving = asyncio.create_task(played(driver_of(remotes, LinesEngine(turn_s=0.1), max_attempts=2), rollout))
        while rollout.state.num_turns < 2:
            await asyncio.sleep(0.01)
        server.kill()
        began_s = time.monotonic()
        finished = await driving
        assert time.monotonic() - began_s < 3
    assert finished.outcome == rollout_pb2.OUTCOME_ENVIRONMENT_FAILED
    assert finished.episode.failure_kind == "environment_unreachable"
    assert "environment_unreachable for 0.5 s (environment.reach_timeout_s)" in finished.episode.failure
    assert (rollout.num_lost, finished.episode.reward) == (1, 0.0)


async def test_a_slow_server_ends_the_rollout_by_the_step_limit(server: EnvironmentServer) -> None:
    async with on_server(config_of(server)) as remotes:
        server.break_answers(hang_s=30)
        rollout = await played(driver_of(remotes, LinesEngine()), in_flight_of(step_timeout_s=0.3))
        assert await num_left(server) == 0
    assert rollout.outcome == rollout_pb2.OUTCOME_STEP_TIME_LIMIT
    assert (rollout.episode.failure_kind, rollout.num_turns) == ("timeout", 1)


async def test_a_server_that_stands_still_ends_the_rollout_by_its_time_limit(server: EnvironmentServer) -> None:
    async with on_server(config_of(server)) as remotes:
        rollout = in_flight_of(total_timeout_s=0.6, step_timeout_s=60.0)
        driving = asyncio.create_task(played(driver_of(remotes, LinesEngine(turn_s=0.1)), rollout))
        while rollout.state.num_turns < 2:
            await asyncio.sleep(0.01)
        server.pause()
        finished = await driving
    assert finished.outcome == rollout_pb2.OUTCOME_TIME_LIMIT


@pytest.mark.parametrize(
    ("hostile", "kind", "text"),
    [
        ("not_json", "invalid_return", "something else than JSON"),
        ("nan_reward", "invalid_return", "something else than JSON"),
        ("no_done", "invalid_return", "a done that is neither true nor false: null"),
        ("number", "invalid_return", "neither text nor a list of messages"),
        ("oversized", "output_too_large", "more than 1048576 bytes"),
        ("deep", "invalid_return", "something else than JSON"),
    ],
)
async def test_a_hostile_reply_fails_the_rollout_with_its_cause(
    server: EnvironmentServer, hostile: str, kind: str, text: str
) -> None:
    assert hostile in BODIES
    async with on_server(config_of(server)) as remotes:
        server.break_answers(hostile=hostile)
        rollout = await played(driver_of(remotes, LinesEngine()), in_flight_of())
        assert await num_left(server) == 0
    assert rollout.outcome == rollout_pb2.OUTCOME_ENVIRONMENT_FAILED
    assert (rollout.episode.failure_kind, rollout.episode.reward) == (kind, 0.0)
    assert text in rollout.episode.failure


async def test_lost_answers_count_no_step_twice(server: EnvironmentServer) -> None:
    async with on_server(config_of(server, reach_timeout_s=30.0)) as remotes:
        server.break_answers(lose=0.3)
        driver = driver_of(remotes, LinesEngine())
        in_flight = [in_flight_of(number) for number in range(20)]
        rollouts = await asyncio.gather(*(played(driver, rollout) for rollout in in_flight))
        assert {rollout.num_lost for rollout in in_flight} == {0}
        assert {rollout.episode.reward for rollout in rollouts} == {1 - 3 / 16}
        assert {rollout.num_turns for rollout in rollouts} == {len(LINES)}
        assert await num_left(server) == 0
        assert server.count("requests") > 20 * (2 + len(LINES))


async def test_pings_keep_a_session_while_the_policy_writes() -> None:
    with environment_server(ttl_s=0.6) as server:
        async with on_server(config_of(server, ping_every_s=0.2)) as remotes:
            rollout = in_flight_of()
            finished = await played(driver_of(remotes, LinesEngine(("8", "20"), turn_s=1.5)), rollout)
            assert (finished.episode.reward, rollout.num_lost) == (1 - 1 / 16, 0)


async def test_a_cancelled_rollout_closes_its_session_if_nobody_goes_on(server: EnvironmentServer) -> None:
    async with on_server(config_of(server)) as remotes:
        driver, rollout = driver_of(remotes, LinesEngine(turn_s=0.2)), in_flight_of()
        driving = asyncio.create_task(driver.drive(rollout))
        while rollout.state.num_turns < 2:
            await asyncio.sleep(0.01)
        assert server.count() == 1
        driving.cancel()
        await asyncio.gather(driving, return_exceptions=True)
        driver.hand_over(rollout, nobody_goes_on)
        assert await num_left(server) == 0


async def test_an_update_that_restarts_rollouts_begins_another_session(server: EnvironmentServer) -> None:
    async with on_server(config_of(server)) as remotes:
        engine, rollout = LinesEngine(turn_s=0.1), in_flight_of()
        episodes = Episodes(GameFunction(), TOKENIZER, remotes, 3)
        driver = RolloutDriver(cast("EngineLike", engine), TOKENIZER, GenerationConfig(on_update="restart"), episodes)
        driving = asyncio.create_task(played(driver, rollout))
        while rollout.state.num_turns < 3:
            await asyncio.sleep(0.01)
        engine.version = 4
        finished = await driving
        assert finished.episode.reward == 1 - 3 / 16
        assert {version for version in finished.version if version >= 0} == {4}
        assert await num_left(server) == 0


async def test_the_key_of_the_environment_is_sent(server: EnvironmentServer, monkeypatch: pytest.MonkeyPatch) -> None:
    server.break_answers(key="secret")
    async with on_server(config_of(server)) as remotes:
        refused = await played(driver_of(remotes, LinesEngine()), in_flight_of())
    assert refused.episode.failure_kind == "forbidden"
    assert "GSPO_ENVIRONMENT_API_KEY" in refused.episode.failure
    monkeypatch.setenv("GSPO_ENVIRONMENT_API_KEY", "secret")
    async with on_server(config_of(server)) as remotes:
        rollout = await played(driver_of(remotes, LinesEngine()), in_flight_of())
    assert rollout.outcome == rollout_pb2.OUTCOME_ENVIRONMENT_DONE


@pytest.mark.long
@pytest.mark.timeout(900)
async def test_ten_thousand_sessions_with_cuts_leave_nothing() -> None:
    """Sessions alone, without an engine: some are cut off in a request, some handed over and never taken."""
    num_sessions, num_together, ttl_s = 10_000, 64, 3.0
    draw, counts = random.Random(0), dict.fromkeys(("done", "cut", "left", "failed"), 0)  # noqa: S311
    task = ResetRequest(task_json=json.dumps({"prompt": "Guess", "number": NUMBER}))
    numbers = iter(range(num_sessions))
    with environment_server(places=100, ttl_s=ttl_s) as server:
        server.break_answers(lose=0.02)
        environment = ServerEnvironment(config_of(server, reach_timeout_s=20.0))

        async def session(fate: float) -> str:
            state_json = ""
            try:
                state_json = (await environment.begin(task, 10.0)).state_json
                if not state_json:
                    return "failed"
                reply = await environment.step(StepRequest(state_json=state_json, action="8"), 10.0, task.task_json)
            except asyncio.CancelledError:
                if state_json:
                    environment.hand_over(state_json, nobody_goes_on)
                raise
            if 0.94 < fate < 0.95:  # its generator dies
                environment.hand_over(state_json)
                return "left"
            environment.end(state_json)
            return "failed" if reply.HasField("failure") else "done"

        async def some() -> None:
            for _ in numbers:  # the same iterator for all
                fate = draw.random()
                work = asyncio.create_task(session(fate))
                if fate > 0.95:
                    await asyncio.wait([work], timeout=draw.uniform(0, 0.05))
                    work.cancel()
                try:
                    counts[await work] += 1
                except asyncio.CancelledError:
                    counts["cut"] += 1

        await asyncio.gather(*(some() for _ in range(num_together)))
        await environment.aclose()
        server.break_answers()
        assert server.count() < 100, "no more than those whose generators died"
        await asyncio.sleep(ttl_s + 0.2)
        server.end_silent_sessions()
        assert sum(counts.values()) == num_sessions
        assert min(counts["done"], counts["cut"], counts["left"]) > 10
        assert server.count() == 0
