"""One rank of several, for test_killed_checkpoint.py: stays in the middle of writing a checkpoint, to be killed.

Called by torchrun as `-m tests.integration.learner.recovery.killed_checkpoint MODEL RUN ZERO_STAGE`. It writes the
first checkpoint beside the training of step 2, begins the second one, trains step 3, and then creates the file `ready`.
"""

from __future__ import annotations

import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

from torch import distributed

from gspo.common.config.schema import Config
from gspo.learner.ranks.launcher import own_rank
from gspo.learner.storage.run_directory import RunDir
from gspo.learner.storage.training_states import StatesFile
from gspo.learner.training.rank_control import RankZero, follow_rank_zero
from gspo.learner.training.trainer_api import configured_hyperparameters
from tests.support.training.rollout_rows import make_config, make_rows

_HOLD = "hold"


def hold_last_rank(run: Path) -> None:
    """Let the last rank stop after half a file, as long as a file stands beside the run."""
    write, rank = StatesFile.write, own_rank()

    def halted(self: StatesFile, folder: Path) -> None:
        write(self, folder)
        path, size = folder / self.name, (folder / self.name).stat().st_size
        while rank == distributed.get_world_size() - 1 and (run.parent / _HOLD).exists():
            with path.open("r+b") as file:
                file.truncate(size // 2)
            time.sleep(0.05)
        write(self, folder)

    StatesFile.write = halted  # type: ignore[method-assign]


def train(config: Config, model: Path, run: RunDir, trainer: RankZero, step: int) -> None:
    """A step, logged before and recorded after."""
    rows = [replace(row, group=row.group + 8 * step) for row in make_rows(model, step=step)]
    run.write_step(step, rows)
    trainer.train(step, rows, (), configured_hyperparameters(config, step))
    weights = trainer.begin_version(step, "", is_reused=False)()
    run.append_version(step, weights.digest, weights.dtype)


def lead(config: Config, model: Path, path: Path) -> None:
    """Rank zero's calls."""
    trainer, hold = RankZero(config, model, path), path.parent / _HOLD
    with RunDir(path) as run:
        hold.touch()
        train(config, model, run, trainer, 1)
        first = trainer.begin_save(run.checkpoints.begin(1), {"of": 1})
        writing = threading.Thread(target=first, args=[lambda: False], daemon=True)
        writing.start()
        train(config, model, run, trainer, 2)
        assert writing.is_alive(), "the checkpoint was written while the last rank had half a file"
        hold.unlink()
        writing.join()
        run.checkpoints.finish(1)
        hold.touch()
        second = trainer.begin_save(run.checkpoints.begin(2), {"of": 2})
        threading.Thread(target=second, args=[lambda: False], daemon=True).start()
        train(config, model, run, trainer, 3)
        (path.parent / "ready").touch()
        while True:
            trainer.rank_heartbeat()
            time.sleep(1.0)


def main() -> None:
    """Train until killed."""
    model, path, stage = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    config = make_config(model, learner={"zero_stage": stage})
    hold_last_rank(path)
    if own_rank():
        follow_rank_zero(config, model, path)
    else:
        lead(config, model, path)


if __name__ == "__main__":
    main()
