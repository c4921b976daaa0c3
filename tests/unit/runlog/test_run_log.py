"""Reading the log of a run: whole lines, typed records, columns of step files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gspo.runlog.run_log import (
    EvaluationRecord,
    RunLog,
    SettledRecord,
    StepRecord,
    VersionRecord,
    best_of,
    read_own_records,
    read_records,
    version_scores,
)
from gspo.runlog.step_files import column, read_columns, step_file


@pytest.fixture
def log(tmp_path: Path) -> RunLog:
    """The empty log of a run directory."""
    log = RunLog(tmp_path)
    log.folder.mkdir()
    return log


def write(log: RunLog, name: str, *lines: Mapping[str, Any] | str) -> None:
    """Add lines, of which text stands as it is and without a line feed."""
    with (log.folder / name).open("a") as file:
        file.writelines(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines)


def step(number: int, **figures: float | None) -> dict[str, Any]:
    return {"step": number, "version": number, "unix_s": 7.5, "figures": figures}


def test_a_run_without_a_log_has_no_records(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    assert [log.steps(), log.evaluations(), log.versions(), log.settled()] == [[], [], [], []]
    assert (log.step_files(), log.sizes(), log.problems) == ({}, (0, 0, 0, 0), [])


def test_a_torn_last_line_is_read_once_it_is_whole(log: RunLog) -> None:
    write(log, "metrics.jsonl", step(1), '{"step": 2, "version": 2, "unix')
    path = log.folder / "metrics.jsonl"
    first = read_records(path, StepRecord.model_validate)
    assert ([record.step for record in first.records], first.broken) == ([1], {})
    write(log, "metrics.jsonl", '_s": 7.5, "figures": {}}\n')
    second = read_records(path, StepRecord.model_validate, offset=first.end)
    assert ([record.step for record in second.records], second.end) == ([2], path.stat().st_size)
    assert read_records(path, StepRecord.model_validate, offset=second.end).records == []


def test_a_null_is_left_out_of_the_figures(log: RunLog) -> None:
    write(log, "metrics.jsonl", step(1, loss=None, reward_mean=0.5))
    assert log.steps() == [StepRecord(step=1, version=1, unix_s=7.5, figures={"reward_mean": 0.5})]


def test_figures_with_former_names_have_the_present_ones(log: RunLog) -> None:
    write(log, "metrics.jsonl", step(1, cards=8.0, tokens_per_s_per_card=3.0, loss=0.5))
    assert log.steps()[0].figures == {"gpus": 8.0, "tokens_per_s_per_gpu": 3.0, "loss": 0.5}


@pytest.mark.parametrize(
    "line", ["no json\n", "[1]\n", '{"step": 1}\n', '{"step": "x", "version": 1, "unix_s": 1, "figures": {}}\n', "\n"]
)
def test_a_foreign_line_is_counted_and_left_out(log: RunLog, line: str) -> None:
    write(log, "metrics.jsonl", step(1), line, step(2))
    assert [record.step for record in log.steps()] == [1, 2]
    assert log.problems == ["metrics.jsonl: 1 line(s) are not the learner's, and are left out"]
    with pytest.raises(ValueError, match=r"metrics.jsonl, line 2: not a line that the learner wrote"):
        read_own_records(log.folder / "metrics.jsonl", StepRecord.model_validate)


def test_the_last_record_of_a_step_and_of_a_version_counts(log: RunLog) -> None:
    write(log, "metrics.jsonl", step(2, loss=1.0), step(1), step(2, loss=2.0))
    write(log, "policy.jsonl", *({"version": 1, "step": 1, "digest": digest, "unix_s": 1.0} for digest in "ab"))
    assert [(record.step, record.figures) for record in log.steps()] == [(1, {}), (2, {"loss": 2.0})]
    assert log.versions() == [VersionRecord(version=1, step=1, digest="b")]


def test_evaluations_are_in_order_of_versions_and_those_of_a_version_in_order_of_recording(log: RunLog) -> None:
    line = {"label": "", "step": 0, "unix_s": 1.0, "figures": {"sampled_mean": 0.5, "greedy_mean": None}}
    lines = [{"version": 8, "file": "a", "score": 0.25}, {"version": 4, "file": "b", "score": None}]
    write(log, "evaluations.jsonl", *(line | more for more in [*lines, {"version": 4, "file": "a", "score": 1}]))
    assert [(record.version, record.file, record.score) for record in log.evaluations()] == [
        (4, "b", None),
        (4, "a", 1.0),
        (8, "a", 0.25),
    ]
    assert log.evaluations()[0].figures == {"sampled_mean": 0.5}


def test_an_evaluation_without_a_named_file_or_a_score_is_a_record(log: RunLog) -> None:
    write(log, "evaluations.jsonl", {"version": 0, "step": 0, "unix_s": 1.0, "figures": {}})
    assert log.evaluations() == [EvaluationRecord(file="", version=0, step=0, unix_s=1.0, score=None, figures={})]


def test_settled_groups_keep_their_order_and_lengths(log: RunLog) -> None:
    stale = {"group": 5, "settlement": "stale", "reason": "too old", "unix_s": 1.0, "response_tokens": [3, 4]}
    write(log, "settled.jsonl", stale, {"group": 2, "settlement": "failed", "reason": "", "unix_s": 1.0})
    assert log.settled() == [
        SettledRecord(group=5, settlement="stale", reason="too old", response_tokens=(3, 4)),
        SettledRecord(group=2, settlement="failed", reason="", response_tokens=()),
    ]


def test_sizes_change_with_each_record(log: RunLog) -> None:
    write(log, "metrics.jsonl", step(1))
    before = log.sizes()
    write(log, "metrics.jsonl", step(2))
    assert before != log.sizes()
    assert before == (len(json.dumps(step(1))) + 1, 0, 0, 0)


def test_step_files_are_found_by_their_whole_name(log: RunLog) -> None:
    for name in ("step-000010.parquet", "step-000002.parquet", "step-1000000.parquet", "step-000003.parquet.tmp"):
        (log.folder / name).touch()
    assert list(log.step_files()) == [2, 10, 1000000]
    assert log.step_files()[2] == step_file(log.folder, 2)


def test_columns_are_read_by_name_and_a_missing_one_is_named(log: RunLog) -> None:
    path = step_file(log.folder, 1)
    pq.write_table(pa.table({"group": [1, 2], "skipped": [None, "stale"], "text": ["a", "b"]}), path)
    assert read_columns(path, ["group", "skipped"]).to_pylist() == [
        {"group": 1, "skipped": None},
        {"group": 2, "skipped": "stale"},
    ]
    assert column(path, "text") == ["a", "b"]
    with pytest.raises(ValueError, match=r"step-000001.parquet has no column reward, version"):
        read_columns(path, ["group", "version", "reward"])


def test_a_cut_step_file_is_a_value_error(log: RunLog) -> None:
    step_file(log.folder, 1).write_bytes(b"PAR1")
    with pytest.raises(ValueError, match=r"step-000001.parquet is not a step file"):
        column(step_file(log.folder, 1), "group")


@pytest.mark.parametrize(
    ("scores", "best"),
    [
        ([], None),
        ([(0, None)], None),
        ([(0, 0.5), (10, 0.75), (20, 0.25)], (10, 0.75)),
        # Of equals the earliest is the best; a version's second score does not count.
        ([(10, 0.75), (20, 0.75)], (10, 0.75)),
        ([(0, 0.5), (10, 0.25), (10, 1.0)], (0, 0.5)),
    ],
)
def test_the_best_version_has_the_highest_first_score(
    scores: list[tuple[int, float | None]], best: tuple[int, float] | None
) -> None:
    records = [(version, "", score) for version, score in scores]
    assert best_of(version_scores(records, {"": 1.0})) == best_of(version_scores(records, None)) == best


def test_a_version_has_the_weighted_mean_of_its_files_once_all_are_measured() -> None:
    records = [(0, "a", 1.0), (0, "b", 0.0), (10, "a", 0.5), (10, "c", 9.0), (20, "a", None), (20, "b", 1.0)]
    assert version_scores(records, {"a": 3.0, "b": 1.0}) == {0: 0.75}
    assert version_scores([*records, (10, "b", 1.5)], {"a": 3.0, "b": 1.0}) == {0: 0.75, 10: 0.75}
    assert version_scores(records, {"a": 3.0}) == {0: 1.0, 10: 0.5}
