"""The trial of an environment's server before a run: what works passes, and each broken rule is named."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from gspo.common.config.schema import Config
from gspo.common.errors import InputError
from gspo.reward.check import check
from tests.support.environments.game_server import GUESS, EnvironmentServer, environment_server
from tests.support.service_process import make_run

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def server() -> Iterator[EnvironmentServer]:
    with environment_server() as running:
        yield running


def run_on(server: EnvironmentServer, folder: Path, **keys: Any) -> Config:
    config = make_run(folder, folder / "model", environment={"url": server.url, "step_timeout_s": 1.0, **keys})
    prompts = folder / "prompts.jsonl"
    prompts.write_text('{"prompt": "Guess", "number": 20, "answer": "20"}\n')
    return config


def refusal(server: EnvironmentServer, folder: Path, **keys: Any) -> InputError:
    with pytest.raises(InputError) as error:
        check(run_on(server, folder, **keys))
    assert error.value.where == "environment.url"
    return error.value


def test_a_server_that_keeps_the_rules_passes(
    server: EnvironmentServer, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    check(run_on(server, tmp_path))
    assert capfd.readouterr().err == ""
    assert server.count() == 0


@pytest.mark.parametrize(
    ("faults", "rule", "fix"),
    [
        ({"hostile": "not_json"}, "something else than JSON", "the form in docs/conversations.md"),
        ({"hostile": "nan_reward"}, "something else than JSON", "the form in docs/conversations.md"),
        ({"hang_s": 5}, "gave no answer within 1 s", "raise environment.step_timeout_s"),
        ({"key": "secret"}, "answered HTTP 401", "GSPO_ENVIRONMENT_API_KEY"),
        ({"forgets": "repeats"}, "had another end: http", "Keep the last answer of each session"),
        ({"forgets": "close"}, "still has a session that was closed", "Remove the session in /close"),
    ],
)
def test_a_broken_rule_is_an_input_error(
    server: EnvironmentServer, tmp_path: Path, faults: dict[str, Any], rule: str, fix: str
) -> None:
    server.break_answers(**faults)
    error = refusal(server, tmp_path)
    assert rule in error.rule
    assert fix in (error.fix or "")


def test_a_server_that_is_not_there_is_an_input_error(server: EnvironmentServer, tmp_path: Path) -> None:
    server.kill()
    error = refusal(server, tmp_path)
    assert "gives no answer (ConnectError" in error.rule
    assert error.fix == "Start the server, or correct its address"


def test_a_server_that_speaks_openenv_alone_is_named(server: EnvironmentServer, tmp_path: Path) -> None:
    error = refusal(server, tmp_path, protocol="openenv")
    assert "/ws answered HTTP" in error.rule


def test_a_full_server_is_a_warning(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with environment_server(places=1) as server:
        httpx.post(f"{server.url}/reset", json={"episode_id": "a", "task": {"number": 1}}).raise_for_status()
        check(run_on(server, tmp_path))
        assert "every place is taken, so the server was not tried" in capfd.readouterr().err
        assert server.count() == 1


def test_the_server_of_the_page_passes(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    page = (GUESS.parents[1] / "docs/conversations.md").read_text()
    (source,) = [block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "FastAPI()" in block]
    (tmp_path / "server.py").write_text(source)
    with environment_server(folder=tmp_path) as server:
        check(run_on(server, tmp_path))
        assert capfd.readouterr().err == ""
        assert (server.count(), server.count("requests")) == (0, 6)
