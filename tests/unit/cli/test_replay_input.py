"""Refusals of `gspo replay` with their reasons, its cost, and the rules of its comparison.

What it is not: a replay. tests/integration/cli/test_replay.py has those.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from gspo.cli.processes.exit_codes import RunError
from gspo.cli.replay.replay_folder import check_folder, default_folder, fill
from gspo.cli.replay.replay_keys import _reason_without_effect, change_keys
from gspo.cli.replay.replay_plan import ReplayPlan, make_plan
from gspo.cli.replay.replay_process import ReplayProcess
from gspo.cli.replay.step_comparison import StepComparison, first_difference
from gspo.cli.rundir.start import environment
from gspo.common.config.loading import CONFIG_NAME, ENVIRONMENT_NAME, parse_config, write_config
from gspo.common.config.reference import explain
from gspo.common.errors import InputError
from gspo.runlog.run_log import StepRecord, VersionRecord


def make_run_dir(
    folder: Path, *, steps: range = range(1, 13), checkpoints: tuple[int, ...] = (8,), **sections: Any
) -> Path:
    """A run directory with a log of empty step files: a plan opens none."""
    keys: dict[str, Any] = {
        "name": "run",
        "model": {"path": str(folder / "model")},
        "data": {"prompts": "prompts.jsonl"},
        "reward": {"functions": [{"path": "reward.py"}]},
        "run": {"total_steps": 12, "directory": str(folder)},
        "learner": {"threads": 1},
    }
    for name, section in sections.items():
        keys[name] = {**keys.get(name, {}), **section}
    config, path = parse_config(keys, folder), folder / "run"
    (path / "log").mkdir(parents=True)
    (folder / "model").mkdir()
    write_config(config, path / CONFIG_NAME)
    (path / ENVIRONMENT_NAME).write_text(json.dumps(environment(config)))
    for step in steps:
        (path / "log" / f"step-{step:06d}.parquet").touch()
    versions = [{"version": n, "step": n, "digest": f"{n:064x}", "dtype": "float32"} for n in range(13)]
    figures = [
        {"step": n, "version": n, "unix_s": 0.0, "figures": {"train_s": 30.0, "publish_s": 2.0, "wait_s": 900.0}}
        for n in range(1, 13)
    ]
    for name, records in (("policy.jsonl", versions), ("metrics.jsonl", figures)):
        (path / "log" / name).write_text("".join(json.dumps(record) + "\n" for record in records))
    for step in checkpoints:
        checkpoint = path / "checkpoints" / f"step-{step:06d}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "caller.json").write_text("{}")
        manifest = {"step": step, "files": {"caller.json": {"bytes": 2, "sha256": ""}}}
        (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    return path


def planned(path: Path, steps: str | None = None, *settings: str) -> ReplayPlan:
    return make_plan(path, steps, settings)


@pytest.mark.parametrize(
    ("steps", "start", "first", "last"),
    [("10..11", 8, 10, 11), ("7..9", 0, 7, 9), ("9", 8, 9, 9), ("..3", 0, 1, 3), ("11..", 8, 11, 12), (None, 0, 1, 12)],
)
def test_it_starts_at_the_nearest_checkpoint_and_says_the_cost_as_recorded(
    tmp_path: Path, steps: str | None, start: int, first: int, last: int
) -> None:
    plan = planned(make_run_dir(tmp_path), steps)
    assert (plan.start, plan.first, plan.last, plan.num_steps) == (start, first, last, last - start)
    # Without the wait for rollouts.
    assert plan.seconds == pytest.approx(32.0 * (last - start))
    begin = f"the checkpoint of step {start}" if start else f"the model ({tmp_path / 'model'})"
    assert f"to make, {start + 1} to {last}, from {begin}." in plan.describe()[0]
    assert "32 s a step" in plan.describe()[1]
    assert plan.is_exact and plan.describe()[2] == "Every digest and every figure must be the recorded one."


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ("13", "step 13 is not in the log, which can make 9..12"),
        ("9..9999999999999", "step 13 is not in the log, which can make 9..12"),
        ("6..10", "step 6 is in the log, but no kept checkpoint leads there, nor does the log from step 1"),
        ("0..9", "step 0 is not in the log"),
        ("12..9", "'12..9' begins after its end. Write them as 10..20, 10.., ..20 or 12"),
        ("a..b", "'a..b' is not a range of steps"),
        ("..", "'..' is not a range of steps"),
        ("", "'' is not a range of steps"),
        ("-3", "'-3' is not a range of steps"),
    ],
)
def test_steps_that_the_log_cannot_make_are_refused_with_the_range_there_is(
    tmp_path: Path, steps: str, message: str
) -> None:
    # Under keep_log_steps the first step files are gone.
    path = make_run_dir(tmp_path, steps=range(6, 13))
    with pytest.raises(InputError) as refused:
        planned(path, steps)
    assert refused.value.where == "--steps" and message in str(refused.value)


def test_a_checkpoint_that_is_not_whole_is_no_start(tmp_path: Path) -> None:
    path = make_run_dir(tmp_path)
    (path / "checkpoints" / "step-000008" / "caller.json").write_text("{ }")
    assert planned(path, "10").start == 0


def test_a_log_without_a_step_to_make_is_refused(tmp_path: Path) -> None:
    path = make_run_dir(tmp_path, steps=range(6, 8), checkpoints=())
    with pytest.raises(InputError, match=r"no step can be made again: the log has 6\.\.7, and no checkpoint or step 1"):
        planned(path)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("generation.dtype=bfloat16", "cannot change a replay: it decides how rollouts are sampled"),
        ("sampling.temperature=0.5", "cannot change a replay: it decides how rollouts are sampled"),
        ("reward.timeout_s=3", "cannot change a replay: it decides rewards"),
        ("algorithm.mask_truncated=true", "it acts before a step is logged"),
        ("algorithm.behavior_level=sequence", "Set geometric, which it was here, or product, which they mean"),
        ("algorithm.adv_estimator=rloo", "contradicts adv_estimator: rloo, which means leave_one_out"),
        ("algorithm.preset=grpo", "set the keys that it means"),
        ("run.total_steps=50", "learner.schedule constant does not depend on it"),
        ("learner.mismatch_every=0", "it only measures along the way"),
        ("learner.clip_split_every=0", "it only measures along the way"),
        ("algorithm.pg_clip_hihg=0.1", "is not a key. Did you mean 'algorithm.pg_clip_high'?"),
        ("algorithm.pg_clip_high", "is not KEY=VALUE"),
        ("algorithm.pg_clip_high=[", "is not YAML"),
        ("algorithm.pg_clip_high=-1", "algorithm.pg_clip_high: -1 is not allowed"),
        ("algorithm.ppo_epochs=1", "1 is its value in this run"),
        ("algorithm.kl_loss_coef=0.5", "has no effect without algorithm.use_kl_loss"),
        ("algorithm.dual_clip_loss=0.5", "as c must be above 1"),
        ("learner.lora.rank=8", "gives adapters another shape than the checkpoint of step 8 has"),
    ],
)
def test_a_key_that_cannot_act_is_refused_with_the_reason(tmp_path: Path, setting: str, message: str) -> None:
    with pytest.raises(InputError) as refused:
        planned(make_run_dir(tmp_path), "10..12", setting)
    assert message in str(refused.value)


def test_every_key_either_acts_on_a_replay_or_has_its_reason() -> None:
    """Each new key of training belongs into this list, and each other one into the table of reasons."""
    acting = {key.name for key in explain() if not _reason_without_effect(key.name, {})}
    algorithm = (
        *("importance_sampling", "ratio_of", "objective", "ppo_epochs", "pg_clip", "pg_clip_low", "pg_clip_high"),
        *("pg_clip_reference_length", "dual_clip_loss", "loss_agg_mode", "old_logprobs", "routing_replay"),
        *("behavior_correction", "behavior_level", "behavior_low", "behavior_high", "use_kl_loss", "kl_loss_coef"),
        *("kl_kind", "entropy_coef", "add_token_level_kl", "kl_coef", "gamma", "whiten_advantages", "advantage_clip"),
        *("loss.path", "loss.entry", "loss.reference", "adv_estimator", "num_mini_batches", "reward_norm"),
        *("reward_shift", "reward_scale", "reward_clip"),
    )
    learner = {key.name for key in explain() if key.name.startswith("learner.")}
    learner -= {"learner.mismatch_every", "learner.clip_split_every"}
    teacher = {
        f"teacher.{name}" for name in ("path", "coef", "kl_in", "kl_discount", "trust_remote_code", "allow_pickle")
    }
    model = {key.name for key in explain() if key.name.startswith("model.")}
    assert acting == {f"algorithm.{name}" for name in algorithm} | learner | teacher | model


def test_hyperparameters_that_are_changed_follow_the_configuration_and_others_the_record(tmp_path: Path) -> None:
    path = make_run_dir(tmp_path)
    changed = planned(path, "9..12", "learner.warmup_steps=3", "learner.weight_decay=1e-2").changed
    assert changed.configured == ["learning_rate", "weight_decay"]
    assert changed.config.learner.weight_decay == 0.01
    assert planned(path, "9..12", "algorithm.pg_clip_high=1e-3").changed.configured == []
    assert planned(path, "9..12", "learner.micro_batch_tokens=4096").changed.configured == ["micro_batch_tokens"]


def test_what_rounds_otherwise_is_compared_within_a_tolerance_and_says_why(tmp_path: Path) -> None:
    path = make_run_dir(tmp_path)
    plan = planned(path, "9..12", "learner.threads=2")
    assert (plan.is_exact, plan.rounding) == (False, ("learner.threads: 1 -> 2",))
    assert plan.describe()[2].startswith("Digests cannot be expected to be equal, so figures are compared: learner.")
    facts = json.loads((path / ENVIRONMENT_NAME).read_text())
    (path / ENVIRONMENT_NAME).write_text(json.dumps({**facts, "torch": "1.0", "gspo": "0.0.1"}))
    plan = planned(path, "9..12")
    assert plan.rounding[0].startswith("torch was 1.0 and is ") and not plan.is_exact
    assert plan.notes[0].startswith("gspo 0.0.1 made this run, and this is ")


def test_ranks_that_were_started_by_hand_are_asked_for(tmp_path: Path) -> None:
    path = make_run_dir(tmp_path, learner={"ranks": 0})
    with pytest.raises(InputError, match=r"learner\.ranks: 0: this run's ranks were .* Add --with learner\.ranks=N"):
        planned(path, "9..12")
    assert not planned(path, "9..12", "learner.ranks=1").is_exact


def test_a_step_that_is_not_recorded_yet_is_left_out(tmp_path: Path) -> None:
    """A run that trains has logged a step before its version is on record."""
    path = make_run_dir(tmp_path, steps=range(1, 14))
    assert planned(path).last == 12
    (path / "lock").write_text(f"pid {os.getpid()} on host here")
    assert planned(path).notes == (), "this process is no learner"


def test_the_folder_is_of_one_replay_and_outside_of_what_the_run_has(tmp_path: Path) -> None:
    path = make_run_dir(tmp_path)
    plan, wider = planned(path, "9..12"), planned(path, "9..12", "algorithm.pg_clip_high=1e-3")
    assert default_folder(plan) == path / "replays" / "steps-9-12"
    assert default_folder(wider).name.startswith("steps-9-12-") and default_folder(wider) != default_folder(plan)
    for bad in (path, path / "log", path / "checkpoints" / "x"):
        with pytest.raises(InputError, match="is in the run directory, which a replay does not change"):
            check_folder(plan, bad)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").touch()
    with pytest.raises(InputError, match="exists and is not the folder of a replay"):
        check_folder(plan, tmp_path / "mine")


def test_a_folder_is_taken_again_only_for_the_same_files_and_keys(tmp_path: Path) -> None:
    path, out = make_run_dir(tmp_path), tmp_path / "out"
    plan = planned(path, "9..12")
    assert (fill(plan, out), fill(plan, out)) == (True, False)
    assert sorted(file.name for file in (out / "log").glob("step-*")) == [
        f"step-0000{n:02d}.parquet" for n in range(9, 13)
    ]
    assert (out / "checkpoints" / "step-000008" / "manifest.json").exists()
    (out / "log" / "metrics.jsonl").write_text("of an earlier replay")
    (path / "log" / "step-000011.parquet").write_text("altered")
    assert fill(plan, out) and not (out / "log" / "metrics.jsonl").exists()
    # A file that the run removes meanwhile stays here.
    (path / "log" / "step-000009.parquet").unlink()
    assert (out / "log" / "step-000009.parquet").exists()
    with pytest.raises(InputError, match="step files or the checkpoint of step 8 are gone"):
        fill(plan, out)


def test_a_run_of_another_version_whose_keys_are_unknown_is_named(tmp_path: Path) -> None:
    path = make_run_dir(tmp_path)
    (path / CONFIG_NAME).write_text((path / CONFIG_NAME).read_text() + "new_key: 1\n")
    facts = json.loads((path / ENVIRONMENT_NAME).read_text())
    (path / ENVIRONMENT_NAME).write_text(json.dumps({**facts, "gspo": "9.9"}))
    with pytest.raises(InputError, match=r"new_key: is not a key .* gspo 9\.9 made this run, and this is "):
        planned(path)


def step_of(number: int, **figures: float) -> StepRecord:
    return StepRecord(step=number, version=number, unix_s=0.0, figures=figures)


@pytest.mark.parametrize(
    ("tolerance", "after", "is_equal"),
    [
        (None, 0.5, True),
        (None, 0.5 + 2**-53, False),
        (0.01, 0.5049, True),
        (0.01, 0.52, False),
        (0.01, 0.5191, True),  # 2.0 is the largest recorded one: 0.02 is allowed
    ],
)
def test_a_figure_is_equal_to_the_bit_or_within_the_tolerance(
    tmp_path: Path, tolerance: float | None, after: float, is_equal: bool
) -> None:
    largest = 2.0 if after == 0.5191 else 0.5
    recorded = {1: step_of(1, loss=0.5), 2: step_of(2, loss=-largest)}
    values = StepComparison(tolerance, recorded, tmp_path).figures(step_of(1, loss=after, new=1.0))
    assert [(value.name, value.is_equal) for value in values] == [("loss", is_equal), ("new", None)]
    assert (first_difference(values) is None) == is_equal


def test_digests_are_compared_in_one_dtype_and_where_bits_can_be_equal(tmp_path: Path) -> None:
    record = VersionRecord(version=3, step=3, digest="a", dtype="float32")
    exact, near = (StepComparison(tolerance, {}, tmp_path) for tolerance in (None, 0.01))
    assert exact.version(record, record).is_equal is True
    assert exact.version(record, record.model_copy(update={"digest": "b"})).is_equal is False
    assert exact.version(record, record.model_copy(update={"digest": "b", "dtype": "bfloat16"})).is_equal is None
    assert near.version(record, record.model_copy(update={"digest": "b"})).is_equal is None


def test_settings_of_one_replay_leave_the_recorded_keys_as_they_are(tmp_path: Path) -> None:
    keys = {"name": "a", "model": {"path": "m"}, "data": {"prompts": "p"}, "run": {"total_steps": 3}}
    keys |= {"reward": {"functions": [{"path": "r.py"}]}, "algorithm": {"ppo_epochs": 1}}
    before = json.dumps(keys)
    changed = change_keys(keys, tmp_path, ["algorithm.ppo_epochs=3", "learner.adam_betas=[0.8, 0.9]"])
    assert (json.dumps(keys), changed.values["algorithm.ppo_epochs"]) == (before, (1, 3))
    assert changed.config.learner.adam_betas == (0.8, 0.9) and changed.trains_otherwise


def test_a_model_that_has_moved_is_named_with_the_key_that_finds_it(tmp_path: Path) -> None:
    path = make_run_dir(tmp_path)
    (tmp_path / "model").rename(tmp_path / "moved")
    with pytest.raises(InputError, match=r"is not a folder here\. Put it back, or add --with model\.path=FOLDER"):
        planned(path, "9..12")
    plan = planned(path, "9..12", f"model.path={tmp_path / 'moved'}")
    assert plan.is_exact, "the digest of the start says whether it is the same model"


def test_the_reason_of_a_process_that_cannot_start_is_the_error(tmp_path: Path) -> None:
    plan = planned(make_run_dir(tmp_path), "9..12")
    out = tmp_path / "out"
    fill(plan, out)
    spoken: list[str] = []
    (tmp_path / "model").rmdir()
    with pytest.raises(RunError, match=r"model\.path") as refused:
        ReplayProcess(out, ["config.yaml", "--last", "12"], 5.0, spoken.append).run(lambda: False)
    assert refused.value.exit_code == 2
