"""Recorded versions on logged rollouts from the page: a real sandbox, and who may start it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from pathlib import Path

import psutil
import pytest
from starlette.testclient import TestClient

from gspo.common.config.loading import CONFIG_NAME
from gspo.common.network.http_server import HttpGuard
from gspo.view.http_api import make_page
from gspo.view.log_trial import LogTrials, TrialError
from gspo.view.picture.viewed_run import ViewedRun
from tests.integration.reward.test_log_trial import VERSION, run_dir

__all__ = ["run_dir"]
SERVER = "ef" * 32
PATH = f"/api/functions/{VERSION}/trial"
BODY = {"function": "sums"}


def client_of(run_dir: Path, trial: LogTrials | None) -> TestClient:
    page = make_page([ViewedRun("small", run_dir)], [], trial)
    return TestClient(HttpGuard(page), base_url="http://127.0.0.1:8090")


@pytest.fixture
def client(run_dir: Path) -> TestClient:
    return client_of(run_dir, LogTrials(run_dir))


def test_a_recorded_version_shows_its_changes(client: TestClient) -> None:
    assert 'data-function="sums"' in client.get(f"/functions/{VERSION}").text
    answer = client.post(PATH, json=BODY)
    assert answer.status_code == 200, answer.text
    text = " ".join(answer.text.split())
    assert "4 rollouts of the newest steps: 4 scores change, 4 advantages change sign, 0 fail." in text
    first = '<a href="/steps/1/groups/1/0">step 1, group 1, 0</a></th><td>0</td><td>1</td><td>+1</td>'
    assert first in text
    assert client.get("/trial.js").status_code == 200


def test_a_machine_without_a_sandbox_says_so(
    client: TestClient, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(run_dir))  # no bwrap
    config = run_dir / CONFIG_NAME
    config.write_text(config.read_text().replace("sandbox_minimum: landlock", "sandbox_minimum: bubblewrap"))
    answer = client.post(PATH, json=BODY)
    assert answer.status_code == 422
    assert "reward.sandbox_minimum: is bubblewrap, and this machine reaches" in answer.json()["detail"]


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        (PATH, {"function": "other"}, 404, "functions with it: sums"),
        (PATH, {}, 422, "Field required"),
        (PATH, {"function": "sums", "source": "def reward(): ..."}, 422, "Extra inputs"),
        (f"/api/functions/{SERVER}/trial", BODY, 422, "can run alone"),
        (f"/api/functions/{VERSION[:12]}/trial", BODY, 404, "the log has no such version"),
        ("/api/functions/reward.py/trial", BODY, 404, "the log has no such version"),
        ("/api/functions/..%2freward.py/trial", BODY, 404, ""),
    ],
)
def test_only_recorded_versions_run(
    run_dir: Path, path: str, body: dict[str, str], status: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LogTrials, "tried", None)  # a call of it would be an error
    answer = client_of(run_dir, LogTrials(run_dir)).post(path, json=body)
    assert answer.status_code == status
    assert words in answer.text


def test_pages_of_other_origins_run_nothing(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LogTrials, "tried", None)
    for headers in ({"origin": "http://attacker.example"}, {"sec-fetch-site": "cross-site"}, {"host": "attacker.test"}):
        assert client.post(PATH, json=BODY, headers=headers).status_code in (403, 421)
    form = {"content-type": "application/x-www-form-urlencoded"}
    assert client.post(PATH, content="function=sums", headers=form).status_code == 415
    assert client.get(PATH).status_code in (404, 405)


def test_the_page_of_the_coordinator_names_the_command(run_dir: Path) -> None:
    client = client_of(run_dir, None)
    page = client.get(f"/functions/{VERSION}").text
    assert "data-function" not in page
    assert f"gspo reward compare RUN_DIR {VERSION[:12]}" in page
    answer = client.post(PATH, json=BODY)
    assert answer.status_code == 403
    assert f"gspo reward compare RUN_DIR {VERSION[:12]}" in answer.json()["detail"]


@pytest.mark.asyncio(loop_scope="function")
async def test_one_runs_at_a_time_and_none_outlives_its_deadline(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped, end = [], os.killpg

    def kill(group: int, number: signal.Signals) -> None:
        stopped.append(group)
        end(group, number)

    monkeypatch.setattr("gspo.view.log_trial.os.killpg", kill)
    trial = LogTrials(run_dir, timeout_s=0.1)
    first = asyncio.create_task(trial.tried(VERSION, "sums"))
    await asyncio.sleep(0)
    with pytest.raises(TrialError, match="another comparison is running"):
        await trial.tried(VERSION, "sums")
    with pytest.raises(TrialError, match=r"longer than 0\.1 s"):
        await first
    assert stopped
    with contextlib.suppress(psutil.NoSuchProcess):
        assert psutil.Process(stopped[0]).status() == psutil.STATUS_ZOMBIE
    with pytest.raises(TrialError, match=r"longer than 0\.1 s"):
        await trial.tried(VERSION, "sums")
