"""The run directory survives kills at every moment, and has one learner."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gspo.common.errors import InputError
from gspo.learner.assembly.rows import Row, row_from_scored
from gspo.learner.assembly.settlements import EndedGroup, GroupEnding
from gspo.learner.storage.run_directory import PolicyVersion, RunDir
from gspo.runlog.run_log import RunLog
from gspo_proto.learner_pb2 import REWARD_SPREAD_DIFFERENT, REWARD_SPREAD_EQUAL, REWARD_SPREAD_UNSPECIFIED
from gspo_proto.rollout_pb2 import EvaluationDone
from tests.unit.learner.conftest import MakeScored

FORK = multiprocessing.get_context("fork")


@pytest.fixture
def rows(scored: MakeScored) -> Callable[..., list[Row]]:
    """Rows of a step: one for each group."""
    return lambda step, *groups: [replace(row_from_scored(scored(group)), step=step) for group in groups]


def in_a_process(work: Callable[[], None]) -> int | None:
    """Run `work` in a process of its own; its exit code, negative for a signal."""
    process = FORK.Process(target=work)
    process.start()
    process.join(timeout=60)
    return process.exitcode


def die(*_: object, **__: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


# One learner


def test_a_second_learner_is_refused_with_the_holder_of_the_lock(tmp_path: Path) -> None:
    with RunDir(tmp_path), pytest.raises(InputError) as refused:
        RunDir(tmp_path)
    assert refused.value.where == str(tmp_path)
    assert f"pid {os.getpid()} on host {os.uname().nodename}" in refused.value.rule
    with RunDir(tmp_path):
        pass  # closing let it go


def test_a_learner_in_another_process_is_refused_until_the_holder_is_killed(tmp_path: Path) -> None:
    holds = FORK.Event()

    def hold() -> None:
        _kept = RunDir(tmp_path)
        holds.set()
        signal.pause()

    holder = FORK.Process(target=hold)
    holder.start()
    try:
        assert holds.wait(timeout=60)
        with pytest.raises(InputError, match=f"pid {holder.pid} on host"):
            RunDir(tmp_path)
    finally:
        holder.kill()
        holder.join(timeout=60)
    with RunDir(tmp_path) as run:
        assert run.epoch == 2


def test_each_start_raises_the_epoch(tmp_path: Path) -> None:
    for expected in (1, 2, 3):
        with RunDir(tmp_path) as run:
            assert run.epoch == expected
            assert (tmp_path / "epoch").read_text() == f"{expected}\n"


def test_a_refused_learner_does_not_raise_the_epoch(tmp_path: Path) -> None:
    with RunDir(tmp_path):
        with pytest.raises(InputError):
            RunDir(tmp_path)
        assert (tmp_path / "epoch").read_text() == "1\n"


# Steps


def test_a_step_is_read_back_and_its_groups_are_trained(tmp_path: Path, rows: Callable[..., list[Row]]) -> None:
    with RunDir(tmp_path) as run:
        run.write_step(1, rows(1, 4, 2))
        assert (tmp_path / "log" / "step-000001.parquet").exists()
        assert [row.group for row in run.steplog.read(1)] == [4, 2]
    with RunDir(tmp_path) as run:
        assert run.steplog.steps() == [1]
        assert run.settlements.get(4) is run.settlements.get(2) is GroupEnding.TRAINED
        assert 3 not in run.settlements


def test_a_logged_step_is_never_replaced(tmp_path: Path, rows: Callable[..., list[Row]]) -> None:
    with RunDir(tmp_path) as run:
        run.write_step(1, rows(1, 0))
        with pytest.raises(FileExistsError, match="step 1 is logged already"):
            run.write_step(1, rows(1, 5))
        with pytest.raises(FileExistsError):
            run.steplog.write(1, rows(1, 5))  # the file system itself refuses, too
        assert [row.group for row in run.steplog.read(1)] == [0]
        assert [file.name for file in (tmp_path / "log").glob("step*")] == ["step-000001.parquet"]


def test_a_group_is_in_one_step_only(tmp_path: Path, rows: Callable[..., list[Row]]) -> None:
    with RunDir(tmp_path) as run:
        run.write_step(1, rows(1, 0))
        with pytest.raises(ValueError, match="group 0 is settled already: 'trained'"):
            run.write_step(2, rows(2, 0))
        with pytest.raises(ValueError, match=r"rows of step \[3\] cannot be logged as step 2"):
            run.write_step(2, rows(3, 1))
        assert run.steplog.steps() == [1]


def test_a_kill_between_write_and_link_leaves_no_step(
    tmp_path: Path, rows: Callable[..., list[Row]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_and_die() -> None:
        monkeypatch.setattr(os, "link", die)
        RunDir(tmp_path).write_step(1, rows(1, 0))

    assert in_a_process(write_and_die) == -signal.SIGKILL
    assert (tmp_path / "log" / "step-000001.parquet.tmp").exists()
    with RunDir(tmp_path) as run:
        assert run.steplog.steps() == []
        assert 0 not in run.settlements
        assert not list((tmp_path / "log").glob("*.tmp"))
        run.write_step(1, rows(1, 0))


def test_a_kill_after_link_leaves_the_whole_step(
    tmp_path: Path, rows: Callable[..., list[Row]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_and_die() -> None:
        run = RunDir(tmp_path)
        monkeypatch.setattr(Path, "unlink", die)
        run.write_step(1, rows(1, 0))

    assert in_a_process(write_and_die) == -signal.SIGKILL
    with RunDir(tmp_path) as run:
        assert [row.group for row in run.steplog.read(1)] == [0]
        assert not list((tmp_path / "log").glob("*.tmp"))


def test_the_log_is_on_the_disk_before_write_step_returns(
    tmp_path: Path, rows: Callable[..., list[Row]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with RunDir(tmp_path) as run:
        calls: list[str] = []
        fsync, link = os.fsync, os.link

        def noted_fsync(descriptor: int) -> None:
            calls.append(_name(descriptor))
            fsync(descriptor)

        def noted_link(source: Path, target: Path) -> None:
            calls.append("link")
            link(source, target)

        monkeypatch.setattr(os, "fsync", noted_fsync)
        monkeypatch.setattr(os, "link", noted_link)
        run.write_step(1, rows(1, 0))
        assert calls == ["step-000001.parquet.tmp", "link", "log"]
        calls.clear()
        run.settle([EndedGroup(1, GroupEnding.STALE, "old")])
        run.append_version(1, "aa", "float32")
        assert calls == ["settled.jsonl", "policy.jsonl"]


def _name(descriptor: int) -> str:
    return Path(f"/proc/self/fd/{descriptor}").readlink().name


def test_a_missing_step_stops_the_replay(tmp_path: Path, rows: Callable[..., list[Row]]) -> None:
    with RunDir(tmp_path) as run:
        for step in (1, 2, 3, 4):
            run.write_step(step, rows(step, step))
        assert run.steps_to_replay(after=2) == [3, 4]
        assert run.steps_to_replay(after=4) == []
        run.steplog.remove([3])
        assert run.steps_to_replay(after=3) == [4]
        with pytest.raises(ValueError, match=r"step-000003.parquet is missing"):
            run.steps_to_replay(after=1)


# Settlements


def test_settlements_are_counted_found_and_kept(tmp_path: Path, rows: Callable[..., list[Row]]) -> None:
    with RunDir(tmp_path) as run:
        run.write_step(1, rows(1, 0, 1))
        run.settle([EndedGroup(2, GroupEnding.FAILED, "hangs"), EndedGroup(5, GroupEnding.STALE, "old")])
        run.settle([EndedGroup(6, GroupEnding.UNUSED, "the run ended")])
    with RunDir(tmp_path) as run:
        assert run.settlements.ranges() == [(0, 2), (5, 6)]
        assert run.settlements.counts() == {"trained": 2, "filtered": 0, "stale": 1, "failed": 1, "unused": 1}
    lines = [json.loads(line) for line in (tmp_path / "log" / "settled.jsonl").read_text().splitlines()]
    assert [(line["group"], line["settlement"], line["reason"]) for line in lines] == [
        (2, "failed", "hangs"),
        (5, "stale", "old"),
        (6, "unused", "the run ended"),
    ]


def test_unused_groups_are_open_again_once_the_run_continues(tmp_path: Path, rows: Callable[..., list[Row]]) -> None:
    def results(run: RunDir) -> list[int]:
        return list(run.results.page("run", 0).groups)

    with RunDir(tmp_path) as run:
        run.write_step(1, rows(1, 0, 1))
        run.settle([EndedGroup(3, GroupEnding.FAILED, "hangs")])
        run.settle([EndedGroup(2, GroupEnding.UNUSED, "the run ended"), EndedGroup(4, GroupEnding.UNUSED, "same")])
        assert results(run) == [0, 1, 3, 2, 4]
        run.reopen_unused()
        assert (run.settlements.ranges(), results(run)) == ([(0, 1), (3, 3)], [0, 1, 3])
    with RunDir(tmp_path) as run:
        assert (run.settlements.ranges(), results(run)) == ([(0, 1), (3, 3)], [0, 1, 3])
        run.write_step(2, rows(2, 2))
        run.settle([EndedGroup(4, GroupEnding.UNUSED, "the run ended again")])
    with RunDir(tmp_path) as run:
        assert run.settlements.counts() == {"trained": 3, "filtered": 0, "stale": 0, "failed": 1, "unused": 1}
        assert results(run) == [0, 1, 3, 2, 4]
    assert [(record.group, record.reason) for record in RunLog(tmp_path).settled()] == [
        (3, "hangs"),
        (4, "the run ended again"),
    ]


def test_a_group_is_settled_once(tmp_path: Path, rows: Callable[..., list[Row]]) -> None:
    with RunDir(tmp_path) as run:
        run.settle([EndedGroup(2, GroupEnding.FAILED, "hangs")])
        with pytest.raises(ValueError, match="group 2 is settled already: 'failed'"):
            run.settle([EndedGroup(3, GroupEnding.STALE, "old"), EndedGroup(2, GroupEnding.STALE, "old")])
        with pytest.raises(ValueError, match="group 2 is settled already"):
            run.write_step(1, rows(1, 2))
        assert 3 not in run.settlements
    assert len((tmp_path / "log" / "settled.jsonl").read_text().splitlines()) == 1


def test_a_log_that_settles_a_group_twice_is_refused_and_the_lock_let_go(tmp_path: Path) -> None:
    line = json.dumps({"group": 2, "settlement": "failed", "reason": "hangs", "unix_s": 1.0}) + "\n"
    RunDir(tmp_path).close()
    (tmp_path / "log" / "settled.jsonl").write_text(line * 2)
    with pytest.raises(ValueError, match="group 2 is settled 'failed'"):
        RunDir(tmp_path)
    (tmp_path / "log" / "settled.jsonl").write_text(line)
    with RunDir(tmp_path) as run:
        assert run.settlements.get(2) is GroupEnding.FAILED


@pytest.mark.parametrize("torn", ['{"group": 3, "settl', '{"group": 3, "settlement": "stale", "reason": ""}'])
def test_a_torn_last_line_is_cut_off(tmp_path: Path, torn: str) -> None:
    with RunDir(tmp_path) as run:
        run.settle([EndedGroup(2, GroupEnding.FAILED, "hangs")])
    path = tmp_path / "log" / "settled.jsonl"
    whole = path.read_text()
    path.write_text(whole + torn)
    with RunDir(tmp_path) as run:
        assert path.read_text() == whole
        assert run.settlements.ranges() == [(2, 2)]
        run.settle([EndedGroup(3, GroupEnding.STALE, "old")])
    with RunDir(tmp_path) as run:
        assert run.settlements.ranges() == [(2, 3)]


def test_a_broken_line_before_the_last_is_an_error(tmp_path: Path) -> None:
    RunDir(tmp_path).close()
    (tmp_path / "log" / "policy.jsonl").write_text('{"version": 0, "digest\n{"version": 1}\n')
    with pytest.raises(ValueError, match=r"policy.jsonl, line 1: not a line that the learner wrote"):
        RunDir(tmp_path)


# Versions, figures, evaluations


def test_versions_are_found_by_number_after_a_restart(tmp_path: Path) -> None:
    with RunDir(tmp_path) as run:
        run.append_version(0, "aa", "float32")
        run.append_version(1, "bb", "float32")
    with RunDir(tmp_path) as run:
        assert run.versions == {
            number: PolicyVersion(version=number, step=number, digest=digest, dtype="float32", hyperparameters=None)
            for number, digest in enumerate(("aa", "bb"))
        }


def test_a_replayed_version_is_written_again_only_with_another_digest(tmp_path: Path) -> None:
    with RunDir(tmp_path) as run:
        run.append_version(1, "bb", "float32")
        run.append_version(1, "bb", "float32")
        run.append_version(1, "cc", "float32")
    lines = (tmp_path / "log" / "policy.jsonl").read_text().splitlines()
    assert [json.loads(line)["digest"] for line in lines] == ["bb", "cc"]
    with RunDir(tmp_path) as run:
        assert run.versions[1].digest == "cc"


def test_a_replayed_step_is_not_measured_twice(tmp_path: Path) -> None:
    with RunDir(tmp_path) as run:
        run.append_metrics(1, {"loss": 0.5, "k3": float("nan")})
    with RunDir(tmp_path) as run:
        run.append_metrics(1, {"loss": 0.5})
        run.append_metrics(2, {"loss": 0.25})
    lines = [json.loads(line) for line in (tmp_path / "log" / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["version"], line["figures"]) for line in lines] == [
        (1, 1, {"loss": 0.5, "k3": None}),
        (2, 2, {"loss": 0.25}),
    ]


def test_the_time_that_steps_took_is_known_after_a_restart(tmp_path: Path) -> None:
    with RunDir(tmp_path) as run:
        assert run.trained_s == 0.0
        run.append_metrics(1, {"step_s": 1.5})
        run.append_metrics(2, {"step_s": float("nan")})
        run.append_metrics(3, {"step_s": 2.0})
    with RunDir(tmp_path) as run:
        assert run.trained_s == 3.5


def evaluated(version: int, **figures: float) -> EvaluationDone:
    return EvaluationDone(evaluation=f"v{version}", version=version, step=version, figures=figures)


def recorded_evaluations(run_dir: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run_dir / "log" / "evaluations.jsonl").read_text().splitlines()]
    return [{key: line[key] for key in ("label", "version", "step", "figures")} for line in lines]


def test_an_evaluation_of_more_prompts_is_recorded_beside_one_of_fewer(tmp_path: Path) -> None:
    with RunDir(tmp_path) as run:
        run.append_evaluation(evaluated(2, num_prompts=50.0))
    with RunDir(tmp_path) as run:
        run.append_evaluation(evaluated(2, num_prompts=250.0))
        run.append_evaluation(evaluated(2, num_prompts=50.0))
        assert list(run.evaluations) == ["v2"]
    assert [line["figures"] for line in recorded_evaluations(tmp_path)] == [{"num_prompts": 50}, {"num_prompts": 250}]


def test_an_evaluation_is_recorded_once(tmp_path: Path) -> None:
    with RunDir(tmp_path) as run:
        run.append_evaluation(evaluated(0, sampled_mean=0.25))
    with RunDir(tmp_path) as run:
        run.append_evaluation(evaluated(0, sampled_mean=0.5))
        run.append_evaluation(evaluated(20, sampled_mean=0.5))
        assert list(run.evaluations) == ["v0", "v20"]
    assert recorded_evaluations(tmp_path) == [
        {"label": "v0", "version": 0, "step": 0, "figures": {"sampled_mean": 0.25}},
        {"label": "v20", "version": 20, "step": 20, "figures": {"sampled_mean": 0.5}},
    ]


# Checkpoints, and files that may be removed


def save(run: RunDir, step: int) -> Path:
    folder = run.checkpoints.begin(step)
    (folder / "model").mkdir()
    (folder / "model" / "weights.bin").write_bytes(b"12345")
    (folder / "position.json").write_text("{}")
    return run.checkpoints.finish(step)


def test_the_newest_whole_checkpoint_is_found(tmp_path: Path) -> None:
    with RunDir(tmp_path) as run:
        assert run.checkpoints.newest() is None
        save(run, 5)
        assert save(run, 10) == tmp_path / "checkpoints" / "step-000010"
    with RunDir(tmp_path) as run:
        assert (run.checkpoints.steps(), run.checkpoints.newest()) == ([5, 10], 10)
        with pytest.raises(FileExistsError):
            run.checkpoints.begin(10)


def test_a_checkpoint_that_was_not_finished_does_not_count(tmp_path: Path) -> None:
    with RunDir(tmp_path) as run:
        save(run, 5)
        (run.checkpoints.begin(10) / "weights.bin").write_bytes(b"123")
    with RunDir(tmp_path) as run:
        assert run.checkpoints.newest() == 5
        assert not list((tmp_path / "checkpoints").glob("*.tmp"))


@pytest.mark.parametrize("damage", ["shorter", "gone", "no manifest"])
def test_a_damaged_checkpoint_is_passed_over_and_can_be_made_again(tmp_path: Path, damage: str) -> None:
    with RunDir(tmp_path) as run:
        save(run, 5)
        weights = save(run, 10) / "model" / "weights.bin"
        if damage == "shorter":
            weights.write_bytes(b"1234")
        elif damage == "gone":
            weights.unlink()
        else:
            (run.checkpoints.path(10) / "manifest.json").unlink()
        assert run.checkpoints.newest() == 5
        save(run, 10)
        assert run.checkpoints.newest() == 10


def test_any_changed_bit_of_a_checkpoint_is_seen(tmp_path: Path) -> None:
    with RunDir(tmp_path) as run:
        folder = save(run, 10)
        assert run.checkpoints.damage(10) == ""
        for file in sorted(file for file in folder.rglob("*") if file.is_file()):
            intact = file.read_bytes()
            for bit in range(0, 8 * len(intact), 1 if len(intact) < 9 else 37):
                data = bytearray(intact)
                data[bit // 8] ^= 1 << bit % 8
                file.write_bytes(data)
                assert run.checkpoints.damage(10), (file.name, bit)
            file.write_bytes(intact)
        (folder / "model" / "more.bin").write_bytes(b"")
        assert run.checkpoints.damage(10)


def test_a_checkpoint_that_the_disk_cannot_read_is_damaged_but_a_missing_right_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raises(number: int) -> Callable[[Path], str]:
        def read(path: Path) -> str:
            raise OSError(number, os.strerror(number), str(path))

        return read

    with RunDir(tmp_path) as run:
        (run.checkpoints.begin(1) / "weights.bin").write_bytes(b"1234")
        run.checkpoints.finish(1)
        monkeypatch.setattr("gspo.learner.storage.checkpoints._sha256", raises(errno.EIO))
        assert run.checkpoints.damage(1).startswith("a file cannot be read (Input/output error)")
        monkeypatch.setattr("gspo.learner.storage.checkpoints._sha256", raises(errno.EACCES))
        with pytest.raises(PermissionError):
            run.checkpoints.damage(1)


def logged(run: RunDir, rows: Callable[..., list[Row]], num_steps: int) -> None:
    for step in range(1, num_steps + 1):
        run.write_step(step, rows(step, 10 * step))


def test_checkpoints_beyond_those_kept_go(tmp_path: Path, rows: Callable[..., list[Row]]) -> None:
    with RunDir(tmp_path) as run:
        logged(run, rows, 6)
        for step in (2, 4, 6):
            save(run, step)
        run.prune(keep_checkpoints=2, keep_log_steps=None)
        assert run.checkpoints.steps() == [4, 6]
        assert run.steplog.steps() == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(("keep", "kept"), [(1, [5, 6]), (3, [4, 5, 6]), (6, [1, 2, 3, 4, 5, 6])])
def test_step_files_go_but_for_those_a_kept_checkpoint_needs(
    tmp_path: Path, rows: Callable[..., list[Row]], keep: int, kept: list[int]
) -> None:
    with RunDir(tmp_path) as run:
        logged(run, rows, 6)
        for step in (2, 4, 6):
            save(run, step)
        run.prune(keep_checkpoints=2, keep_log_steps=keep)
        assert run.steplog.steps() == kept


def test_no_step_file_goes_while_there_is_no_checkpoint(tmp_path: Path, rows: Callable[..., list[Row]]) -> None:
    with RunDir(tmp_path) as run:
        logged(run, rows, 3)
        run.prune(keep_checkpoints=1, keep_log_steps=1)
        assert run.steplog.steps() == [1, 2, 3]


def test_groups_of_removed_steps_stay_trained(tmp_path: Path, rows: Callable[..., list[Row]]) -> None:
    with RunDir(tmp_path) as run:
        logged(run, rows, 3)
        save(run, 3)
        run.prune(keep_checkpoints=1, keep_log_steps=1)
        assert run.steplog.steps() == [3]
        counts = run.settlements.counts()
    with RunDir(tmp_path) as run:
        assert run.settlements.ranges() == [(10, 10), (20, 20), (30, 30)]
        assert run.settlements.counts() == counts
        with pytest.raises(ValueError, match="group 10 is settled already: 'trained'"):
            run.settle([EndedGroup(10, GroupEnding.STALE, "old")])


def results_of(run: RunDir, first: int = 0) -> list[tuple[int, int]]:
    page = run.results.page("r", first)
    assert page.run == "r"
    return list(zip(page.groups, page.spreads, strict=True))


def test_results_have_the_order_of_the_log_also_after_a_restart_without_its_step_files(
    tmp_path: Path, scored: MakeScored
) -> None:
    """Two rollouts a group: those of 4 and 1 differ, one of 3 failed, one of 2 is stale; 7 and 9 say nothing."""
    equal, different, unknown = REWARD_SPREAD_EQUAL, REWARD_SPREAD_DIFFERENT, REWARD_SPREAD_UNSPECIFIED

    def pair(group: int, step: int, second: float | None, skipped: str | None = None) -> list[Row]:
        rewards = ((0, 1.0, None), (1, second, skipped))
        return [
            replace(row_from_scored(scored(group, number, reward=reward)), step=step, skipped=why)
            for number, reward, why in rewards
        ]

    expected = [(5, equal), (1, different), (4, different), (7, unknown), (6, different)]
    expected += [(2, different), (3, equal), (9, unknown)]
    with RunDir(tmp_path) as run:
        run.settle([EndedGroup(5, GroupEnding.FILTERED, "equal", rewards_differ=False)])
        run.write_step(1, pair(4, 1, 0.0) + pair(1, 1, 0.5))
        run.settle([EndedGroup(7, GroupEnding.FAILED, "hangs")])
        run.settle([EndedGroup(6, GroupEnding.STALE, "old", (3, 4), rewards_differ=True)])
        run.write_step(2, pair(3, 2, None, "failed") + pair(2, 2, 0.0, "stale"))
        run.settle([EndedGroup(9, GroupEnding.UNUSED, "the end")])
        assert results_of(run) == expected
        assert results_of(run, 6) == expected[6:]
        assert results_of(run, 8) == []
        for step in (1, 2):
            save(run, step)
    with RunDir(tmp_path) as run:
        assert results_of(run) == expected
        run.prune(keep_checkpoints=1, keep_log_steps=1)
        assert run.steplog.steps() == [2]
    with RunDir(tmp_path) as run:
        assert results_of(run) == expected
        run.settle([EndedGroup(8, GroupEnding.FILTERED, "equal", rewards_differ=False)])
        run.write_step(3, pair(10, 3, 0.0))
        expected += [(8, equal), (10, different)]
        assert results_of(run) == expected
    with RunDir(tmp_path) as run:
        assert results_of(run) == expected


def test_a_kill_while_step_files_are_removed_is_made_good(
    tmp_path: Path, rows: Callable[..., list[Row]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def prune_and_die() -> None:
        run = RunDir(tmp_path)
        logged(run, rows, 3)
        save(run, 3)
        monkeypatch.setattr(Path, "unlink", die)
        run.prune(keep_checkpoints=1, keep_log_steps=1)

    assert in_a_process(prune_and_die) == -signal.SIGKILL
    with RunDir(tmp_path) as run:
        assert run.steplog.steps() == [1, 2, 3]
        assert run.settlements.counts()["trained"] == 3
        assert [group for group, _ in results_of(run)] == [10, 20, 30]
        run.prune(keep_checkpoints=1, keep_log_steps=1)
        assert run.steplog.steps() == [3]
    assert len((tmp_path / "log" / "settled.jsonl").read_text().splitlines()) == 2


def test_a_directory_that_cannot_be_written_is_the_users_to_know(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file stands where the folder belongs")
    with pytest.raises(InputError, match=r"run.directory: .* cannot be written by user \d+ \(Not a directory\)"):
        RunDir(tmp_path / "runs" / "mine")
