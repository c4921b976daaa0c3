"""A run is stopped while the version before its newest is measured: the resume measures that version.

Engine and training step alone are simulated; coordinator, learner, reward and Redis are the real ones.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.simulated.settings import Settings
from tests.support.tiny_model import make_tiny_model

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]
ROOT = Path(__file__).parents[3]
QUICK = Settings(decode_s=0.001, decode_s_per_request=0.0, length_median=4, load_s=0.0, train_s=0.01)
# Long enough for a stop within an evaluation.
REWARD = """
import time

def reward(completions, slow, **columns):
    time.sleep(4.0 if any(slow) else 0.0)
    return [float(len(c) % 2) for c in completions]
"""


def recorded(run_dir: Path, name: str) -> list[dict[str, Any]]:
    file = run_dir / "log" / name
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


class StoppedRun:
    """A run of five steps that measures every second version."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.run_dir = folder, folder / "runs" / "stopped"
        make_tiny_model(folder / "model", seed=3)
        for name, slow in (("train", 0), ("held_out", 1)):
            rows = [{"prompt": f"{n}+{n + slow}=", "slow": slow} for n in range(20 - 16 * slow)]
            (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / "score.py").write_text(REWARD)
        config: dict[str, Any] = {
            "name": "stopped",
            "model": {"path": "model"},
            "data": {"prompts": "train.jsonl"},
            "reward": {"functions": [{"path": "score.py"}], "workers": 2},
            "algorithm": {
                "prompt_length": 16,
                "response_length": 8,
                "rollout_batch_size": 4,
                "num_return_sequences_in_group": 2,
            },
            "evaluation": {"prompts": "held_out.jsonl", "every": 2, "num_answers": 2, "greedy": False},
            "staleness": {"max_lag": 1},
            "run": {"total_steps": 5},
        }
        (folder / "config.yaml").write_text(yaml.safe_dump(config))

    def run(self, *words: str, meanwhile: Callable[[subprocess.Popen[bytes]], None] = lambda _: None) -> None:
        """One `gspo run` to its end."""
        path = os.pathsep.join([str(ROOT), str(ROOT / "proto"), str(ROOT / "services")])
        env = {**os.environ, **QUICK.to_environment(), "PYTHONPATH": path}
        command = [sys.executable, "-m", "benchmarks.simulated.run", *words, "--plain"]
        with (self.folder / "run.log").open("ab") as out:
            process = subprocess.Popen(
                command, cwd=self.folder, env=env, stdout=out, stderr=out, start_new_session=True
            )
        try:
            meanwhile(process)
            process.wait(120)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait(30)

    def stop_after_version_3(self, process: subprocess.Popen[bytes]) -> None:
        """It waits for the figures of version 2."""
        deadline = time.monotonic() + 120
        while not any(line["version"] == 3 for line in recorded(self.run_dir, "policy.jsonl")):
            assert process.poll() is None and time.monotonic() < deadline, (self.folder / "run.log").read_text()
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)


def test_a_version_whose_evaluation_was_stopped_is_measured_after_the_resume(tmp_path: Path) -> None:
    run = StoppedRun(tmp_path)
    run.run(str(tmp_path / "config.yaml"), meanwhile=run.stop_after_version_3)
    assert [line["label"] for line in recorded(run.run_dir, "evaluations.jsonl")] == ["v0"]
    assert recorded(run.run_dir, "policy.jsonl")[-1]["version"] == 3
    assert [path.name for path in (run.run_dir / "candidates").iterdir()] == ["unmeasured-000002"]
    run.run("--resume", str(run.run_dir))
    measured = recorded(run.run_dir, "evaluations.jsonl")
    assert [line["label"] for line in measured] == ["v0", "v2", "v4", "v5"], (tmp_path / "run.log").read_text()
    assert "newest_version" not in measured[1]["figures"]
    assert measured[1]["figures"]["num_failed"] == 0
    assert not list((run.run_dir / "candidates").iterdir())
    assert [line["version"] for line in recorded(run.run_dir, "policy.jsonl")] == [0, 1, 2, 3, 4, 5]
