"""Makes logged steps again, with the trainer and the code of a resume, in a folder that has the form of a run's.

The folder has links to the step files and to the checkpoint before them, and gets a log of its own: log/policy.jsonl
and log/metrics.jsonl.

services/gspo/cli/replay fills it, and compares its log with that of the run.
consumes: step files. produces: versions and figures. waits for: nothing.
"""

from collections.abc import Callable, Collection
from dataclasses import asdict
from pathlib import Path

import structlog

from gspo.common.config.schema import Config
from gspo.common.telemetry.activity import Activity
from gspo.learner.assembly.assembler import Assembler
from gspo.learner.push.policy_weights import PolicyWeights
from gspo.learner.recovery import hyperparameters_of, initial_weights, replay_step, restore
from gspo.learner.storage.durable_files import DiskSpace
from gspo.learner.storage.run_directory import PolicyVersion, RunDir
from gspo.learner.training.trainer_api import StartTrainer, TrainerApi
from gspo.runlog.run_log import REPLAYED_VERSIONS, read_own_records

log = structlog.get_logger()


def make_steps(
    config: Config,
    model: Path,
    folder: Path,
    last: int,
    start: StartTrainer,
    is_stopped: Callable[[], bool],
    *,
    configured: Collection[str] = (),
    reassembled: bool = False,
) -> None:
    """Make the steps of a replay's folder after its newest checkpoint, up to `last`, and write a checkpoint then.

    A checkpoint is also written every run.checkpoint_every steps, and where it stops; a later call continues there.

    Args:
        is_stopped: Whether to stop before the next step.
        configured: Names of the hyperparameters that the configuration decides; the others are those on record.
        reassembled: Whether the configuration decides mini-batches and advantages; else they are the logged ones.

    Raises:
        InputError: As for `recovery.restore`.
        ValueError: A step file is missing.
        StepOutOfMemoryError: A step needs smaller micro-batches, which a later call takes.
        NotFiniteError: A step ends in losses, gradients or weights that are not finite.
    """
    activity = Activity("learner")
    recorded = {
        version.version: version
        for version in read_own_records(folder / REPLAYED_VERSIONS, PolicyVersion.model_validate).records
    }
    with RunDir(folder, DiskSpace(activity, is_stopped)) as run_dir:
        trainer, assembler, weights, _ = restore(config, model, run_dir, activity, start, recorded)
        weights = weights or initial_weights(trainer, recorded)
        run_dir.append_version(weights.version, weights.digest_on_record, weights.dtype)
        saved = weights.version
        for step in run_dir.steps_to_replay(after=weights.version):
            if step > last or is_stopped():
                break
            used = hyperparameters_of(config, step, recorded.get(step), run_dir.shortages, configured)
            weights = replay_step(
                step, run_dir, trainer, assembler, used, reassembled=reassembled, original=recorded.get(step)
            )
            if not step % config.run.checkpoint_every:
                saved = _save(weights, run_dir, trainer, assembler)
        if weights.version > saved:
            _save(weights, run_dir, trainer, assembler)
        log.info("replay_done", version=weights.version)
        trainer.close()


def _save(weights: PolicyWeights, run_dir: RunDir, trainer: TrainerApi, assembler: Assembler) -> int:
    """Write the checkpoint of a version, in place of the one before; returns the version."""
    step = weights.version
    trainer.save(run_dir.checkpoints.begin(step), {"moments": asdict(assembler.moments)})
    run_dir.checkpoints.finish(step)
    run_dir.prune(keep_checkpoints=1, keep_log_steps=None)
    return step
