"""The example of verifiers as its README says: its packages in an environment of their own, its worker beside a run."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from tests.conftest import free_port
from tests.integration.other_venvs.locked_venv import locked_venv
from tests.support.gspo_run import EXAMPLES, whole_run
from tests.support.tiny_model import make_tiny_model

pytestmark = [pytest.mark.timeout(900), pytest.mark.long]
HERE = EXAMPLES / "verifiers"
STEPS, TURNS = 2, 16
FIRST = """
def reward(prompts, completions, **columns):
    return [float(len(c[0]["content"]) % 2) + (c[0]["content"][:1] < "P") for c in completions]
"""
sys.path.append(str(EXAMPLES / "guess"))


def test_an_environment_of_verifiers_plays_the_rollouts_of_a_run(tmp_path: Path) -> None:
    game = import_module("game")
    python = locked_venv(tmp_path / "venv", HERE / "requirements.lock")
    program: list[str | Path] = [python, HERE / "play.py", "guess_game"]
    subprocess.run([*program, "--write-prompts", tmp_path / "games.jsonl"], check=True, timeout=300)
    prompts = [json.loads(line) for line in (tmp_path / "games.jsonl").read_text().splitlines()]
    assert [prompt["verifiers_task"] for prompt in prompts] == list(range(32))
    # Games that a random policy loses: the run's own function gives their groups different scores.
    (tmp_path / "first.py").write_text(FIRST)
    url, log = f"http://127.0.0.1:{(port := free_port())}", tmp_path / "worker.log"
    with log.open("w") as output:
        worker = subprocess.Popen([*program, "--url", url, "--rollouts", "8"], stdout=output, stderr=output)
    try:
        run = whole_run(
            tmp_path,
            make_tiny_model(tmp_path / "model", seed=1),
            data={"prompts": "games.jsonl"},
            reward={"functions": [{"path": "first.py"}]},
            agent={"external": True, "answer_tokens": 3, "timeout_s": 240.0, "lease_s": 60.0},
            gateway={"replicas": 1},
            services={"gateway_port": port},
            algorithm={
                "rollout_batch_size": 2,
                "num_return_sequences_in_group": 4,
                "response_length": 900,
            },
            run={"total_steps": STEPS},
        )
        assert worker.wait(60) == 0, log.read_text()
    finally:
        worker.kill()
        worker.wait(10)
    assert "the run has ended" in log.read_text()
    for row in (row for number in range(1, STEPS + 1) for row in run.rows(number)):
        assert row["failure"] is None
        parts = {part["name"]: part["value"] for part in json.loads(row["parts_json"])}
        messages = json.loads(row["turns_json"])
        state, total, answers = game.reset({"number": json.loads(row["columns_json"])["verifiers_task"]})[0], 0.0, []
        for turn in (message for message in messages if message["role"] == "assistant"):
            state, hint, reward, _ = game.step(state, turn["content"].strip())
            answers.append(hint)
            total += reward
        assert total == parts["agent"]
        assert 1 <= row["num_turns"] == len(answers) <= TURNS
        # verifiers' side of the conversation is what the game says, and the run's record has it.
        hints = [message["content"] for message in messages if message["role"] == "user"]
        assert hints == answers[: len(hints)]
        assert len(hints) == len(answers) - 1
