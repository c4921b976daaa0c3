"""`POST /api/view`: only views of the page, only where a tab listens, and nothing of other places."""

from __future__ import annotations

import asyncio
import json
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient

from gspo.common.network.http_server import HttpGuard
from gspo.learner.assembly.rows import row_from_scored
from gspo.learner.storage.step_log import StepLog
from gspo.view.http_api import make_page
from gspo.view.opening_api import MAX_STREAMS, OpenTabs
from gspo.view.picture.viewed_run import ViewedRun
from tests.unit.learner.conftest import MakeScored

HOSTILE = "<script>alert(1)</script>"


@pytest.fixture
def run_dir(tmp_path: Path, scored: MakeScored) -> Path:
    (tmp_path / "log").mkdir()
    StepLog(tmp_path / "log").write(1, [replace(row_from_scored(scored(10, 0)), step=1)])
    return tmp_path


@pytest.fixture
def tabs(monkeypatch: pytest.MonkeyPatch) -> OpenTabs:
    """The tabs that the page will know."""
    tabs = OpenTabs()
    monkeypatch.setattr("gspo.view.http_api.OpenTabs", lambda: tabs)
    return tabs


@pytest.fixture
def client(run_dir: Path, tabs: OpenTabs) -> TestClient:
    page = make_page([ViewedRun("small", run_dir)], [])
    return TestClient(HttpGuard(page), base_url="http://127.0.0.1:8090")


@pytest.mark.parametrize(
    ("body", "path"),
    [
        ({"path": "/steps/1/groups/10/0?colour=mask#tokens"}, "/steps/1/groups/10/0?colour=mask#tokens"),
        ({"path": "/"}, "/"),
        ({"view": "group", "parameters": {"step": 1, "group": 10}}, "/steps/1/groups/10"),
        ({"view": "rollouts", "parameters": {"q": "a b&c", "sort": "reward"}}, "/rollouts?q=a+b%26c&sort=reward"),
        ({"view": "functions", "run": "small", "note": HOSTILE}, "/functions"),
    ],
)
def test_a_view_goes_to_every_stream(client: TestClient, tabs: OpenTabs, body: dict[str, object], path: str) -> None:
    with tabs.listening() as first, tabs.listening() as second:
        answer = client.post("/api/view", json=body)
        assert (answer.status_code, answer.json()) == (200, {"opened": path, "browsers": 2})
        for queue in (first, second):
            assert json.loads(queue.get_nowait()) == {"path": path, "note": body.get("note", "")}


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({"path": "https://attacker.example/"}, 422, "is not a path of this page"),
        ({"path": "//attacker.example/rollouts"}, 422, "is not a path of this page"),
        ({"path": "/\\attacker.example"}, 422, "is not a path of this page"),
        ({"path": "javascript:alert(1)"}, 422, "is not a path of this page"),
        ({"path": "/\t/attacker.example"}, 422, "is not a path of this page"),
        ({"path": "//[attacker"}, 422, "is not a path of this page"),
        ({"path": "rollouts"}, 422, "is not a path of this page"),
        ({"path": "/nothing"}, 404, "is not a view of this page"),
        ({"path": "/api/curves"}, 404, "is not a view of this page"),
        ({"path": "/style.css"}, 404, "is not a view of this page"),
        ({"path": "/steps/1/groups/10/0/text"}, 404, "is not a view of this page"),
        ({"path": "/steps/9/groups/10"}, 404, "the page cannot show"),
        ({"path": "/rollouts?step=x"}, 404, "the page cannot show"),
        ({"view": "group", "parameters": {"step": 1}}, 422, "needs the parameter group"),
        ({"view": "group", "parameters": {"step": 1, "group": "../../x"}}, 404, "is not a view of this page"),
        ({"view": "table"}, 422, "must be one of run, rollouts"),
        ({"path": "/", "view": "run"}, 422, "give path, or view"),
        ({}, 422, "give path, or view"),
        ({"path": "/", "run": "other"}, 409, "of the run small, not of other"),
        ({"path": "/", "note": "x" * 301}, 422, "at most 300"),
        ({"path": "/" + "x" * 2000}, 422, "at most 2000"),
        ({"path": "/", "origin": "x"}, 422, "Extra inputs"),
    ],
)
def test_other_places_and_missing_views_are_refused(
    client: TestClient, tabs: OpenTabs, body: dict[str, object], status: int, words: str
) -> None:
    with tabs.listening() as queue:
        answer = client.post("/api/view", json=body)
        assert answer.status_code == status
        assert words in answer.text.replace('\\"', '"')
        assert queue.empty()


def test_without_an_open_tab_it_says_so(client: TestClient) -> None:
    answer = client.post("/api/view", json={"path": "/"})
    assert answer.status_code == 409
    assert "no tab of this page is open" in answer.json()["detail"]


def test_a_page_of_another_origin_opens_nothing(client: TestClient, tabs: OpenTabs) -> None:
    with tabs.listening() as queue:
        for headers in (
            {"origin": "http://attacker.example"},
            {"sec-fetch-site": "cross-site"},
            {"host": "attacker.example"},
        ):
            assert client.post("/api/view", json={"path": "/"}, headers=headers).status_code in (403, 421)
        form = {"content-type": "application/x-www-form-urlencoded"}
        assert client.post("/api/view", content="path=/", headers=form).status_code == 415
        assert queue.empty()


async def test_the_stream_sends_an_opened_view(run_dir: Path, tabs: OpenTabs) -> None:
    page = make_page([ViewedRun("small", run_dir)], [])
    sent: list[bytes] = []
    gone = asyncio.Event()

    async def receive() -> dict[str, object]:
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        sent.append(bytes(message.get("body", b"")))

    scope = {"type": "http", "method": "GET", "path": "/api/changes", "query_string": b"", "headers": []}
    stream = asyncio.create_task(page(scope, receive, send))  # type: ignore[arg-type]
    async with asyncio.timeout(30):
        while not tabs.num_streams:
            await asyncio.sleep(0.01)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(page), base_url="http://127.0.0.1") as client:
            await client.post("/api/view", json={"path": "/rollouts", "note": "look"})
        while b"event: view" not in b"".join(sent):
            await asyncio.sleep(0.01)
        gone.set()
        await stream
    assert b'event: view\ndata: {"path": "/rollouts", "note": "look"}\n\n' in b"".join(sent)
    assert tabs.num_streams == 0


def test_streams_are_bounded(client: TestClient, tabs: OpenTabs) -> None:
    with ExitStack() as stack:
        for _ in range(MAX_STREAMS):
            stack.enter_context(tabs.listening())
        assert client.get("/api/changes").status_code == 503
