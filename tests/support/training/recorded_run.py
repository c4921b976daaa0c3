"""A run directory as the learner's loop leaves it, by the real trainer on made-up rollouts: no engine, no Redis."""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from gspo.cli.rundir.start import environment
from gspo.common.config.loading import CONFIG_NAME, ENVIRONMENT_NAME, parse_config, write_config
from gspo.learner.assembly.row_metrics import row_metrics
from gspo.learner.assembly.rows import Row
from gspo.learner.objective.loss_file import keep_loss_file, with_kept_loss
from gspo.learner.push.policy_weights import weights_from
from gspo.learner.storage.run_directory import RunDir
from gspo.learner.training.trainer import Trainer
from gspo.learner.training.trainer_api import configured_hyperparameters
from gspo_core.advantage import RunningMoments
from tests.support.tiny_model import make_tiny_model
from tests.support.training.rollout_rows import make_config, make_rows, with_sets


def rows_of_step(model: Path, step: int, top_k: int = 0) -> list[Row]:
    """Two mini-batches of rollouts of the version before a step, in groups of their own; with the sets of top_k."""
    rows = make_rows(model, step=step, num_groups=4, num_mini_batches=2, noise=0.05)
    rows = with_sets(model, rows, top_k, 0.05) if top_k else rows
    return [replace(row, group=row.group + 8 * step) for row in rows]


def record_run(folder: Path, *, steps: int = 6, checkpoints: Collection[int] = (2, 4), **sections: Any) -> Path:
    """Train so many steps and record them in `folder / "run"`; returns that run directory."""
    model = make_tiny_model(folder / "model", hidden_size=32, layers=1)
    # Some ratios are outside of this clip, and inside of twice as wide a one.
    sections = {"algorithm": {"pg_clip_low": 0.02, "pg_clip_high": 0.02, "num_mini_batches": 2}, **sections}
    keys = make_config(model, **sections).model_dump(mode="json")
    keys["name"], keys["run"]["directory"], keys["run"]["checkpoint_every"] = "run", str(folder), 2
    config, path = parse_config(keys, folder), folder / "run"
    path.mkdir()
    write_config(config, path / CONFIG_NAME)
    (path / ENVIRONMENT_NAME).write_text(json.dumps(environment(config)))
    with RunDir(path) as run:
        keep_loss_file(config, path)
        trainer = Trainer(with_kept_loss(config, path), model)
        first = weights_from(0, trainer.engine.policy())
        run.append_version(0, first.digest, first.dtype)
        for step in range(1, steps + 1):
            rows, began = rows_of_step(model, step, config.sampling.top_k), time.monotonic()
            used = configured_hyperparameters(config, step)
            run.write_step(step, rows)
            trained = trainer.train(step, rows, (), used)
            weights = weights_from(step, trainer.engine.policy())
            run.append_version(step, weights.digest, weights.dtype, asdict(used))
            seconds = time.monotonic() - began
            figures = {**row_metrics(rows, step), **trained.metrics}
            run.append_metrics(step, {**figures, "train_s": seconds, "step_s": seconds})
            if step in checkpoints:
                trainer.engine.save(run.checkpoints.begin(step), {"moments": asdict(RunningMoments())})
                run.checkpoints.finish(step)
    return path


def contents(run_dir: Path) -> dict[str, tuple[bytes, int]]:
    """Every file of a run directory, replays apart, with its content and time of change."""
    return {str(path.relative_to(run_dir)): (path.read_bytes(), path.stat().st_mtime_ns) for path in _files(run_dir)}


def _files(run_dir: Path) -> Iterator[Path]:
    for path in run_dir.rglob("*"):
        if path.is_file() and path.relative_to(run_dir).parts[0] != "replays":
            yield path
