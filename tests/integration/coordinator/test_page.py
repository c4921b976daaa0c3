"""The run's page at a real coordinator: in by a link, made by a process of its own."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import pytest_asyncio
from redis.asyncio import Redis

from gspo.common.streams.keys import Keys
from gspo.coordinator.page.page_api import MAX_QUERIES
from gspo.learner.assembly.rows import row_from_scored
from gspo.learner.storage.step_log import StepLog
from tests.integration.coordinator.conftest import CoordinatorProcess, Until, http_address
from tests.integration.coordinator.peers import LearnerPeer
from tests.unit.learner.conftest import _scored

pytestmark = pytest.mark.asyncio(loop_scope="function")
BEARER = {"authorization": "Bearer a-secret-of-tests"}
_ANSWER_S = 120.0
Configure = Callable[..., Path]


@pytest.fixture
def keys() -> Keys:
    return Keys("test")


@pytest_asyncio.fixture(loop_scope="function")
async def url(
    redis: Redis, keys: Keys, configure: Configure, coordinator: CoordinatorProcess, learner: LearnerPeer, until: Until
) -> str:
    """Address of a coordinator with a token, whose log has two steps of long answers."""
    run_dir = configure(services={"token_file": "token"})
    (run_dir / "token").write_text("a-secret-of-tests\n")
    (run_dir / "environment.json").write_text("{}")
    (run_dir / "log").mkdir()
    log = StepLog(run_dir / "log")
    for step in (1, 2):
        row = replace(row_from_scored(_scored(step, 0)), step=step, text="<b>answer</b> " * 2000)
        log.write(step, [replace(row, number=number) for number in range(256)])
    coordinator.start(run_dir, "--resume")

    async def answers() -> bool:
        try:
            return (await asyncio.to_thread(httpx.get, f"{await http_address(redis, keys)}/healthz")).is_success
        except (httpx.HTTPError, ValueError):
            return False

    await until(answers, "the coordinator")
    return await http_address(redis, keys)


def page_processes(coordinator: CoordinatorProcess) -> list[psutil.Process]:
    assert coordinator.process is not None
    children = psutil.Process(coordinator.process.pid).children(recursive=True)
    return [child for child in children if "view" in child.cmdline()]


async def test_a_link_opens_the_page_and_a_view_can_be_opened(url: str, coordinator: CoordinatorProcess) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=_ANSWER_S) as reader, httpx.AsyncClient(base_url=url) as script:
        assert (await reader.get("/rollouts")).status_code == 401
        assert page_processes(coordinator) == [], "nobody has been let in"
        link = (await script.post("/v1/page/link", json={}, headers=BEARER)).json()["path"]
        assert (await reader.get(link)).status_code == 200
        page = await reader.get("/rollouts?step=2")
        assert "256 rollouts" in page.text
        assert "&lt;b&gt;answer" in page.text and "<b>answer" not in page.text
        assert page.headers["content-security-policy"].startswith("default-src 'none'; style-src 'self'")
        assert (await reader.get("/style.css")).headers["content-type"].startswith("text/css")
        assert (await reader.get("/v1/state")).status_code == 401, "the cookie is for the page alone"
        async with reader.stream("GET", "/api/changes") as stream:
            lines = stream.aiter_lines()
            assert await anext(lines) == ": follows the log"
            body = {"path": "/steps/2/groups/2", "note": "look"}
            assert (await script.post("/api/view", json=body)).status_code == 401
            answer = await script.post("/api/view", json=body, headers=BEARER, timeout=_ANSWER_S)
            assert answer.json() == {"opened": "/steps/2/groups/2", "browsers": 1}
            async with asyncio.timeout(_ANSWER_S):
                while not (line := await anext(lines)).startswith("data: {"):
                    pass
            assert json.loads(line.removeprefix("data: ")) == {"path": "/steps/2/groups/2", "note": "look"}
        foreign = {"origin": "http://attacker.example"}
        assert (await reader.post("/api/view", json=body, headers=foreign)).status_code == 403
        assert (await reader.get("/", headers={"host": "attacker.example"})).status_code == 421
    (process,) = page_processes(coordinator)
    coordinator.kill()
    await asyncio.to_thread(process.wait, 30)  # it ends with the coordinator, however that ends


async def test_the_coordinator_answers_under_heavy_questions(url: str, coordinator: CoordinatorProcess) -> None:
    async with httpx.AsyncClient(base_url=url, headers=BEARER, timeout=_ANSWER_S) as client:
        assert (await client.get("/rollouts")).status_code == 200
        questions = [{"q": f"answer{number}", "sort": "length"} for number in range(4 * MAX_QUERIES)]
        asked = [asyncio.create_task(client.get("/rollouts", params=question)) for question in questions]
        num_waiting = 0
        while not all(task.done() for task in asked):
            assert (await client.get("/v1/state")).status_code == 200
            assert (await client.get("/healthz")).status_code == 200
            num_waiting = max(num_waiting, sum(not task.done() for task in asked))
        statuses = {task.result().status_code for task in asked}
    assert num_waiting > MAX_QUERIES, "the API answered while questions waited for others"
    assert statuses <= {200, 503}
    assert len(page_processes(coordinator)) == 1


async def test_a_page_that_cannot_start_says_why(url: str, coordinator: CoordinatorProcess, tmp_path: Path) -> None:
    (tmp_path / "environment.json").unlink()
    async with httpx.AsyncClient(base_url=url, headers=BEARER, timeout=_ANSWER_S) as client:
        answer = await client.get("/")
        assert answer.status_code == 502
        assert "is not a run directory" in " ".join(answer.text.split())
        (tmp_path / "environment.json").write_text("{}")
        assert (await client.get("/rollouts")).status_code == 200, "the next request tries again"


async def test_a_killed_page_is_started_again(url: str, coordinator: CoordinatorProcess) -> None:
    async with httpx.AsyncClient(base_url=url, headers=BEARER, timeout=_ANSWER_S) as client:
        statuses: list[Any] = [(await client.get("/rollouts")).status_code]
        (first,) = page_processes(coordinator)
        first.kill()
        await asyncio.to_thread(first.wait, 30)
        statuses.append((await client.get("/rollouts")).status_code)
        assert statuses == [200, 200]
        assert page_processes(coordinator)[0].pid != first.pid
