"""Recovery: which checkpoint it takes, what it does about a damaged one, and what a replay is trained with."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.simulated.settings import Settings
from benchmarks.simulated.trainer import SimulatedTrainer
from gspo.common.config.reference import explain
from gspo.common.config.schema import Config
from gspo.common.errors import InputError
from gspo.common.model.files import read_model_files
from gspo.common.telemetry.activity import Activity
from gspo.common.weights.manifest import PREFIX, digest_of_before, entries_of_before
from gspo.learner.assembly.rows import Row, row_from_scored
from gspo.learner.push import policy_weights
from gspo.learner.push.policy_weights import PolicyWeights, weights_from
from gspo.learner.recovery import RecoveredState, compare_with_files, recover
from gspo.learner.replay.replayer import make_steps
from gspo.learner.storage.run_directory import RunDir
from gspo.learner.training.rank_control import RankZero
from gspo.learner.training.trainer_api import (
    Hyperparameters,
    NotFiniteError,
    StartTrainer,
    TrainResult,
    configured_hyperparameters,
)
from gspo.runlog.run_log import REPLAYED_VERSIONS, VERSIONS, RunLog
from gspo.runlog.step_files import token_file
from tests.support.service_process import make_run
from tests.support.tiny_model import make_tiny_model
from tests.support.training.rollout_rows import make_config, make_rows
from tests.unit.learner.conftest import MakeScored

MOMENTS = {"count": 0, "mean": 0.0, "square_deviation": 0.0, "minimum": 0.0, "maximum": 0.0}


class RecordingTrainer(SimulatedTrainer):
    """Keeps the hyperparameters of each step, and the updates that it is not to apply; a step takes no time."""

    def __init__(self, config: Config, folder: Path, run_dir: Path) -> None:
        super().__init__(config, folder, run_dir, Settings(time_scale=0))
        self.not_applied: dict[int, list[int]] = {}
        self.used: dict[int, Hyperparameters] = {}

    def train(
        self,
        step: int,
        rows: Sequence[Row],
        not_applied: Collection[int],
        hyperparameters: Hyperparameters,
    ) -> TrainResult:
        self.not_applied[step], self.used[step] = list(not_applied), hyperparameters
        return super().train(step, rows, not_applied, hyperparameters)


@pytest.fixture
def config(tmp_path: Path) -> Config:
    make_tiny_model(tmp_path / "model", hidden_size=32, layers=1)
    return make_run(tmp_path, tmp_path / "model")


def train_run(config: Config, run: RunDir, scored: Any, *, steps: int, checkpoints: Collection[int]) -> None:
    """As the loop does: log, train, record the version, and now and then a checkpoint."""
    maker = RecordingTrainer(config, config.run_dir.parent / "model", run.path)
    run.append_version(0, maker.begin_version(0, "", is_reused=False)().digest, "float32")
    for step in range(1, steps + 1):
        rows = [replace(row_from_scored(scored(step)), step=step)]
        run.write_step(step, rows)
        hyperparameters = configured_hyperparameters(config, step)
        maker.train(step, rows, (), hyperparameters)
        record_version(run, step, maker, hyperparameters)
        if step in checkpoints:
            save(run, step, maker)


def record_version(run: RunDir, step: int, maker: Any, used: Hyperparameters) -> None:
    policy = maker.begin_version(step, "", is_reused=False)()
    run.append_version(step, policy.digest, policy.dtype, asdict(used))


def save(run: RunDir, step: int, maker: Any) -> None:
    maker.save(run.checkpoints.begin(step), {"moments": MOMENTS})
    run.checkpoints.finish(step)


def recovered(config: Config, run: RunDir, start: StartTrainer = RecordingTrainer) -> RecoveredState:
    return recover(config, config.run_dir.parent / "model", run, Activity("learner"), start)


def recording(state: RecoveredState) -> RecordingTrainer:
    """The trainer that `recovered` starts."""
    assert isinstance(state.trainer, RecordingTrainer)
    return state.trainer


def flip_a_bit(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def test_the_weights_it_hands_on_are_those_on_record(config: Config, scored: MakeScored) -> None:
    with RunDir(config.run_dir) as run:
        new = recovered(config, run)
        assert {number: version.digest for number, version in run.versions.items()} == {0: new.weights.digest}
        train_run(config, run, scored, steps=2, checkpoints=(2,))
        resumed = recovered(config, run)
        assert (resumed.weights.version, list(recording(resumed).not_applied)) == (2, []), "a step was replayed"
        assert resumed.weights.digest == run.versions[2].digest == version_of(resumed, 2).digest


def test_a_run_of_before_resumes_and_replays_under_its_own_kind_of_digest(
    config: Config, scored: MakeScored, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "replay"
    (folder / "log").mkdir(parents=True)
    with RunDir(config.run_dir) as run:
        with monkeypatch.context() as before:
            # Such runs recorded the SHA-256 of all bytes.
            before.setattr(policy_weights, "entries_of", entries_of_before)
            before.setattr(policy_weights, "manifest_digest", digest_of_before)
            train_run(config, run, scored, steps=3, checkpoints=(1,))
        for file in (config.run_dir / "log").glob("step-*"):
            (folder / "log" / file.name).write_bytes(file.read_bytes())
        (folder / REPLAYED_VERSIONS).write_bytes((config.run_dir / "log" / VERSIONS).read_bytes())
        recorded = {number: version.digest for number, version in run.versions.items()}
        assert not any(digest.startswith(PREFIX) for digest in recorded.values())
        resumed = recovered(config, run)
        assert resumed.weights.version == 3 and resumed.weights.digest.startswith(PREFIX)
        assert {number: version.digest for number, version in run.versions.items()} == recorded
    make_steps(config, config.run_dir.parent / "model", folder, 3, RecordingTrainer, lambda: False)
    with RunDir(folder) as replayed:
        assert {number: version.digest for number, version in replayed.versions.items()} == recorded


def test_a_replay_skips_the_updates_that_the_log_records_as_not_applied(config: Config, scored: MakeScored) -> None:
    with RunDir(config.run_dir) as run:
        for step in (1, 2):
            run.write_step(step, [replace(row_from_scored(scored(step)), step=step)])
        run.append_not_applied(2, [{"update": 3, "mini_batch": 1, "reason": "the loss is nan"}])
        state = recovered(config, run)
        assert list(run.versions) == [1, 2]
    assert (state.weights.version, recording(state).not_applied) == (2, {1: [], 2: [3]})
    assert state.notices == ()


@pytest.mark.parametrize("name", ["weights.safetensors", "caller.json", "manifest.json"])
def test_one_changed_bit_makes_it_take_the_checkpoint_before(config: Config, scored: MakeScored, name: str) -> None:
    with RunDir(config.run_dir) as run:
        train_run(config, run, scored, steps=5, checkpoints=(2, 4))
        recorded = dict(run.versions)
    flip_a_bit(config.run_dir / "checkpoints" / "step-000004" / name)
    with RunDir(config.run_dir) as run:
        state = recovered(config, run)
        assert run.versions == recorded
        assert run.checkpoints.steps() == [2]
        # Its name is free: training makes the checkpoint of that step anew.
        run.checkpoints.begin(4)
    assert (state.weights.version, list(recording(state).not_applied)) == (5, [3, 4, 5])
    (notice,) = state.notices
    moved = config.run_dir / "checkpoints" / "step-000004.damaged"
    assert moved.is_dir() and str(moved) in notice
    assert notice.startswith(f"The checkpoint of step 4 is damaged ({name}")
    assert notice.endswith("continues from the checkpoint of step 2, and the logged steps after it are trained again.")
    if name != "manifest.json":
        assert "bytes with SHA-256" in notice


def test_a_second_resume_of_the_same_checkpoint_repeats_the_first_and_what_came_after(
    config: Config, scored: MakeScored
) -> None:
    with RunDir(config.run_dir) as run:
        train_run(config, run, scored, steps=3, checkpoints=(1,))
        files = contents(run.checkpoints.path(1))
    with RunDir(config.run_dir) as run:
        first = recovered(config, run)
        rows = [replace(row_from_scored(scored(4)), step=4)]
        run.write_step(4, rows)
        hyperparameters = configured_hyperparameters(config, 4)
        first.trainer.train(4, rows, (), hyperparameters)
        record_version(run, 4, first.trainer, hyperparameters)
        recorded = dict(run.versions)
    # It died before its next checkpoint.
    with RunDir(config.run_dir) as run:
        second = recovered(config, run)
        assert (second.weights.version, list(recording(second).not_applied)) == (4, [2, 3, 4])
        assert version_of(second, 4).digest == recorded[4].digest
        assert run.versions == recorded
        assert contents(run.checkpoints.path(1)) == files
        assert run.settlements.ranges() == [(1, 4)]


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_without_an_earlier_checkpoint_the_whole_log_is_replayed(config: Config, scored: MakeScored) -> None:
    with RunDir(config.run_dir) as run:
        train_run(config, run, scored, steps=3, checkpoints=(2,))
        recorded = dict(run.versions)
        flip_a_bit(run.checkpoints.path(2) / "weights.safetensors")
        state = recovered(config, run)
        assert run.versions == recorded
    assert list(recording(state).not_applied) == [1, 2, 3]
    assert "continues from the model that the run started from" in state.notices[0]


def test_a_damaged_checkpoint_that_cannot_be_replaced_is_refused_with_the_fix(
    config: Config, scored: MakeScored
) -> None:
    with RunDir(config.run_dir) as run:
        train_run(config, run, scored, steps=4, checkpoints=(3,))
        run.prune(keep_checkpoints=1, keep_log_steps=1)
        flip_a_bit(run.checkpoints.path(3) / "weights.safetensors")
        (run.path / "best").mkdir()
        with pytest.raises(InputError) as caught:
            recovered(config, run)
        # It stays where it is, for a copy to be put in its place.
        assert run.checkpoints.all_steps() == [3]
    assert caught.value.where == str(run.checkpoints.path(3))
    assert "weights.safetensors: expected" in caught.value.rule
    assert "step-000001.parquet is no longer in the log to be replayed" in caught.value.rule
    assert caught.value.fix == f"Put the folder back from a copy, or start a new run with model.path: {run.path}/best"


def test_weights_that_are_not_the_recorded_version_are_damage_too(config: Config, scored: MakeScored) -> None:
    """No file has changed since it was written, but the weights are not the published ones."""
    with RunDir(config.run_dir) as run:
        train_run(config, run, scored, steps=3, checkpoints=(1,))
        maker = RecordingTrainer(config, config.run_dir.parent / "model", run.path)
        save(run, 3, maker)
        recorded = dict(run.versions)
        state = recovered(config, run)
        assert run.versions == recorded and list(recording(state).not_applied) == [2, 3]
        assert "its weights have the digest" in state.notices[0]
        # Published in another dtype every version has another digest, and none is damaged.
        other = config.model_copy(update={"generation": config.generation.model_copy(update={"dtype": "bfloat16"})})
        assert recovered(other, run).notices == ()
        assert [run.versions[number].dtype for number in range(4)] == ["float32"] * 2 + ["bfloat16"] * 2
        assert run.versions[3].hyperparameters == recorded[3].hyperparameters


def test_a_recorded_version_is_made_with_what_is_recorded_and_another_as_configured(
    config: Config, scored: MakeScored
) -> None:
    changed: dict[str, Any] = {"learning_rate": 0.5, "weight_decay": 0.25, "max_grad_norm": 2.0}
    changed |= {"micro_batch_tokens": 300, "gradient_checkpointing": True}
    resumed = config.model_copy(update={"learner": config.learner.model_copy(update=changed)})
    with RunDir(config.run_dir) as run:
        train_run(config, run, scored, steps=1, checkpoints=())
        run.write_step(2, [replace(row_from_scored(scored(2)), step=2)])
    with RunDir(config.run_dir) as run:
        state = recovered(resumed, run)
        assert recording(state).used == {1: configured_hyperparameters(config, 1), 2: Hyperparameters(**changed)}
        assert run.versions[2].hyperparameters == changed


def test_whatever_a_resume_may_change_of_training_is_recorded_with_a_version() -> None:
    """Each new key that may change on resume belongs to one of these lists."""
    sections = ("learner", "algorithm", "sampling", "staleness", "run")
    on_resume = {key.name for key in explain() if key.on_resume and key.name.split(".")[0] in sections}
    recorded = {
        "learner.learning_rate",
        "learner.schedule",
        "learner.warmup_steps",
        "run.total_steps",
        "learner.weight_decay",
        "learner.max_grad_norm",
        "learner.micro_batch_tokens",
        "learner.gradient_checkpointing",
    }
    # The rollouts of a step are in its file. Other ranks, shares and lines add up in another order (docs/learner.md).
    no_part_of_the_update = {name for name in on_resume if name.startswith(("run.", "staleness."))} - recorded
    no_part_of_the_update |= {
        "learner.ranks",
        "learner.sequence_ranks",
        "learner.zero_stage",
        "learner.offload",
        "learner.packing",
        "learner.rank_timeout_s",
        "learner.mismatch_every",
        "learner.clip_split_every",
        "learner.token_records",
    }
    assert on_resume == recorded | no_part_of_the_update


def test_versions_are_replayed_to_the_bit_though_a_resume_changes_what_it_may(tmp_path: Path) -> None:
    """With the real trainer, through warm-up, schedule and a clip of the gradient that acts."""
    folder = make_tiny_model(tmp_path / "model")
    before = {"schedule": "cosine", "warmup_steps": 1, "weight_decay": 0.1, "max_grad_norm": 0.05}
    first = make_config(folder, algorithm={"pg_clip": 0.05}, learner=before)
    after = {"learning_rate": 1e-2, "schedule": "constant", "weight_decay": 0.0, "max_grad_norm": 1.0}
    after |= {"micro_batch_tokens": 128, "gradient_checkpointing": True}
    resumed = make_config(folder, algorithm={"pg_clip": 0.05}, learner=after, run={"total_steps": 50})
    with RunDir(tmp_path / "run") as run:
        trainer = RankZero(first, folder, run.path)
        for step in (1, 2, 3):
            used = configured_hyperparameters(first, step)
            run.write_step(step, rows := [replace(r, group=r.group + 8 * step) for r in make_rows(folder, step=step)])
            trainer.train(step, rows, (), used)
            record_version(run, step, trainer, used)
            if step == 1:
                save(run, step, trainer)
        recorded = dict(run.versions)
        assert recover(resumed, folder, run, Activity("learner"), RankZero).weights.version == 3
        assert run.versions == recorded


def test_a_replay_makes_token_records_that_a_kill_prevented(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model")
    config = make_config(folder, algorithm={"pg_clip": 0.05}, learner={"token_records": True})
    with RunDir(tmp_path / "run") as run:
        trainer = RankZero(config, folder, run.path)
        run.write_step(1, rows := make_rows(folder, step=1))
        run.steplog.write_tokens(1, trainer.train(1, rows, (), configured_hyperparameters(config, 1)).tokens)
        path = token_file(run.steplog.folder, 1)
        written = pq.read_table(path)
        assert written.num_rows == len(rows)
        changed = path.stat().st_mtime_ns
        recover(config, folder, run, Activity("learner"), RankZero)
        assert path.stat().st_mtime_ns == changed, "it is not written twice"
        path.unlink()
        recover(config, folder, run, Activity("learner"), RankZero)
        assert pq.read_table(path).equals(written)
        run.steplog.remove([1])
        assert not path.exists()


def version_of(state: RecoveredState, version: int) -> PolicyWeights:
    return state.trainer.begin_version(version, "", is_reused=False)()


def test_a_version_that_is_not_finite_is_refused_wherever_one_is_made(config: Config, scored: MakeScored) -> None:
    class NonFiniteTrainer(RecordingTrainer):
        def policy(self) -> Any:
            tensors = super().policy()
            next(iter(tensors.values()))[0] = math.inf
            return tensors

    with pytest.raises(NotFiniteError, match=r"version 7 is not published: 1 of \d+ of its tensors .* and resume"):
        weights_from(7, NonFiniteTrainer(config, config.run_dir.parent / "model", config.run_dir).policy())
    with RunDir(config.run_dir) as run:
        with pytest.raises(InputError, match="version 0 is not published") as refused:
            recovered(config, run, NonFiniteTrainer)
        assert (refused.value.where, refused.value.fix) == ("model.path", "Give another model")
        run.write_step(1, [replace(row_from_scored(scored(1)), step=1)])
        with pytest.raises(InputError, match="replaying it ends as it did before: version 1 is not published"):
            recovered(config, run, NonFiniteTrainer)
        assert run.versions == {}


def test_a_policy_has_the_names_and_shapes_of_the_model_files(config: Config) -> None:
    folder = config.run_dir.parent / "model"
    file = folder / "model.safetensors"
    tensors = load_file(file)
    policy = weights_from(0, tensors)

    def compared() -> tuple[str, ...]:
        return compare_with_files(folder, read_model_files(folder, allow_pickle=False), policy)

    assert compared() == ()
    extra = {"lm_head.weight": tensors["model.embed_tokens.weight"].clone(), "rotary.inv_freq": torch.ones(2)}
    save_file(tensors | extra, file)
    (notice,) = compared()
    assert notice.startswith(f"2 of {len(tensors) + 2} tensors in {folder} are no part of the policy")
    assert notice.endswith(": lm_head.weight, rotary.inv_freq")
    save_file(tensors | {"model.norm.weight": torch.ones(7)}, file)
    with pytest.raises(InputError, match=r"has model\.norm\.weight of shape \[32\], .* have shape \[7\]"):
        compared()
    save_file({name.removeprefix("model."): tensor for name, tensor in tensors.items()}, file)
    with pytest.raises(InputError, match=r"have no tensor of this name, so no generator .* Save the model again"):
        compared()


def logged_steps(run: RunDir, scored: Any, steps: Collection[int]) -> None:
    for step in steps:
        run.write_step(step, [replace(row_from_scored(scored(step)), step=step)])


def test_a_step_that_is_left_out_changes_no_weights_and_moves_no_other_step(config: Config, scored: MakeScored) -> None:
    config = config.model_copy(
        update={"learner": config.learner.model_copy(update={"schedule": "cosine", "warmup_steps": 2})}
    )
    with RunDir(config.run_dir) as run:
        train_run(config, run, scored, steps=1, checkpoints=(1,))
        logged_steps(run, scored, (2, 3))
        run.leave_out(2)
    # A kill before its version is on record, and no flag at the next resume.
    with RunDir(config.run_dir) as run:
        state = recovered(config, run)
        assert recording(state).used == {3: configured_hyperparameters(config, 3)}
        digests = [run.versions[version].digest for version in range(4)]
        assert digests[1] == digests[2] != digests[3] == state.weights.digest
        assert run.settlements.ranges() == [(1, 3)]
        assert state.notices == (
            "Step 2 is left out: its rollouts stay in the log, and version 2 has the weights of version 1.",
        )
    assert [record.step for record in RunLog(config.run_dir).steps()] == [3]


def test_several_steps_may_be_left_out_one_after_the_other(config: Config, scored: MakeScored) -> None:
    with RunDir(config.run_dir) as run:
        train_run(config, run, scored, steps=1, checkpoints=())
        logged_steps(run, scored, (2,))
        run.leave_out(2)
        run.leave_out(2)
        recovered(config, run)
    with RunDir(config.run_dir) as run:
        logged_steps(run, scored, (3, 4))
        run.leave_out(3)
        state = recovered(config, run)
        assert list(recording(state).used) == [1, 4]
        # A restart under the same option, after the checkpoint too.
        save(run, 4, state.trainer)
        run.leave_out(3)
        assert recovered(config, run).notices == ()
    assert RunLog(config.run_dir).left_out() == [2, 3]


def test_the_running_moments_keep_the_rewards_of_a_step_that_is_left_out(config: Config, scored: MakeScored) -> None:
    """A step that was logged behind it has them in its advantages, and a replay may make those anew."""
    config = config.with_keys(algorithm={"reward_norm": "running"})
    with RunDir(config.run_dir) as run:
        logged_steps(run, scored, (1, 2))
        count = recovered(config, run).assembler.moments.count
        assert count > 0
    with RunDir(config.run_dir) as run:
        logged_steps(run, scored, (3,))
        run.leave_out(3)
        assert recovered(config, run).assembler.moments.count > count


@pytest.mark.parametrize(
    ("step", "reason"),
    [
        (1, "lies before the last checkpoint, of step 1"),
        (2, "was applied: policy version 2 is on record"),
        (4, "is not logged: the log ends with step 3"),
    ],
)
def test_a_step_that_cannot_be_left_out_is_refused_with_the_reason(
    config: Config, scored: MakeScored, step: int, reason: str
) -> None:
    with RunDir(config.run_dir) as run:
        train_run(config, run, scored, steps=2, checkpoints=(1,))
        logged_steps(run, scored, (3,))
        with pytest.raises(InputError, match=f"--leave-out: step {step} {reason}"):
            run.leave_out(step)
        assert RunLog(config.run_dir).untrained_step() == 3
        run.leave_out(3)
        assert RunLog(config.run_dir).untrained_step() is None


def test_a_replay_passes_over_a_step_that_is_left_out(config: Config, scored: MakeScored, tmp_path: Path) -> None:
    with RunDir(config.run_dir) as run:
        train_run(config, run, scored, steps=1, checkpoints=())
        logged_steps(run, scored, (2, 3))
        run.leave_out(2)
        recovered(config, run)
        recorded = {number: version.digest for number, version in run.versions.items()}
    folder = tmp_path / "replay"
    (folder / "log").mkdir(parents=True)
    for file in [*(config.run_dir / "log").glob("step-*"), config.run_dir / "log" / "left_out.jsonl"]:
        (folder / "log" / file.name).write_bytes(file.read_bytes())
    model = config.run_dir.parent / "model"
    make_steps(config, model, folder, 3, RecordingTrainer, lambda: False)
    with RunDir(folder) as run:
        assert {number: version.digest for number, version in run.versions.items()} == recorded
