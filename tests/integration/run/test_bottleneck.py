"""One stage is made slow at a time, in runs with a simulated engine and trainer: the verdict names that stage.

The verdict on figures made up by hand is in tests/unit/common/telemetry/test_bottleneck.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.simulated.settings import Settings
from tests.support.tiny_model import make_tiny_model

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]
ROOT = Path(__file__).parents[3]
QUICK = Settings(decode_s=0.001, decode_s_per_request=0.0, length_median=4, load_s=0.0, train_s=0.01)
REWARD = """
import time

def reward(completions, **columns):
    time.sleep({seconds})
    # The rewards of a group differ: without a signal there is no advice on speed.
    return [float(sum(str(c).encode()) % 2) for c in completions]
"""
# The verdict is on the last five: the first two load what later ones have.
_STEPS = 7


@dataclass(frozen=True)
class SlowStage:
    """A run with one slow stage, and its verdict."""

    stage: str
    settings: Settings = QUICK
    reward_s: float = 0.0
    max_lag: int = 1
    sections: dict[str, Any] = field(default_factory=dict)
    because: str = ""
    change: str = ""


RUNS = {
    "training": SlowStage("training", Settings(**{**vars(QUICK), "train_s": 2.0}), change="a faster learner"),
    # Capacity for one group: the others of a step wait for it.
    "queue": SlowStage(
        "generation",
        Settings(**{**vars(QUICK), "decode_s": 0.12}),
        sections={"generation": {"kv_cache_gb": 0.25, "max_rollouts": 2}},
        because="until a generator is free, with 1 of them",
        change="one more generator (generation.replicas: 2)",
    ),
    "answers": SlowStage(
        "generation",
        Settings(**{**vars(QUICK), "decode_s": 0.5}),
        max_lag=0,
        change="a shorter algorithm.response_length",
    ),
    "reward": SlowStage("reward", reward_s=1.0, because="for slow_one", change="a faster slow_one"),
    "push": SlowStage("push", Settings(**{**vars(QUICK), "load_s": 2.0}), max_lag=0, change="a faster network"),
}


@pytest.fixture(scope="module")
def summaries(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Name -> summary.json of each run that a selected test asks about. They sleep half of the time, so they go side
    by side."""
    folder = tmp_path_factory.mktemp("slow")
    model = make_tiny_model(folder / "model", seed=3)
    selected = [item for item in request.session.items if item.path == request.path]
    names = [str(item.callspec.params["name"]) for item in selected if isinstance(item, pytest.Function)]
    with ThreadPoolExecutor(len(names)) as threads:
        running = {name: threads.submit(run, folder / name, model, RUNS[name]) for name in names}
        return {name: task.result() for name, task in running.items()}


def run(folder: Path, model: Path, slow: SlowStage) -> dict[str, Any]:
    """A run to its end."""
    folder.mkdir()
    records = [{"prompt": f"{n}+{n}=", "answer": str(2 * n)} for n in range(40)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (folder / "slow_one.py").write_text(REWARD.format(seconds=slow.reward_s))
    config = {
        "name": "slow",
        "model": {"path": str(model)},
        "data": {"prompts": "prompts.jsonl"},
        "reward": {"functions": [{"path": "slow_one.py"}], "workers": 1},
        "algorithm": {
            "prompt_length": 16,
            "response_length": 8,
            "rollout_batch_size": 4,
            "num_return_sequences_in_group": 2,
        },
        "staleness": {"max_lag": slow.max_lag},
        "run": {"total_steps": _STEPS},
        **slow.sections,
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    command = [sys.executable, "-m", "benchmarks.simulated.run", str(folder / "config.yaml"), "--plain"]
    path = os.pathsep.join([str(ROOT), str(ROOT / "proto"), str(ROOT / "services")])
    env = {**os.environ, **slow.settings.to_environment(), "PYTHONPATH": path}
    done = subprocess.run(
        command, cwd=folder, env=env, capture_output=True, text=True, timeout=300, start_new_session=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    summary: dict[str, Any] = json.loads((folder / "runs" / "slow" / "summary.json").read_text())
    return summary


@pytest.mark.parametrize("name", RUNS)
def test_the_slow_stage_is_found_and_what_to_change(name: str, summaries: dict[str, dict[str, Any]]) -> None:
    slow, bound = RUNS[name], summaries[name]["bound"]
    assert bound["stage"] == slow.stage, bound
    assert slow.because in bound["because"]
    assert any(change.startswith(slow.change) for change in bound["change"]), bound["change"]
