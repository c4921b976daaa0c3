"""A whole run whose environment is on a server, with a generator that is killed in its midst."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.environments.game_server import environment_server
from tests.support.gspo_run import whole_run
from tests.support.tiny_model import make_tiny_model

pytestmark = [pytest.mark.timeout(600), pytest.mark.long]
STEPS, TTL_S, REACH_S = 3, 15.0, 20.0
PROMPT = [{"role": "user", "content": "Guess a number from 0 to 31."}]


def kill_generator(process: subprocess.Popen[bytes]) -> bool:
    """Kill the generator and its engine; whether there was one."""
    started = psutil.Process(process.pid).children(recursive=True)
    for child in started:
        if "gspo.generation" in child.cmdline():
            for process_of_it in [*child.children(recursive=True), child]:
                process_of_it.kill()
            return True
    return False


def test_a_run_on_a_server_leaves_no_session_also_if_a_generator_is_killed(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", seed=1)
    rows: list[dict[str, Any]] = [{"prompt": PROMPT, "number": number, "answer": str(number)} for number in range(16)]
    (tmp_path / "numbers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    killed: list[bool] = []
    with environment_server(places=12, ttl_s=TTL_S) as server:

        def meanwhile(process: subprocess.Popen[bytes], run_dir: Path) -> None:
            while process.poll() is None and not (run_dir / "log/step-000001.parquet").exists():
                time.sleep(0.05)
            before = server.count("requests")
            while process.poll() is None and server.count("requests") < before + 5:
                time.sleep(0.01)
            killed.append(kill_generator(process))

        run = whole_run(
            tmp_path,
            model,
            meanwhile,
            data={"prompts": "numbers.jsonl"},
            environment={
                "url": server.url,
                "name": "game",
                "max_turns": 3,
                "turn_tokens": 4,
                "weight": 0.5,
                "ping_every_s": 2.0,
                "reach_timeout_s": REACH_S,
            },
            algorithm={"rollout_batch_size": 4, "num_return_sequences_in_group": 4, "response_length": 64},
            staleness={"max_lag": 1},
            run={"total_steps": STEPS},
        )
        assert killed == [True]
        assert json.loads((run.run_dir / "summary.json").read_text())["steps"] == STEPS
        # Those of the killed generator are silent for longer. The last ones, in flight at the end, were closed.
        server.end_silent_sessions()
        assert server.count() == 0
    rows = [row for step in range(1, STEPS + 1) for row in run.rows(step)]
    assert {row["failure"] for row in rows} == {None}
    assert {row["outcome"] for row in rows} <= {"turn_limit", "environment_done", "truncated"}
    for row in rows:
        assert {part["name"] for part in json.loads(row["parts_json"])} == {"reward", "environment"}
        assert row["num_turns"] >= 1
