"""The coordinator as a process, from the first evaluation to Finished: evaluations, the HTTP API, stops and ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis

from gspo.common.streams.events import FROM_START, Events
from gspo.common.streams.inbox import append
from gspo.common.streams.keys import Keys
from gspo_proto.rollout_pb2 import (
    RUN_END_COMPLETED,
    RUN_END_FAILED,
    RUN_END_STOPPED,
    Event,
    Finished,
    FirstAnswers,
    Rollout,
    Score,
    Scored,
    ScoredRollout,
    ScoresDiffer,
    ScoringFails,
)
from tests.integration.coordinator.conftest import (
    CoordinatorProcess,
    Until,
    has_open,
    http_address,
    waits_for_a_learner,
)
from tests.integration.coordinator.peers import GeneratorPeer, LearnerPeer

pytestmark = pytest.mark.asyncio(loop_scope="function")
Configure = Callable[..., Path]
# Sampled answers of each prompt are worth 1 and 0, the greedy one 0.5.
REWARDS = {0: [1.0, 0.0], 1: [0.5]}
FIGURES = {
    "num_answers": 2.0,
    "num_failed": 0.0,
    "sampled_mean": 0.5,
    "greedy_mean": 0.5,
    "sampled_stderr": 0.0,
    "greedy_stderr": 0.0,
    "pass_at_1": 0.5,
    "pass_at_1_stderr": 0.0,
    "pass_at_2": 1.0,
    "pass_at_2_stderr": 0.0,
    "best_at_2": 1.0,
    "response_tokens_mean": 2.0,
    "truncated_share": 0.0,
    "eos_share": 1.0,
    "zero_spread_groups": 0.0,
    "greedy_response_tokens_mean": 2.0,
    "greedy_truncated_share": 0.0,
}


async def heard(redis: Redis, keys: Keys, kind: str) -> list[Any]:
    """The bodies of every event of a kind so far."""
    events = await Events(redis, keys, "test").read(FROM_START, block_s=0.01)
    return [getattr(event, kind) for _, event in events if event.WhichOneof("what") == kind]


def hears(redis: Redis, keys: Keys, kind: str, count: int = 1) -> Callable[[], Any]:
    async def enough() -> bool:
        return len(await heard(redis, keys, kind)) >= count

    return enough


def answers(generator: GeneratorPeer, tasks: list[Any], redis: Redis, keys: Keys, count: int) -> Callable[[], Any]:
    """Answers evaluation tasks, which it adds to `tasks`, until `count` evaluations are done."""

    async def done() -> bool:
        tasks.extend(await generator.answer(REWARDS))
        return len(await heard(redis, keys, "evaluation_done")) >= count

    return done


async def test_measured_before_between_and_after(
    redis: Redis,
    keys: Keys,
    configure: Configure,
    coordinator: CoordinatorProcess,
    learner: LearnerPeer,
    generator: GeneratorPeer,
    until: Until,
) -> None:
    run_dir = configure(held_out=3, evaluation={"limit_between": 1, "every": 2})
    coordinator.start(run_dir)
    tasks: list[Any] = []

    async def all_asked() -> bool:
        return await redis.xlen(keys.eval_prompts) == 6

    await until(all_asked, "the evaluation's tasks")
    assert await redis.xlen(keys.prompts) == 0  # training groups wait for it
    await until(answers(generator, tasks, redis, keys, 1), "the first evaluation")
    first = (await heard(redis, keys, "evaluation_done"))[0]
    assert (first.evaluation, first.version, first.step) == ("v0", 0, 0)
    assert dict(first.figures) == FIGURES | {"num_prompts": 3.0}
    kinds = sorted((task.group, task.num_rollouts, task.sampling.temperature) for task in tasks)
    assert kinds == [(0, 2, 1.0), (1, 1, 0.0), (2, 2, 1.0), (3, 1, 0.0), (4, 2, 1.0), (5, 1, 0.0)]
    assert {task.evaluation for task in tasks} == {"v0"}

    await until(has_open(redis, keys), "training groups after the evaluation")
    rewards = {"reward_mean": 0.0, "reward_min": 0.0, "reward_max": 0.0, "response_tokens_mean": 2.0}
    first = Event(first_answers=FirstAnswers(figures={"groups": 2.0, "zero_spread_groups": 1.0, **rewards}))
    for _ in range(2):  # a learner that starts again before step 1 is trained tells them again
        await Events(redis, keys, "learner-0").send(first)
    checks = run_dir / "log" / "checks.jsonl"

    async def is_judged() -> bool:
        return checks.exists() and '"first_answers"' in checks.read_text()

    await until(is_judged, "the verdict on the first answers, before any step is trained")
    for groups in ([0, 1], [2, 3]):
        await learner.live(await learner.trained(groups))
    await until(answers(generator, tasks, redis, keys, 2), "the evaluation after step 2")
    between = (await heard(redis, keys, "evaluation_done"))[1]
    assert (between.evaluation, between.version, between.step) == ("v2", 2, 2)
    assert between.figures["num_prompts"] == 1.0
    assert not between.HasField("score")
    assert {task.min_version for task in tasks if task.evaluation == "v2"} == {2}

    differ = ScoresDiffer(function="judge", num_differing=3, num_answers=16, first=0.25, again=0.75)
    await Events(redis, keys, "reward-0").send(Event(scores_differ=differ))
    await learner.training_done("2 steps are done")
    await until(answers(generator, tasks, redis, keys, 3), "the last evaluation")
    last = (await heard(redis, keys, "evaluation_done"))[2]
    assert (last.evaluation, last.figures["num_prompts"]) == ("v2", 3.0)
    await until(hears(redis, keys, "finished"), "Finished")
    (finished,) = await heard(redis, keys, "finished")
    assert (finished.reason, finished.end) == ("2 steps are done", RUN_END_COMPLETED)
    assert await coordinator.exit_code() == 0
    check, of_scores = checks.read_text().splitlines()
    assert '"first_answers"' in check and "every answer gets 0" in check
    assert '"scores_differ"' in of_scores and "3 of 16 answers got another value of judge" in of_scores
    assert await redis.hlen(keys.partial) == 0
    assert await redis.xlen(keys.eval_prompts) == 0
    assert await redis.xlen(keys.eval_scored) == 0


async def test_several_files_are_measured_one_by_one_and_the_best_is_scored_on_equal_prompts(
    redis: Redis,
    keys: Keys,
    configure: Configure,
    coordinator: CoordinatorProcess,
    learner: LearnerPeer,
    generator: GeneratorPeer,
    until: Until,
) -> None:
    files = {"easy": "easy.jsonl", "hard": "hard.jsonl"}
    evaluation = {"prompts": files, "num_answers": 2, "limit_between": 1, "every": 1, "keep_best": "hard/best_at_2"}
    run_dir = configure(evaluation=evaluation)
    (run_dir / "easy.jsonl").write_text('{"prompt": "1+2="}\n')
    (run_dir / "hard.jsonl").write_text('{"prompt": "9+9="}\n{"prompt": "8+9="}\n')
    coordinator.start(run_dir)
    tasks: list[Any] = []
    await until(answers(generator, tasks, redis, keys, 2), "both evaluations before training")
    easy, hard = await heard(redis, keys, "evaluation_done")
    assert [(e.evaluation, e.file, e.figures["num_prompts"]) for e in (easy, hard)] == [
        ("v0/easy", "easy", 1.0),
        ("v0/hard", "hard", 2.0),
    ]
    assert not easy.HasField("score")
    assert hard.score == 1.0

    await until(has_open(redis, keys), "training groups after both")
    # A learner that died before it sent StepDone: its successor waits for the figures of version 1.
    await learner.trained([0, 1], silent=True)
    learner.progress.epoch = 2
    await learner.live(1)
    await until(answers(generator, tasks, redis, keys, 4), "the evaluation of the step without an event")
    again = (await heard(redis, keys, "evaluation_done"))[2:]
    assert [(e.evaluation, e.version, e.figures["num_prompts"]) for e in again] == [
        ("v1/easy", 1, 1.0),
        ("v1/hard", 1, 1.0),
    ]
    async with httpx.AsyncClient(base_url=await http_address(redis, keys)) as api:
        text = (await api.get("/metrics")).text
    assert 'gspo_evaluation_figure{figure="pass_at_2",file="hard"} 1.0' in text
    assert 'gspo_evaluation_version{file="easy"} 1.0' in text


@pytest.mark.parametrize(("live", "label"), [(2, "v2"), (3, "v3")], ids=["served again", "its weights are gone"])
async def test_an_evaluation_that_a_stop_ended_is_made_after_the_resume(
    redis: Redis,
    keys: Keys,
    configure: Configure,
    coordinator: CoordinatorProcess,
    learner: LearnerPeer,
    generator: GeneratorPeer,
    until: Until,
    live: int,
    label: str,
) -> None:
    learner.progress.step = learner.progress.version = 3
    learner.progress.live_version = -1
    learner.progress.evaluations.append("v0")
    coordinator.start(configure(held_out=3, evaluation={"every": 2}))
    await learner.live(live)
    await until(answers(generator, [], redis, keys, 1), "the evaluation")
    (measured,) = await heard(redis, keys, "evaluation_done")
    assert (measured.evaluation, measured.version) == (label, live)


async def test_an_evaluation_that_gets_no_answers_is_given_up_and_training_begins(
    redis: Redis,
    keys: Keys,
    configure: Configure,
    coordinator: CoordinatorProcess,
    learner: LearnerPeer,
    generator: GeneratorPeer,
    until: Until,
) -> None:
    coordinator.start(configure(held_out=2, evaluation={"timeout_s": 0.5}))

    async def given_up() -> bool:
        return bool(await heard(redis, keys, "evaluation_done"))

    await until(given_up, "the evaluation to be given up")
    (measured,) = await heard(redis, keys, "evaluation_done")
    assert dict(measured.figures) == {"num_prompts": 2.0, "num_answers": 2.0, "num_failed": 6.0}

    await until(has_open(redis, keys), "training groups")
    assert await redis.xlen(keys.eval_prompts) == 0
    async with httpx.AsyncClient(base_url=await http_address(redis, keys)) as api:
        (shown,) = (await api.get("/v1/state")).json()["evaluations"]
    assert shown["problem"] == "given up after 0.5 s (evaluation.timeout_s) with answers missing"


async def test_the_http_api_shows_pauses_and_stops_the_run(
    redis: Redis, keys: Keys, configure: Configure, coordinator: CoordinatorProcess, learner: LearnerPeer, until: Until
) -> None:
    run_dir = configure(held_out=1, services={"token_file": "token"}, run={"total_epochs": 0.5})
    (run_dir / "token").write_text("a-secret-of-tests\n")
    learner.progress.evaluations.append("v0")
    coordinator.start(run_dir)

    await until(has_open(redis, keys), "the first groups")
    url = await http_address(redis, keys)
    assert httpx.get(f"{url}/v1/state").status_code == 401
    assert httpx.post(f"{url}/v1/pause", json={}, headers={"Authorization": "Bearer wrong"}).status_code == 401
    async with httpx.AsyncClient(base_url=url, headers={"Authorization": "Bearer a-secret-of-tests"}) as api:
        assert (await api.get("/readyz")).json() == {"ready": True, "problems": {}}
        page = (await api.get("/docs")).text
        assert "swagger-ui-bundle.js" in page and "://" not in page, "it needs no internet"
        state = (await api.get("/v1/state")).json()
        assert (state["run"], state["step"], state["version"], state["live_version"]) == ("test", 0, 0, 0)
        assert state["slots"] == {"all": 4, "taken": 4, "free": 0, "trained": 0}
        assert state["groups"] == {"issued": 4, "open": 4}
        waits = (
            "slots: to be free: of 4, 4 hold open groups and 0 hold trained groups whose version no generator has yet"
        )
        assert state["waits_for"] == waits
        assert {instance["service"] for instance in state["members"]} == {"coordinator", "learner"}
        assert state["ended"] is None
        await _check_newest_rollouts(redis, keys, api)

        assert (await api.post("/v1/pause", json={})).json() == {"paused": True}

        async def paused() -> bool:
            return bool((await api.get("/v1/state")).json()["paused"])

        await until(paused, "the pause")
        await learner.filtered(0, 1)

        async def settled() -> bool:
            return bool((await api.get("/v1/state")).json()["groups"] == {"issued": 4, "open": 2, "filtered": 2})

        await until(settled, "the settlement")
        assert await redis.hlen(keys.open) == 2  # nothing new while paused
        assert (await api.post("/v1/resume", json={})).json() == {"paused": False}
        await _scoring_fails(redis, keys, api, until)
        await until(hears(redis, keys, "prompts_exhausted"), "half a pass of ten prompts to be issued")
        assert [event.num_groups for event in await heard(redis, keys, "prompts_exhausted")] == [5]
        assert await redis.hlen(keys.open) == 3

        assert (await api.post("/v1/stop", json={"reasons": "x"})).status_code == 422
        assert (await api.post("/v1/stop", json={"reason": "enough"})).status_code == 202
    await until(hears(redis, keys, "stop_requested"), "StopRequested")
    await learner.training_done("stopped: enough", RUN_END_STOPPED)
    await until(hears(redis, keys, "finished"), "Finished")
    assert (await heard(redis, keys, "finished"))[0].reason == "stopped: enough"
    assert await coordinator.exit_code() == 0
    assert await heard(redis, keys, "evaluation_done") == []  # nothing is measured after a stop
    assert await redis.hlen(keys.open) == 3  # a resumed run continues them


async def _scoring_fails(redis: Redis, keys: Keys, api: httpx.AsyncClient, until: Until) -> None:
    """A scorer's ScoringFails pauses the run with its reason, until a user resumes it."""
    await Events(redis, keys, "reward-0").send(Event(scoring_fails=ScoringFails(reason="75% failed: KeyError")))

    async def paused_with_its_reason() -> bool:
        state = (await api.get("/v1/state")).json()
        return bool(state["paused"]) and state["paused_because"] == "75% failed: KeyError"

    await until(paused_with_its_reason, "the pause with its reason")
    assert "issue is paused (75% failed: KeyError)" in (await api.get("/v1/state")).json()["waits_for"]
    assert (await api.post("/v1/resume", json={})).json() == {"paused": False}

    async def resumed() -> bool:
        state = (await api.get("/v1/state")).json()
        return not state["paused"] and state["paused_because"] == ""

    await until(resumed, "the run to continue")


async def _check_newest_rollouts(redis: Redis, keys: Keys, api: httpx.AsyncClient) -> None:
    arrays: dict[str, Any] = {
        "token_ids": [5, 6, 7],
        "version": [3, 4, -1],
        "mask": b"\x01\x01\x00",
        "logp": [-0.5, -0.25, 0.0],
    }
    rollout = Rollout(group=1, number=1, num_rollouts=2, text="42", **arrays)
    good = Scored(schema=1, rollout=ScoredRollout(rollout=rollout, score=Score(reward=0.0)))
    bad = Scored(schema=1, rollout=ScoredRollout(rollout=rollout, score=Score(failure="raised")))
    await append(redis, keys.scored, [good.SerializeToString(), bad.SerializeToString()])
    newest, older = (await api.get("/v1/rollouts", params={"limit": 5})).json()
    assert (newest["reward"], newest["failure"], older["reward"], older["failure"]) == (None, "raised", 0.0, None)
    assert (newest["text"], newest["version_first"], newest["version_last"], newest["num_tokens"]) == ("42", 3, 4, 2)
    await redis.xtrim(keys.scored, maxlen=0)
    assert len((await api.get("/v1/rollouts", params={"limit": 1})).json()) == 1  # kept for later readers


async def test_a_new_learner_learns_what_was_requested_before_its_start(
    redis: Redis,
    keys: Keys,
    configure: Configure,
    coordinator: CoordinatorProcess,
    learner: LearnerPeer,
    generator: GeneratorPeer,
    until: Until,
) -> None:
    learner.down = True
    coordinator.start(configure(held_out=1, run={"total_epochs": 0.4}))
    await until(answers(generator, [], redis, keys, 1), "the first evaluation")
    await until(hears(redis, keys, "prompts_exhausted"), "all four groups to be issued")
    learner.down, learner.progress.epoch = False, 2
    await learner.live(0)
    await until(hears(redis, keys, "prompts_exhausted", 2), "the new learner to get it")
    assert {event.num_groups for event in await heard(redis, keys, "prompts_exhausted")} == {4}
    await until(hears(redis, keys, "evaluation_done", 2), "the figures to be sent to the new learner")
    assert learner.progress.evaluations == ["v0"]


async def test_the_end_waits_until_the_last_evaluation_is_recorded(
    redis: Redis,
    keys: Keys,
    configure: Configure,
    coordinator: CoordinatorProcess,
    learner: LearnerPeer,
    generator: GeneratorPeer,
    until: Until,
) -> None:
    learner.progress.evaluations.append("v0")
    coordinator.start(configure(held_out=1))

    await until(has_open(redis, keys), "the first groups")
    await learner.live(await learner.trained([0, 1]))
    learner.down = True
    await learner.training_done("1 step is done")
    await until(answers(generator, [], redis, keys, 1), "the last evaluation")
    await asyncio.sleep(1.0)
    assert await heard(redis, keys, "finished") == []
    learner.down, learner.progress.epoch = False, 2
    # Its successor settles the groups issued in the meantime.
    await learner.filtered(*(int(group) for group in await redis.hkeys(keys.open)))
    await until(hears(redis, keys, "finished"), "Finished")
    assert learner.progress.evaluations == ["v0", "v1"]
    assert await coordinator.exit_code() == 0


async def test_a_learner_that_gives_up_ends_the_run(
    redis: Redis, keys: Keys, configure: Configure, coordinator: CoordinatorProcess, learner: LearnerPeer, until: Until
) -> None:
    coordinator.start(configure())

    await until(has_open(redis, keys), "the first groups")
    await learner.send(Event(finished=Finished(reason="every score failed", end=RUN_END_FAILED)))
    assert await coordinator.exit_code() == 0
    assert len(await heard(redis, keys, "finished")) == 1


async def test_a_run_that_fails_before_the_learner_is_ready_ends(
    redis: Redis, keys: Keys, configure: Configure, coordinator: CoordinatorProcess, until: Until
) -> None:
    coordinator.start(configure())

    await until(waits_for_a_learner(redis, keys), "the coordinator to wait for a learner")
    await Events(redis, keys, "learner-0").send(Event(finished=Finished(reason="no memory", end=RUN_END_FAILED)))
    assert await coordinator.exit_code() == 0


async def test_sigterm_ends_the_wait_for_a_learner_in_which_nothing_is_issued(
    redis: Redis, keys: Keys, configure: Configure, coordinator: CoordinatorProcess, until: Until
) -> None:
    process = coordinator.start(configure())

    await until(waits_for_a_learner(redis, keys), "the coordinator to wait for a learner")
    assert [await redis.xlen(stream) for stream in (keys.prompts, keys.eval_prompts)] == [0, 0]
    assert await redis.hlen(keys.open) == 0
    process.terminate()
    assert await coordinator.exit_code() == 0
    assert await heard(redis, keys, "finished") == []


async def test_one_evaluation_needs_no_learner(
    redis: Redis,
    keys: Keys,
    configure: Configure,
    coordinator: CoordinatorProcess,
    generator: GeneratorPeer,
    until: Until,
) -> None:
    coordinator.start(configure(held_out=2), "--evaluate")

    async def asked() -> bool:
        return await redis.xlen(keys.eval_prompts) == 4

    await until(asked, "the tasks")
    await redis.flushall()
    await until(answers(generator, [], redis, keys, 1), "the evaluation, with its tasks sent again after a wipe")
    await until(hears(redis, keys, "finished"), "Finished")
    (measured,) = await heard(redis, keys, "evaluation_done")
    assert (measured.evaluation, dict(measured.figures)) == ("v0", FIGURES | {"num_prompts": 2.0})
    (finished,) = await heard(redis, keys, "finished")
    assert (finished.reason, finished.end) == ("the evaluation is done", RUN_END_COMPLETED)
    assert await coordinator.exit_code() == 0
