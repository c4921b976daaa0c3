"""A kill in the middle of a checkpoint that is written beside training: the one before and the log remain."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import psutil
import pytest

from gspo.learner.push.policy_weights import weights_from
from gspo.learner.storage.run_directory import RunDir
from gspo.learner.training.trainer import Trainer
from tests.support.tiny_model import make_tiny_model
from tests.support.training.rollout_rows import make_config
from tests.support.training.started_ranks import rank_command, rank_environment

pytestmark = pytest.mark.timeout(200)


@pytest.mark.parametrize(("num_ranks", "zero_stage"), [(1, 0), pytest.param(2, 3, marks=pytest.mark.long)])
def test_a_kill_in_the_middle_of_a_checkpoint_leaves_the_one_before_and_the_log(
    tmp_path: Path, num_ranks: int, zero_stage: int
) -> None:
    model, path = make_tiny_model(tmp_path / "model"), tmp_path / "run"
    module = "tests.integration.learner.recovery.killed_checkpoint"
    words = rank_command(num_ranks, module, model, path, zero_stage)
    with (tmp_path / "ranks.log").open("w") as log:
        process = subprocess.Popen(words, env=rank_environment(), stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 150
        while not (tmp_path / "ready").exists():
            assert process.poll() is None and time.monotonic() < deadline, (tmp_path / "ranks.log").read_text()[-4000:]
            time.sleep(0.1)
        assert list((path / "checkpoints").glob("*.tmp")), "no checkpoint is being written"
    finally:
        ranks = psutil.Process(process.pid).children(recursive=True)
        for rank in ranks:
            rank.kill()
        process.kill()
        process.wait(30)
        # A rank holds the directory's lock until it has ended.
        psutil.wait_procs(ranks, 30)
    with RunDir(path) as run:
        assert [folder.name for folder in run.checkpoints.folder.iterdir()] == ["step-000001"]
        assert run.checkpoints.damage(1) == ""
        assert run.steps_to_replay(after=1) == [2, 3]
        # One rank resumes it. The training of step 2 did not change the copies of step 1.
        trainer = Trainer(make_config(model), model)
        assert trainer.engine.load(run.checkpoints.path(1)) == {"of": 1}
        assert weights_from(1, trainer.engine.policy()).digest == run.versions[1].digest != run.versions[2].digest
