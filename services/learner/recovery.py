"""Back to where the run was: the newest whole checkpoint, then the logged steps after it, through the same code.

It publishes nothing. A replayed version whose digest differs from the recorded one is recorded anew; generators that
hold the old one then get a full push. Neighbours: rundir.py, trainer.py, loop.py goes on from here.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import structlog

from gspo_core.advantage import RunningMoments
from services.common.activity import Activity
from services.common.config import Config
from services.common.errors import InputError
from services.learner.assembly import Assembler
from services.learner.making import Maker, NotFiniteError, StartMaker
from services.learner.rundir import RunDir
from services.learner.weights import policy_from

log = structlog.get_logger()


def recover(
    config: Config, model: Path, run_dir: RunDir, activity: Activity, start: StartMaker
) -> tuple[Maker, Assembler, int]:
    """A trainer, on every rank, and an assembler in the state after the last logged step, and that step's number.

    Raises:
        ValueError: A step file that the replay needs is missing.
        InputError: A step that ended the run ends it again, or the checkpoint was written by other ranks.
    """
    activity.set("busy", "loading the model", str(model))
    trainer = start(config, model, run_dir.path)
    step, moments = 0, RunningMoments()
    if (newest := run_dir.checkpoints.newest()) is not None:
        activity.set("busy", "loading the checkpoint", f"step {newest}")
        state = trainer.load(run_dir.checkpoints.path(newest))
        step, moments = newest, RunningMoments(**state["moments"])
    assembler = Assembler(
        config.algorithm,
        config.staleness,
        seed=config.seed,
        settlements=run_dir.settlements,
        moments=moments,
        on_failure=config.reward.on_failure,
    )
    to_replay = run_dir.steps_to_replay(after=step)
    for step in to_replay:
        activity.set("busy", "replaying", f"step {step} of {to_replay[-1]}")
        _replay(step, run_dir, trainer, assembler)
    return trainer, assembler, step


def _replay(step: int, run_dir: RunDir, trainer: Maker, assembler: Assembler) -> None:
    rows = run_dir.read_step(step)
    assembler.replay(rows)
    try:
        trained = trainer.train(step, rows, run_dir.not_applied(step))
    except NotFiniteError as error:
        raise InputError(
            str(run_dir.steplog.path(step)), f"replaying it ends as it did before: {error}", "Then resume"
        ) from error
    run_dir.append_not_applied(step, map(asdict, trained.not_applied))
    digest = policy_from(step, trainer.policy()).digest
    recorded = run_dir.digest(step)
    if recorded is not None and recorded != digest:
        log.warning("replay_differs", step=step, recorded=recorded, digest=digest)
    run_dir.append_version(step, digest, step)
    run_dir.append_metrics(step, step, trained.figures)
    log.info("step_replayed", step=step, digest=digest[:12], same=recorded in (None, digest))
