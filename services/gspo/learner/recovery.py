"""Back to where the run was: the newest undamaged checkpoint, then the logged steps after it, through the same code.

It publishes nothing. A replayed version whose digest differs from the recorded one is recorded anew; generators that
hold the old one then get a full push.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

import structlog

from gspo.common.config.schema import Config
from gspo.common.errors import InputError
from gspo.common.telemetry.activity import Activity
from gspo.learner.assembly.assembler import Assembler
from gspo.learner.push.policy_weights import weights_from
from gspo.learner.storage.run_directory import RunDir
from gspo.learner.training.schedule import configured_hyperparameters
from gspo.learner.training.trainer_api import Hyperparameters, NotFiniteError, StartTrainer, TrainerApi
from gspo_core.advantage import RunningMoments

log = structlog.get_logger()
# Model folders in the run directory that a new run may start from.
_EXPORTED = ("best", "export")


@dataclass(frozen=True)
class RecoveredState:
    """The state after the last logged step.

    Attributes:
        trainer: On every rank, with the weights of version `step`.
        step: The last logged step; 0 where nothing was trained yet.
        notices: What the user has to know of how it came to this state, a sentence each.
    """

    trainer: TrainerApi
    assembler: Assembler
    step: int
    notices: tuple[str, ...]


def recover(config: Config, model: Path, run_dir: RunDir, activity: Activity, start: StartTrainer) -> RecoveredState:
    """Load the newest undamaged checkpoint and replay the log from there.

    Raises:
        ValueError: A step file that the replay needs is missing.
        InputError: A step that ended the run ends it again, the checkpoint was written by other ranks, or every
            checkpoint is damaged and the log does not reach back to the start.
    """
    activity.set("busy", "loading the model", str(model))
    trainer = start(config, model, run_dir.path)
    step, moments, notices = _load_checkpoint(config, run_dir, trainer, activity)
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
        _replay(config, step, run_dir, trainer, assembler)
    return RecoveredState(trainer, assembler, step, notices)


def _load_checkpoint(
    config: Config, run_dir: RunDir, trainer: TrainerApi, activity: Activity
) -> tuple[int, RunningMoments, tuple[str, ...]]:
    """The newest undamaged checkpoint's step and moments, and what is said of damaged ones that are newer."""
    checkpoints, damage = run_dir.checkpoints, dict[int, str]()
    has_loaded = False
    for step in reversed(checkpoints.all_steps()):
        activity.set("busy", "verifying the checkpoint", f"step {step}")
        problem = checkpoints.damage(step)
        if not problem:
            activity.set("busy", "loading the checkpoint", f"step {step}")
            state, has_loaded = trainer.load(checkpoints.path(step)), True
            problem = _other_weights(config, run_dir, trainer, step)
        if not problem:
            return step, RunningMoments(**state["moments"]), _pass_over(run_dir, damage, step)
        damage[step] = problem
    notices = _pass_over(run_dir, damage, 0)
    if has_loaded:
        raise InputError(
            str(checkpoints.folder), " ".join(notices), "Resume once more: what was loaded of it has to leave memory"
        )
    return 0, RunningMoments(), notices


def _other_weights(config: Config, run_dir: RunDir, trainer: TrainerApi, step: int) -> str:
    """How the loaded weights differ from the version on record; empty where they are the same.

    Under LoRA a policy is a product of matrices, which another machine rounds otherwise; and a resume may publish in
    another dtype. Neither is damage.
    """
    try:
        loaded = weights_from(step, trainer.policy())
    except NotFiniteError as error:
        return str(error)
    recorded = run_dir.version(step)
    comparable = recorded is not None and recorded.dtype == loaded.dtype and not config.learner.lora.rank
    if recorded is None or not comparable or recorded.digest == loaded.digest:
        return ""
    return f"its weights have the digest {loaded.digest[:12]}..., and version {step} was {recorded.digest[:12]}..."


def _pass_over(run_dir: RunDir, damage: dict[int, str], taken: int) -> tuple[str, ...]:
    """Move damaged checkpoints out of the way, where the run can go on from step `taken` without them.

    Raises:
        InputError: The log lacks a step between `taken` and a damaged checkpoint.
    """
    if damage and (missing := set(range(taken + 1, max(damage) + 1)) - set(run_dir.steps())):
        exported = [str(run_dir.path / name) for name in _EXPORTED if (run_dir.path / name).is_dir()]
        start_anew = f", or start a new run with model.path: {' or '.join(exported)}" if exported else ""
        raise InputError(
            str(run_dir.checkpoints.path(max(damage))),
            f"the checkpoint is damaged ({damage[max(damage)]}), no earlier one can take its place, and "
            f"{run_dir.steplog.path(min(missing)).name} is no longer in the log to be replayed",
            f"Put the folder back from a copy{start_anew}",
        )
    come_from = f"the checkpoint of step {taken}" if taken else "the model that the run started from"
    notices = []
    for step, problem in damage.items():
        moved = run_dir.checkpoints.move_damaged(step)
        notices.append(
            f"The checkpoint of step {step} is damaged ({problem}). It is now {moved}; the run goes on from "
            f"{come_from}, and the logged steps after it are trained again."
        )
        log.warning("checkpoint_damaged", step=step, text=notices[-1])
    return tuple(notices)


def _replay(config: Config, step: int, run_dir: RunDir, trainer: TrainerApi, assembler: Assembler) -> None:
    """Train a logged step once more.

    What it was trained with is on record if its version is; a step whose version nobody has seen is trained as the
    configuration says today, so that a change may save a run that ended in it.
    """
    rows, recorded = run_dir.read_step(step), run_dir.version(step)
    used = configured_hyperparameters(config, step)
    if recorded and recorded.hyperparameters:
        used = Hyperparameters(**recorded.hyperparameters)
    assembler.replay(rows)
    try:
        trained = trainer.train(step, rows, run_dir.not_applied(step), used)
        policy = weights_from(step, trainer.policy())
    except NotFiniteError as error:
        raise InputError(
            str(run_dir.steplog.path(step)), f"replaying it ends as it did before: {error}", "Then resume"
        ) from error
    run_dir.append_not_applied(step, map(asdict, trained.not_applied))
    same = recorded is None or recorded.digest == policy.digest
    if recorded is not None and not same and recorded.dtype in ("", policy.dtype):
        log.warning("replay_differs", step=step, recorded=recorded.digest, digest=policy.digest)
    run_dir.append_version(step, policy.digest, step, dtype=policy.dtype, hyperparameters=asdict(used))
    run_dir.append_metrics(step, step, trained.figures)
    log.info("step_replayed", step=step, digest=policy.digest[:12], same=same)
