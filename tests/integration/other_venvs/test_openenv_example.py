"""The server of the example, with OpenEnv's own package in an environment of its own: a run, and sessions that move."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.conftest import free_port
from tests.integration.other_venvs.locked_venv import locked_venv
from tests.support.gspo_run import EXAMPLES, whole_run
from tests.support.service_process import log_events
from tests.support.tiny_model import make_tiny_model

pytestmark = [pytest.mark.timeout(900), pytest.mark.long]
HERE = EXAMPLES / "openenv"
STEPS, READY_S = 2, 240
# A game of the example whose answers take a while: most rollouts are in their midst at any time, and saved.
SLOW = """
import time
import server
step = server.GuessEnvironment.step

def slow_step(self, action, timeout_s=None, **options):
    time.sleep(0.4)
    return step(self, action, timeout_s, **options)

server.GuessEnvironment.step = slow_step
app = server.app
"""
PROMPT = [{"role": "user", "content": "Guess a number from 0 to 31."}]


@pytest.fixture
def openenv_url(tmp_path: Path) -> Iterator[str]:
    python = locked_venv(tmp_path / "venv", HERE / "requirements.lock")
    port, log = free_port(), (tmp_path / "server.log").open("w")
    (tmp_path / "slow_server.py").write_text(SLOW)
    uvicorn: list[str | Path] = [python, "-m", "uvicorn", "slow_server:app", "--app-dir", tmp_path, "--port", str(port)]
    variables = {**os.environ, "PYTHONPATH": str(HERE)}
    server = subprocess.Popen(uvicorn, env=variables, stdout=log, stderr=log)
    try:
        deadline_s = time.monotonic() + READY_S
        while time.monotonic() < deadline_s:
            try:
                httpx.get(f"http://127.0.0.1:{port}/health")
                break
            except httpx.TransportError:
                assert server.poll() is None, (tmp_path / "server.log").read_text()
                time.sleep(0.2)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait(10)
        log.close()


def generators(process: subprocess.Popen[bytes]) -> dict[str, psutil.Process]:
    """The generators of a run, by their names."""
    children = psutil.Process(process.pid).children(recursive=True)
    return {
        words[words.index("--name") + 1]: child
        for child in children
        if "gspo.generation" in (words := child.cmdline()) and "--name" in words
    }


def test_conversations_of_a_killed_generator_go_on_in_its_successor(tmp_path: Path, openenv_url: str) -> None:
    rows = [{"prompt": PROMPT, "number": number, "answer": str(number)} for number in range(16)]
    (tmp_path / "numbers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    killed: list[str] = []

    def meanwhile(process: subprocess.Popen[bytes], run_dir: Path) -> None:
        while process.poll() is None and not (run_dir / "log/step-000001.parquet").exists():
            time.sleep(0.05)
        time.sleep(3.0)  # several turns of the next games
        if "generation-0" in (running := generators(process)):
            for child in [*running["generation-0"].children(recursive=True), running["generation-0"]]:
                child.send_signal(signal.SIGKILL)
            killed.append("generation-0")

    run = whole_run(
        tmp_path,
        make_tiny_model(tmp_path / "model", seed=1),
        meanwhile,
        data={"prompts": "numbers.jsonl"},
        environment={
            "url": openenv_url,
            "protocol": "openenv",
            "observation_field": "text",
            "replay": True,
            "name": "game",
            "max_turns": 12,
            "turn_tokens": 16,
            "weight": 0.5,
        },
        algorithm={"rollout_batch_size": 4, "num_return_sequences_in_group": 4, "response_length": 320},
        generation={"save_tokens": 16},
        # Without lag all games are of the next step when the generator is killed.
        staleness={"max_lag": 0},
        services={"lease_s": 5.0},
        run={"total_steps": STEPS},
    )
    assert killed == ["generation-0"]
    assert json.loads((run.run_dir / "summary.json").read_text())["steps"] == STEPS
    logged = [
        line
        for path in (run.run_dir / "services").glob("generation-*.log")
        for line in log_events(path)
        if line["event"] in ("session_replayed", "session_lost", "replay_differs")
    ]
    assert "session_replayed" in {line["event"] for line in logged}, "no conversation was in its midst"
    assert {line["event"] for line in logged} == {"session_replayed"}, logged
    for row in (row for number in range(1, STEPS + 1) for row in run.rows(number)):
        assert row["failure"] is None
        turns = [turn["content"] for turn in json.loads(row["turns_json"]) if turn["role"] == "user"]
        assert set(turns) <= {"a number", "higher", "lower", "right"}
