"""The decision whether a run may start in its run directory, and the refusals."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from gspo.cli.commands import app
from gspo.cli.rundir.start import (
    RunStart,
    decide_start,
    is_run_dir_locked,
    lock_run_dir,
    prepare,
    run_dir_of,
    supervisor_facts,
    write_supervisor_facts,
)
from gspo.common.errors import InputError
from gspo.runlog.run_history import RunHistory
from gspo.runlog.run_log import RunLog
from gspo.view.picture.page import write_report
from gspo.view.picture.summary import notes


def write(path: Path, raw_config: dict[str, Any]) -> Path:
    """Write a configuration file."""
    path.write_text(yaml.safe_dump(raw_config))
    return path


def started(file: Path, *, trained: bool) -> RunStart:
    """A run directory as a first start leaves it."""
    start = decide_start(file, resume=False)
    with lock_run_dir(start.run_dir):
        prepare(start)
    if trained:
        (start.run_dir / "log").mkdir()
        (start.run_dir / "log" / "step-000001.parquet").touch()
    return start


def test_a_new_run_writes_every_key_and_the_environment(tmp_path: Path, raw_config: dict[str, Any]) -> None:
    start = started(write(tmp_path / "config.yaml", raw_config), trained=False)
    assert start.run_dir == tmp_path / "runs" / "small"
    written = yaml.safe_load((start.run_dir / "config.yaml").read_text())
    assert written["staleness"]["max_lag"] == 1
    facts = json.loads((start.run_dir / "environment.json").read_text())
    assert {"python", "gspo", "redis", "cores", "learner_threads"} <= facts.keys()


def test_a_run_is_named_by_its_configuration_too(tmp_path: Path, raw_config: dict[str, Any]) -> None:
    file = write(tmp_path / "config.yaml", raw_config)
    assert run_dir_of(tmp_path) == tmp_path  # no run yet, so the commands refuse the folder that the user named
    run_dir = started(file, trained=False).run_dir
    assert [run_dir_of(path) for path in (tmp_path, file, run_dir)] == [run_dir, run_dir, run_dir]
    shown = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert (shown.exit_code, (run_dir / "report.html").is_file()) == (0, True), shown.output


def test_an_existing_run_is_not_started_again_without_resume(tmp_path: Path, raw_config: dict[str, Any]) -> None:
    file = write(tmp_path / "config.yaml", raw_config)
    started(file, trained=True)
    with pytest.raises(InputError, match=f"already holds this run.*gspo run {file} --resume"):
        decide_start(file, resume=False)


def test_a_start_that_trained_nothing_is_replaced(tmp_path: Path, raw_config: dict[str, Any]) -> None:
    file = write(tmp_path / "config.yaml", raw_config)
    run_dir = started(file, trained=False).run_dir
    (run_dir / "redis").mkdir()
    raw_config["seed"] = 7
    start = decide_start(write(file, raw_config), resume=False)
    assert (start.clear, start.resume) == (True, False)
    with lock_run_dir(run_dir):
        prepare(start)
    assert not (run_dir / "redis").exists()
    assert yaml.safe_load((run_dir / "config.yaml").read_text())["seed"] == 7


def test_a_directory_of_another_configuration_is_refused_by_key(tmp_path: Path, raw_config: dict[str, Any]) -> None:
    file = write(tmp_path / "config.yaml", raw_config)
    started(file, trained=True)
    changed = {**copy.deepcopy(raw_config), "seed": 3}
    with pytest.raises(InputError, match=r"belongs to another configuration \(seed was 0 and is now 3\)"):
        decide_start(write(file, changed), resume=False)
    with pytest.raises(InputError, match=r"seed: cannot change on resume \(seed was 0 and is now 3\)"):
        decide_start(file, resume=True)


def test_resume_takes_the_keys_that_may_change(tmp_path: Path, raw_config: dict[str, Any]) -> None:
    file = write(tmp_path / "config.yaml", raw_config)
    started(file, trained=True)
    raw_config["run"]["total_steps"] = 20
    start = decide_start(write(file, raw_config), resume=True)
    assert (start.resume, start.changes) == (True, ("run.total_steps: 10 -> 20",))
    assert prepare(start) == ["changed on resume: run.total_steps: 10 -> 20"]
    assert yaml.safe_load((start.run_dir / "config.yaml").read_text())["run"]["total_steps"] == 20


def test_resume_takes_a_run_directory(tmp_path: Path, raw_config: dict[str, Any]) -> None:
    run_dir = started(write(tmp_path / "config.yaml", raw_config), trained=True).run_dir
    moved = run_dir.rename(tmp_path / "elsewhere")
    start = decide_start(moved, resume=True)
    assert (start.run_dir, start.resume, start.config.name) == (moved, True, "small")
    with pytest.raises(InputError, match=f"is a run directory.*gspo run --resume {moved}"):
        decide_start(moved, resume=False)


def test_a_run_whose_ranks_the_user_started_goes_on_with_ranks_of_gspo(
    tmp_path: Path, raw_config: dict[str, Any]
) -> None:
    """Stored by a version that had `learner.ranks: 0`."""
    file = write(tmp_path / "config.yaml", raw_config)
    run_dir = started(file, trained=True).run_dir
    stored = yaml.safe_load((run_dir / "config.yaml").read_text())
    stored["learner"]["ranks"] = 0
    (run_dir / "config.yaml").write_text(yaml.safe_dump(stored))
    fix = r"Set it to the ranks of all machines in your configuration; .* `gspo run CONFIG\.yaml --resume`"
    with pytest.raises(InputError, match=rf"learner\.ranks: 0 left the start of the ranks to you, .* {fix}"):
        decide_start(run_dir, resume=True)
    raw_config["learner"] = {"ranks": 2}
    assert decide_start(write(file, raw_config), resume=True).changes == ("learner.ranks: 0 -> 2",)


def test_resume_without_a_run_is_refused(tmp_path: Path, raw_config: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=r"has no run to resume.*Leave --resume out"):
        decide_start(write(tmp_path / "config.yaml", raw_config), resume=True)
    with pytest.raises(InputError, match=r"nope: is neither a run directory nor a configuration file"):
        decide_start(tmp_path / "nope", resume=True)
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"so it is not a run directory"):
        decide_start(tmp_path / "empty", resume=True)


def test_a_folder_stands_for_the_configuration_in_it(tmp_path: Path, raw_config: dict[str, Any]) -> None:
    """As `gspo init` makes one; `gspo run my-run` is what everyone tries first."""
    file = write(tmp_path / "config.yaml", raw_config)
    assert decide_start(tmp_path, resume=False) == decide_start(file, resume=False)
    with pytest.raises(InputError, match=r"has no run to resume"):
        decide_start(tmp_path, resume=True)


def finish(run_dir: Path, **summary: Any) -> None:
    """As the end of a run of one step leaves it."""
    (run_dir / "log").mkdir(exist_ok=True)
    (run_dir / "log" / "step-000001.parquet").write_text("")
    content = {"steps": 1, "end": "completed", "end_reason": "all 10 steps are trained"} | summary
    (run_dir / "summary.json").write_text(json.dumps(content))


def test_a_finished_run_is_not_started_again_unless_its_end_is_moved(
    tmp_path: Path, raw_config: dict[str, Any]
) -> None:
    file = write(tmp_path / "config.yaml", raw_config)
    run_dir = started(file, trained=True).run_dir
    for path in (run_dir / "log").glob("*"):
        path.unlink()
    finish(run_dir)
    for target in (run_dir, file):
        assert decide_start(target, resume=True).finished == "all 10 steps are trained"
    raw_config["run"]["total_steps"] = 20
    assert decide_start(write(file, raw_config), resume=True).finished == ""
    for summary in ({"end": "failed"}, {"end": "stopped"}, {"end": None, "end_reason": None}, {"steps": 0}):
        finish(run_dir, **summary)
        assert decide_start(run_dir, resume=True).finished == "", summary


def test_a_folder_with_other_files_is_no_run_directory(tmp_path: Path, raw_config: dict[str, Any]) -> None:
    (tmp_path / "runs" / "small").mkdir(parents=True)
    (tmp_path / "runs" / "small" / "thesis.tex").touch()
    with pytest.raises(InputError, match="holds files that are not of a run"):
        decide_start(write(tmp_path / "config.yaml", raw_config), resume=False)


def test_a_changed_environment_is_said_on_resume(tmp_path: Path, raw_config: dict[str, Any]) -> None:
    file = write(tmp_path / "config.yaml", raw_config)
    path = started(file, trained=True).run_dir / "environment.json"
    facts = json.loads(path.read_text())
    path.write_text(json.dumps({**facts, "redis": "0.0.1"}))
    (line,) = prepare(decide_start(file, resume=True))
    assert f"redis was 0.0.1 and is now {facts['redis']}" in line
    assert json.loads(path.read_text()) == facts


def test_the_models_of_a_run_without_log_and_checkpoints_are_not_removed(
    tmp_path: Path, raw_config: dict[str, Any]
) -> None:
    file = write(tmp_path / "config.yaml", raw_config)
    run_dir = started(file, trained=False).run_dir
    (run_dir / "summary.json").write_text('{"end": "completed", "steps": 150}')
    for target, resume in ((file, False), (file, True), (run_dir, True)):
        with pytest.raises(
            InputError, match=f"^{run_dir}: trained 150 steps by its summary.json, .*move the directory"
        ):
            decide_start(target, resume=resume)
    (run_dir / "summary.json").write_text('{"end": "failed", "steps": []}')
    assert decide_start(file, resume=False).clear


def test_a_file_in_a_folder_s_place_is_not_removed(tmp_path: Path, raw_config: dict[str, Any]) -> None:
    file = write(tmp_path / "config.yaml", raw_config)
    run_dir = started(file, trained=False).run_dir
    (run_dir / "log").symlink_to("/nowhere/log")
    for target, resume in ((file, False), (file, True), (run_dir, True)):
        with pytest.raises(InputError, match=f"^{run_dir}/log: is a folder in a run directory, and is none here"):
            decide_start(target, resume=resume)


@pytest.mark.parametrize("content", [b"[1]", b"\xff", b"\0\0"])
def test_a_damaged_record_of_a_supervisor_is_none(tmp_path: Path, content: bytes) -> None:
    with lock_run_dir(tmp_path):
        pass
    (tmp_path / "services" / "supervisor.json").write_bytes(content)
    assert supervisor_facts(tmp_path) == {} and not is_run_dir_locked(tmp_path)


def test_one_command_line_holds_a_run_directory(tmp_path: Path) -> None:
    assert not is_run_dir_locked(tmp_path)
    assert not list(tmp_path.iterdir())  # asking writes nothing: it may be another user's, on a disk for reading
    with lock_run_dir(tmp_path):
        write_supervisor_facts(tmp_path, "redis://127.0.0.1:1/0")
        assert is_run_dir_locked(tmp_path)
        with pytest.raises(InputError, match=r"in use by another gspo \(process \d+\)"), lock_run_dir(tmp_path):
            pass
    assert not is_run_dir_locked(tmp_path)
    assert supervisor_facts(tmp_path)["redis_url"] == "redis://127.0.0.1:1/0"


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file")
    with (
        pytest.raises(InputError, match=r"run\.directory: .*runs/small cannot be written \(Not a directory"),
        lock_run_dir(tmp_path / "runs" / "small"),
    ):
        pass


def test_a_resume_with_other_data_is_refused_or_on_record(tmp_path: Path, raw_config: dict[str, Any]) -> None:
    rows = tmp_path / "p.jsonl"
    rows.write_text('{"prompt": "1"}\n')
    (folder := tmp_path / "held_out").mkdir()
    (folder / "train.jsonl").write_text('{"prompt": "2"}\n')
    raw_config["evaluation"] = {"prompts": "held_out"}
    file = write(tmp_path / "config.yaml", raw_config)
    run_dir = started(file, trained=True).run_dir

    def resumed() -> list[str]:
        start = decide_start(file, resume=True)
        with lock_run_dir(run_dir):
            return prepare(start)

    assert resumed() == []
    rows.write_text('{"prompt": "9"}\n')
    for target in (file, run_dir):
        with pytest.raises(InputError, match=r"data.prompts: .*p.jsonl has another content than before \(SHA-256 "):
            decide_start(target, resume=True)
    (folder / "train.jsonl").rename(folder / "train-1.jsonl")
    with pytest.raises(InputError, match=r"p.jsonl .*, and 1 more"):
        decide_start(file, resume=True)
    raw_config["data"]["changed_files"] = "accept"
    write(file, raw_config)
    assert [note.split(" has another")[0] for note in resumed()] == [
        "changed on resume: data.changed_files: refuse -> accept",
        f"changed on resume: data.prompts: {rows}",
        f"changed on resume: evaluation.prompts: {folder}",
    ]
    assert resumed() == []
    first, second = RunLog(run_dir).data_files()
    assert (first.step, first.changes, second.step, len(second.changes)) == (0, (), 1, 2)
    texts = notes(RunHistory(run_dir), write_report(run_dir))
    assert [text for text in texts if "has another content" in text] == [f"After step 1: {t}." for t in second.changes]


def test_a_run_without_a_record_of_its_data_gets_one(tmp_path: Path, raw_config: dict[str, Any]) -> None:
    """Runs of earlier versions have none, and a missing file is an error of the services' checks."""
    file = write(tmp_path / "config.yaml", raw_config)
    run_dir = started(file, trained=True).run_dir
    (run_dir / "data_files.jsonl").unlink()
    with lock_run_dir(run_dir):
        assert prepare(decide_start(file, resume=True)) == []
    (record,) = RunLog(run_dir).data_files()
    assert (record.step, record.digests) == (1, {"data.prompts": {str(tmp_path / "p.jsonl"): ""}})
    raw_config["name"], raw_config["data"]["prompts"] = "cells", "p.csv"
    run_dir = started(write(file, raw_config), trained=True).run_dir
    (run_dir / "data_files.jsonl").unlink()
    with lock_run_dir(run_dir):
        (note,) = prepare(decide_start(file, resume=True))
    assert note.endswith("p.csv: cells are text from now on, and data.types makes numbers of a column")
