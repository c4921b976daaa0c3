"""A step whose training always fails: the run ends at the second death, and a resume leaves the step out.

The whole command line with simulated engines and training; services, Redis, push and log are real.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from benchmarks.simulated.settings import Settings
from gspo.learner.assembly.ended_tokens import trained_tokens
from gspo.learner.storage.step_log import StepLog
from tests.support.service_process import make_run
from tests.support.tiny_model import make_tiny_model

pytestmark = [pytest.mark.timeout(400), pytest.mark.long]
STEPS, FAILING = 4, 2
SIMULATED = Settings(decode_s=0.002, decode_s_per_request=0, length_median=8, train_s=0.02, load_s=0.0)


@dataclass(frozen=True)
class FinishedCall:
    """One call of `gspo run`."""

    exit_code: int
    printed: str

    @property
    def words(self) -> str:
        """The output without its line breaks."""
        return " ".join(self.printed.split())


@dataclass(frozen=True)
class Played:
    """The two sessions, a refused one between them, and the page of `gspo status` after each."""

    run_dir: Path
    failed: FinishedCall
    refused: FinishedCall
    resumed: FinishedCall
    status_failed: str
    status_resumed: str

    def lines(self, name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.run_dir / "log" / name).read_text().splitlines()]


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Played:
    folder = tmp_path_factory.mktemp("left-out")
    make_tiny_model(folder / "model", seed=3)
    config = make_run(
        folder,
        folder / "model",
        algorithm={"num_mini_batches": 1},
        generation={"max_rollouts": 32, "kv_cache_gb": 0.01},
        run={"directory": str(folder / "runs"), "total_steps": STEPS},
    )
    file = config.run_dir / "config.yaml"
    start = file.rename(folder / "config.yaml")
    config.run_dir.rmdir()
    (folder / "fail-learner-0").write_text(str(FAILING))
    environment = {**os.environ, **SIMULATED.to_environment(), "GSPO_CHAOS": str(folder), "OMP_NUM_THREADS": "1"}

    def call(*words: str) -> FinishedCall:
        done = subprocess.run(
            [sys.executable, "-m", *words],
            env=environment,
            text=True,
            timeout=180,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
        )
        return FinishedCall(done.returncode, done.stdout)

    def run(*options: str) -> FinishedCall:
        return call("benchmarks.simulated.run", "--plain", *options)

    def status() -> str:
        return call("gspo.cli", "status", str(config.run_dir)).printed

    failed, status_failed = run(str(start)), status()
    refused = call("gspo.cli", "run", "--resume", "--leave-out", "1", str(config.run_dir))
    resumed = run(str(config.run_dir), "--resume", "--leave-out", str(FAILING))
    return Played(config.run_dir, failed, refused, resumed, status_failed, status())


def test_the_run_ends_at_the_second_death_with_cause_step_and_what_to_do(played: Played) -> None:
    failed, words = played.failed, played.failed.words
    assert failed.exit_code == 1, failed.printed
    assert words.count("Starting it again") == 1
    assert f"in step {FAILING}: ValueError: the training of step {FAILING} always fails" in words
    assert "benchmarks/simulated/trainer.py" in words
    assert f"gspo run --resume {played.run_dir}" in words
    assert f"gspo run --resume --leave-out {FAILING} {played.run_dir}" in words
    assert "failed: learner-0 died twice of the same error" in played.status_failed
    assert f"--leave-out {FAILING}" in played.status_failed


def test_a_step_that_was_applied_is_refused_before_anything_starts(played: Played) -> None:
    assert played.refused.exit_code == 2
    assert "--leave-out: step 1 was applied: policy version 1 is on record" in played.refused.words


def test_it_goes_on_without_the_step_and_the_ledger_closes(played: Played) -> None:
    assert played.resumed.exit_code == 0, played.resumed.printed
    assert f"Step {FAILING} is left out" in played.resumed.words
    digests = {line["version"]: line["digest"] for line in played.lines("policy.jsonl")}
    assert sorted(digests) == list(range(STEPS + 1))
    assert digests[FAILING] == digests[FAILING - 1]
    assert len(set(digests.values())) == STEPS
    assert [line["step"] for line in played.lines("metrics.jsonl")] == [s for s in range(1, STEPS + 1) if s != FAILING]
    rows = StepLog(played.run_dir / "log").read(FAILING)
    tokens = [trained_tokens(row) for row in rows]
    summary = json.loads((played.run_dir / "summary.json").read_text())
    assert summary["end"] == "completed"
    assert summary["left_out"] == [FAILING]
    ledger = summary["token_ledger"]
    assert ledger["left_out"] == sum(counted.num + counted.num_masked for counted in tokens) > 0
    assert ledger["difference"] == ledger["in_flight"] == 0
    assert f"left out of training (--leave-out): step {FAILING}" in played.status_resumed
    assert f"left out of training (--leave-out): step {FAILING}" in (played.run_dir / "report.html").read_text()
