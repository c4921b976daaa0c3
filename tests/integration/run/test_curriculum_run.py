"""A run under data.curriculum with real engines, killed as a whole and resumed: its log alone says its prompts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from gspo.common.config.loading import read_config
from gspo.coordinator.groups.curriculum import Curriculum
from gspo.learner.storage.run_directory import RunDir
from gspo_proto.learner_pb2 import REWARD_SPREAD_DIFFERENT
from tests.support.gspo_run import WholeRun, run_to_end, whole_run
from tests.support.tiny_model import make_tiny_model

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]
STEPS, KILLED_AFTER, GROUPS, SIZE, NUM_PROMPTS = 9, 4, 4, 6, 20
# Three of four prompts are too easy: every answer to them is right.
REWARD = """
def reward(prompts, completions, answer, **columns):
    return [float(int(a) % 8 or c[0]["content"][:1] < "P") for c, a in zip(completions, answer)]
"""


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> WholeRun:
    folder = tmp_path_factory.mktemp("curriculum")
    (folder / "easy.py").write_text(REWARD)

    def kill_after_a_step(process: subprocess.Popen[bytes], run_dir: Path) -> None:
        deadline = time.monotonic() + 300
        while not (run_dir / "log" / f"step-{KILLED_AFTER:06d}.parquet").exists():
            assert process.poll() is None and time.monotonic() < deadline, f"no step {KILLED_AFTER}"
            time.sleep(0.02)
        os.killpg(process.pid, signal.SIGKILL)

    with pytest.raises(AssertionError):  # it ended by the signal
        whole_run(
            folder,
            make_tiny_model(folder / "model", seed=3, scale=3.0),
            kill_after_a_step,
            data={"curriculum": "spread", "revisit_passes": 2},
            reward={"functions": [{"path": "easy.py"}]},
            algorithm={"rollout_batch_size": GROUPS, "num_return_sequences_in_group": SIZE},
            staleness={"max_lag": 1},
            run={"total_steps": STEPS, "checkpoint_every": 3},
        )
    run_dir = folder / "runs" / "whole"
    printed = run_to_end([sys.executable, "-P", "-m", "gspo.cli", "run", "--resume", str(run_dir), "--plain"])
    return WholeRun(folder, run_dir, printed)


def test_the_order_of_prompts_follows_from_seed_and_log(resumed: WholeRun) -> None:
    config = read_config(resumed.run_dir / "config.yaml")
    with RunDir(resumed.run_dir) as run:
        page = run.results.page("whole", 0)
    results = list(zip(page.groups, (spread == REWARD_SPREAD_DIFFERENT for spread in page.spreads), strict=True))
    order = Curriculum(config, [NUM_PROMPTS])
    order.learn(results)
    rows = _rows(resumed)
    trained = {row["group"]: json.loads(row["columns_json"])["answer"] for row in rows}
    assert len(trained) == STEPS * GROUPS
    assert {group: str(2 * order.place(group).place) for group in trained} == trained
    (state,) = order.describe()
    assert int(state["passes"]) >= 1
    draws = Counter(order.place(group).place for group in range(STEPS * GROUPS))
    assert min(draws.values()) < max(draws.values()), "no prompt sat out"


def test_the_results_are_those_of_the_rewards(resumed: WholeRun) -> None:
    with RunDir(resumed.run_dir) as run:
        page = run.results.page("whole", 0)
    spreads = dict(zip(page.groups, page.spreads, strict=True))
    rewards: dict[int, set[float]] = {}
    for row in _rows(resumed):
        rewards.setdefault(row["group"], set()).add(row["reward"])
    for group, of_group in rewards.items():
        assert (spreads[group] == REWARD_SPREAD_DIFFERENT) == (len(of_group) > 1)
    assert {len(of_group) for of_group in rewards.values()} == {1, 2}


def _rows(run: WholeRun) -> list[dict[str, Any]]:
    return [row for step in range(1, STEPS + 1) for row in run.rows(step)]
