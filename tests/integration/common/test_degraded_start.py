"""Services with bad input, as a container starts them: alive, not ready, with the reason, until SIGTERM."""

from __future__ import annotations

import json
import signal
import socket
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from gspo.common.errors import EXIT_BAD_INPUT
from tests.conftest import free_port
from tests.support.service_process import START_S, log_events, make_run, service_process, wait_exit

END_S = 20.0
SECRET = "a-secret-of-many-characters"


def ask(port: int, path: str) -> tuple[int, dict[str, Any]]:
    """Status and JSON of a probe, once the service answers."""
    deadline = time.monotonic() + START_S
    while True:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as reply:
                return reply.status, json.load(reply)
        except urllib.error.HTTPError as refusal:
            return refusal.code, json.load(refusal)
        except OSError:
            assert time.monotonic() < deadline, f"nobody answers at {port}"
            time.sleep(0.1)


def problems(port: int, cause: str) -> str:
    """The problem of this cause at /readyz, once it is there."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        status, facts = ask(port, "/readyz")
        assert status == 503
        if cause in facts["problems"]:
            return str(facts["problems"][cause])
        time.sleep(0.1)
    raise AssertionError(f"no {cause} in {facts}")


@pytest.mark.parametrize(
    ("model", "services", "reason"),
    [
        # A compose file without its secrets.
        (".", {"token_file": "/nowhere/token"}, "services.token_file: /nowhere/token"),
        # A model that is not in the container: the service itself finds it missing, in the middle of its start.
        ("/nowhere/model", {}, "model.path: /nowhere/model is not a folder"),
    ],
)
def test_it_stays_and_says_why(
    tmp_path: Path, redis_url: str, model: str, services: dict[str, Any], reason: str
) -> None:
    config, port, log = make_run(tmp_path, Path(model), services=services), free_port(), tmp_path / "log"
    with service_process("coordinator", config, redis_url, "--http-port", str(port), "--stay", log=log) as process:
        assert problems(port, "bad_input").startswith(reason)
        assert ask(port, "/healthz") == (200, {"status": "alive"})
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert wait_exit(process, END_S) == EXIT_BAD_INPUT
    # One line, and no traceback.
    (line,) = [event for event in log_events(log) if event["level"] == "error"]
    assert line["event"] == "bad_input"
    assert line["reason"].startswith(reason)
    assert "Traceback" not in log.read_text()


def test_a_run_directory_that_is_not_there_yet_is_said_so(tmp_path: Path, redis_url: str) -> None:
    config, port = make_run(tmp_path, tmp_path), free_port()
    (config.run_dir / "config.yaml").unlink()
    with service_process("reward", config, redis_url, "--http-port", str(port), "--stay"):
        assert "config.yaml: cannot be read" in problems(port, "bad_input")


def test_reward_functions_are_checked_at_the_start_where_nobody_did_before(tmp_path: Path, redis_url: str) -> None:
    config, port = make_run(tmp_path, tmp_path), free_port()
    (tmp_path / "reward.py").write_text("import a_package_that_nobody_has\n")
    with service_process("reward", config, redis_url, "--http-port", str(port), "--stay"):
        assert "a_package_that_nobody_has" in problems(port, "bad_input")


@pytest.mark.parametrize("option", ["--http-port", "--grpc-port"])
def test_a_port_that_is_taken_is_one_line_and_the_end(tmp_path: Path, redis_url: str, option: str) -> None:
    config, log = make_run(tmp_path, tmp_path), tmp_path / "log"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        with service_process("reward", config, redis_url, option, port, log=log) as process:
            assert wait_exit(process, START_S) == EXIT_BAD_INPUT
    (line,) = [event for event in log_events(log) if event["level"] == "error"]
    assert line["reason"].startswith(f"{option}: {port} cannot be bound on 127.0.0.1")


def test_without_the_option_it_ends_as_ever(tmp_path: Path, redis_url: str) -> None:
    config = make_run(tmp_path, tmp_path, services={"token_file": "/nowhere/token", "host": "0.0.0.0"})
    with service_process("reward", config, redis_url, log=tmp_path / "log") as process:
        assert wait_exit(process, START_S) == EXIT_BAD_INPUT
    assert (tmp_path / "log").read_text().startswith("error: services.token_file: ")
