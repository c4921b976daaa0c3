"""Restores the state of a run: the newest undamaged checkpoint, then the logged steps after it by the same code.

It publishes nothing. A replayed version whose digest differs from the recorded one is recorded anew; generators that
hold the old one then get a full push.

services/gspo/learner/replay makes steps of a run again in another folder, with `restore` and `replay_step`.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import structlog

from gspo.common.config.schema import Config
from gspo.common.errors import InputError
from gspo.common.model.files import ModelFiles
from gspo.common.service.failure import in_step
from gspo.common.telemetry.activity import Activity
from gspo.learner.assembly.assembler import Assembler
from gspo.learner.assembly.row_metrics import row_metrics
from gspo.learner.objective.loss_file import keep_loss_file
from gspo.learner.push.policy_weights import PolicyWeights
from gspo.learner.storage.run_directory import PolicyVersion, RunDir
from gspo.learner.training.trainer_api import (
    Hyperparameters,
    NotFiniteError,
    StartTrainer,
    TrainerApi,
    configured_hyperparameters,
    memory_keys,
)
from gspo.runlog.memory_shortages import MemoryShortage
from gspo_core.advantage import RunningMoments

log = structlog.get_logger()
# Model folders in the run directory that a new run may start from.
_EXPORTED = ("best", "export")
# Tensors in a sentence.
_NUM_NAMED = 3


@dataclass(frozen=True)
class RecoveredState:
    """The state after the last logged step.

    Attributes:
        trainer: On every rank, with these weights.
        weights: Those of the version that the step made, or of version 0; it is on record.
        notices: Sentences for the user: damaged checkpoints, steps that are left out, tensors of the model that are
        left over.
    """

    trainer: TrainerApi
    assembler: Assembler
    weights: PolicyWeights
    notices: tuple[str, ...]


def recover(config: Config, model: Path, run_dir: RunDir, activity: Activity, start: StartTrainer) -> RecoveredState:
    """Load the newest undamaged checkpoint, replay the log from there, and record the version that this makes.

    Raises:
        ValueError: A step file that the replay needs is missing.
        InputError: A step that ended the run ends it again, or another version of gspo wrote the checkpoint. Or the
            run's copy of a loss of the user's own is gone. Or the model has weights that are not finite. Or every
            checkpoint is damaged, and the log does not begin at the first step.
    """
    trainer, assembler, weights, notices = restore(config, model, run_dir, activity, start)
    first = weights.version if weights else 0
    to_replay = run_dir.steps_to_replay(after=first)
    for step in to_replay:
        activity.set("busy", "replaying", f"step {step} of {to_replay[-1]}")
        hyperparameters = hyperparameters_of(config, step, run_dir.versions.get(step), run_dir.shortages)
        try:
            with in_step(step):
                weights = replay_step(step, run_dir, trainer, assembler, hyperparameters)
        except NotFiniteError as error:
            raise InputError(
                str(run_dir.steplog.path(step)),
                f"replaying it ends as it did before: {error}",
                f"Then resume, or go on without it: --leave-out {step}",
            ) from error
    weights = weights or initial_weights(trainer, run_dir.versions)
    run_dir.append_version(weights.version, weights.digest_on_record, weights.dtype)
    notices += tuple(
        f"Step {step} is left out: its rollouts stay in the log, and version {step} has the weights of version "
        f"{step - 1}."
        for step in to_replay
        if step in run_dir.left_out
    )
    return RecoveredState(trainer, assembler, weights, notices)


def restore(
    config: Config,
    model: Path,
    run_dir: RunDir,
    activity: Activity,
    start: StartTrainer,
    originals: Mapping[int, PolicyVersion] | None = None,
) -> tuple[TrainerApi, Assembler, PolicyWeights | None, tuple[str, ...]]:
    """Start the trainer, and load the newest undamaged checkpoint.

    Args:
        originals: The versions of another run directory, where this one has no records of its own: digests are of
            their kinds.

    Returns:
        Trainer, assembler, the weights of the checkpoint's version, and notices about damaged checkpoints. Without a
        checkpoint the weights are None: the trainer has those of the model.

    Raises:
        InputError: As for `recover`, replays apart.
    """
    # Before the trainer: every rank takes the copy.
    keep_loss_file(config, run_dir.path)
    activity.set("busy", "loading the model", str(model))
    trainer = start(config, model, run_dir.path)
    weights, moments, notices = _load_checkpoint(config, run_dir, trainer, activity, originals or {})
    assembler = Assembler(
        config.algorithm,
        config.staleness,
        seed=config.seed,
        settlements=run_dir.settlements,
        moments=moments,
        on_failure=config.reward.on_failure,
        rewards_count=not config.teacher.alone,
        sources=config.sources,
    )
    return trainer, assembler, weights, notices


def _load_checkpoint(
    config: Config, run_dir: RunDir, trainer: TrainerApi, activity: Activity, originals: Mapping[int, PolicyVersion]
) -> tuple[PolicyWeights | None, RunningMoments, tuple[str, ...]]:
    """Load the newest undamaged checkpoint; damaged ones that are newer are moved out of the way.

    Returns:
        The weights of its version, its moments, and notices for the user. Without a checkpoint, the weights are None:
        the run starts from the model.
    """
    checkpoints, damage = run_dir.checkpoints, dict[int, str]()
    has_loaded = False
    for step in reversed(checkpoints.all_steps()):
        activity.set("busy", "verifying the checkpoint", f"step {step}")
        if problem := checkpoints.damage(step):
            damage[step] = problem
            continue
        activity.set("busy", "loading the checkpoint", f"step {step}")
        state, has_loaded = trainer.load(checkpoints.path(step)), True
        try:
            weights = _version_of(trainer, step, run_dir.versions.get(step) or originals.get(step))
        except NotFiniteError as error:
            damage[step] = str(error)
            continue
        if problem := _difference(config, run_dir, weights):
            damage[step] = problem
            continue
        return weights, RunningMoments(**state["moments"]), _pass_over(run_dir, damage, step)
    notices = _pass_over(run_dir, damage, 0)
    if has_loaded:
        raise InputError(
            str(checkpoints.folder), " ".join(notices), "Resume once more: the loaded weights have to leave memory"
        )
    return None, RunningMoments(), notices


def _difference(config: Config, run_dir: RunDir, loaded: PolicyWeights) -> str:
    """How the loaded weights differ from the version on record; empty where they are the same.

    Under LoRA a policy is a product of matrices, which another machine rounds otherwise; and a resume may publish in
    another dtype. Neither is damage.
    """
    recorded = run_dir.versions.get(loaded.version)
    if recorded is None or recorded.dtype != loaded.dtype or config.learner.lora.rank:
        return ""
    if recorded.digest == (digest := loaded.digest_on_record):
        return ""
    return f"its weights have the digest {digest[:12]}..., and version {loaded.version} was {recorded.digest[:12]}..."


def _version_of(trainer: TrainerApi, version: int, recorded: PolicyVersion | None) -> PolicyWeights:
    """A version with the trainer's weights, and its digest of the kind on record.

    Raises:
        NotFiniteError: Weights are not finite.
    """
    return trainer.begin_version(version, recorded.digest if recorded else "", is_reused=False)()


def initial_weights(trainer: TrainerApi, recorded: Mapping[int, PolicyVersion]) -> PolicyWeights:
    """Version 0, of a trainer that has trained nothing.

    Args:
        recorded: The versions on record.

    Raises:
        InputError: The model has weights that are not finite.
    """
    try:
        return _version_of(trainer, 0, recorded.get(0))
    except NotFiniteError as error:
        raise InputError("model.path", str(error), "Give another model") from error


def compare_with_files(folder: Path, files: ModelFiles, policy: PolicyWeights) -> tuple[str, ...]:
    """Compare the policy with the files of its model, by whose names and shapes the generators take it.

    Returns:
        A notice for the user about the tensors that are no part of the policy; none if there are none.

    Raises:
        InputError: The files lack a tensor, or have it in another shape: no generator could take any version.
    """
    if not files.shapes:
        return ()  # pickles, which generators refuse
    for name, _, shape, _ in policy.entries:
        if (stored := files.shapes.get(name)) != list(shape):
            raise InputError(
                "model.path",
                f"the learner's model has {name} of shape {list(shape)}, and the weights in {folder} have "
                f"{f'shape {stored}' if stored else 'no tensor of this name'}, so no generator could take its updates",
                "Save the model again: AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(OTHER)",
            )
    if not (left_over := sorted(files.shapes.keys() - {entry.name for entry in policy.entries})):
        return ()
    log.info("tensors_left_over", names=left_over)
    more = ", ..." if len(left_over) > _NUM_NAMED else ""
    notice = (
        f"{len(left_over)} of {len(files.shapes)} tensors in {folder} are no part of the policy, since the "
        f"architecture ties or ignores them: {', '.join(left_over[:_NUM_NAMED])}{more}"
    )
    return (notice,)


def _pass_over(run_dir: RunDir, damage: dict[int, str], from_step: int) -> tuple[str, ...]:
    """Move damaged checkpoints out of the way, where the run can go on from step `from_step` without them.

    Raises:
        InputError: The log lacks a step between `from_step` and a damaged checkpoint.
    """
    if damage and (missing := set(range(from_step + 1, max(damage) + 1)) - set(run_dir.steplog.steps())):
        exported = [str(run_dir.path / name) for name in _EXPORTED if (run_dir.path / name).is_dir()]
        start_anew = f", or start a new run with model.path: {' or '.join(exported)}" if exported else ""
        raise InputError(
            str(run_dir.checkpoints.path(max(damage))),
            f"the checkpoint is damaged ({damage[max(damage)]}), no earlier one can take its place, and "
            f"{run_dir.steplog.path(min(missing)).name} is no longer in the log to be replayed",
            f"Put the folder back from a copy{start_anew}",
        )
    come_from = f"the checkpoint of step {from_step}" if from_step else "the model that the run started from"
    notices = []
    for step, problem in damage.items():
        moved = run_dir.checkpoints.move_damaged(step)
        notices.append(
            f"The checkpoint of step {step} is damaged ({problem}). It is now {moved}; the run continues from "
            f"{come_from}, and the logged steps after it are trained again."
        )
        log.warning("checkpoint_damaged", step=step, text=notices[-1])
    return tuple(notices)


def hyperparameters_of(
    config: Config,
    step: int,
    recorded: PolicyVersion | None,
    shortages: Sequence[MemoryShortage],
    configured: Collection[str] = (),
) -> Hyperparameters:
    """The hyperparameters of a step: those on record if its version is, within the memory that there was.

    A step without a recorded version is trained with the configured ones, so that a change may save a run that ended
    in it. A step that ran out of memory counts for itself and for later ones, until a resume changes a key that
    decides memory.

    Args:
        shortages: The steps that ran out of memory.
        configured: Names of those that are as configured in any case.
    """
    used = configured_hyperparameters(config, step)
    if recorded is not None and recorded.hyperparameters:
        by_configuration = {name: getattr(used, name) for name in configured}
        used = replace(used, **{**recorded.hyperparameters, **by_configuration})
    acting = [it for it in shortages if it.step <= step and it.keys == memory_keys(config)]
    return replace(
        used,
        micro_batch_tokens=min([used.micro_batch_tokens, *(it.micro_batch_tokens for it in acting)]),
        gradient_checkpointing=used.gradient_checkpointing or any(it.gradient_checkpointing for it in acting),
    )


def replay_step(
    step: int,
    run_dir: RunDir,
    trainer: TrainerApi,
    assembler: Assembler,
    hyperparameters: Hyperparameters,
    *,
    reassembled: bool = False,
    original: PolicyVersion | None = None,
) -> PolicyWeights:
    """Train a logged step once more, and record its version and figures; the weights of its version.

    A step that is left out changes no weights and no optimizer state, and has no figures. Its version and its place in
    the schedule of the learning rate stay. So do its rewards in the running moments: a step that was logged behind it
    may have them in its advantages.

    Args:
        reassembled: Whether the assembler makes mini-batches and advantages anew, under other keys than the log's.
        original: The version on record, where this run directory has none of its own: the digest is of its kind.

    Raises:
        NotFiniteError: Too many mini-batches in a row were not finite, or the weights are not.
    """
    rows, recorded = run_dir.steplog.read(step), run_dir.versions.get(step)
    if reassembled:
        rows = assembler.reassemble(step, rows)
    else:
        assembler.replay(rows)
    if step in run_dir.left_out:
        weights = _version_of(trainer, step, recorded or original)
        run_dir.append_version(step, weights.digest_on_record, weights.dtype)
        log.info("step_left_out", step=step, digest=weights.digest_on_record[:12])
        return weights
    trained = trainer.train(step, rows, run_dir.not_applied(step), hyperparameters)
    weights = _version_of(trainer, step, recorded or original)
    run_dir.append_not_applied(step, map(asdict, trained.not_applied))
    digest = weights.digest_on_record
    same = recorded is None or recorded.digest == digest
    if recorded is not None and not same and recorded.dtype == weights.dtype:
        log.warning("replay_differs", step=step, recorded=recorded.digest, digest=digest)
    run_dir.append_version(step, digest, weights.dtype, asdict(hyperparameters))
    run_dir.steplog.write_tokens(step, trained.tokens)
    run_dir.append_metrics(step, {**row_metrics(rows, step), **trained.metrics})
    log.info("step_replayed", step=step, digest=digest[:12], same=same)
    return weights
