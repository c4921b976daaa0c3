"""`python -m tests.gpu` without a GPU: its answer, its records and page, and the ends that it puts to parts."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from importlib.metadata import distributions
from pathlib import Path

import pytest

from tests.gpu import __main__ as command
from tests.gpu import machine_facts
from tests.gpu.catalogue import PARTS, Part
from tests.gpu.records import PAGE, RECORDS, PartRecord, merge, read_records, rows, write_page

RECORD = PartRecord("push", True, "", 61.2, {"stall_s": 0.31}, "2026-12-01", "H200", "580", "torch 2.11.0")


def call(monkeypatch: pytest.MonkeyPatch, *words: object) -> int:
    monkeypatch.setattr(sys, "argv", ["tests.gpu", *map(str, words)])
    return command.main()


def test_without_a_gpu_nothing_is_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(command, "visible_gpus", list)
    assert call(monkeypatch) == 3
    assert capsys.readouterr().err.startswith("not yet run: no GPU")


def test_the_page_has_the_rows_of_the_records() -> None:
    assert rows(read_records(RECORDS)) in PAGE.read_text()


def test_every_part_has_a_row_whether_it_was_run_or_not() -> None:
    assert "No row has been run yet" in rows([])
    assert rows([]).count("not yet run") == len(PARTS)
    failed = replace(RECORD, part="demo", passed=False, reason="exit code 1 | at step 3")
    found = rows([RECORD, failed])
    assert "No row has been run yet" not in found
    assert found.count("not yet run") == len(PARTS) - 2
    assert "| `push` | " in found and "| 2026-12-01, H200, 580 | torch 2.11.0 | 61 | pass; stall s 0.31 |" in found
    assert "FAIL: exit code 1 / at step 3" in found


def test_results_of_another_machine_are_taken_over(tmp_path: Path) -> None:
    here, page = tmp_path / "here.json", tmp_path / "page.md"
    merge(here, [RECORD, replace(RECORD, part="step")])
    merge(here, [replace(RECORD, seconds=59.0), replace(RECORD, card="H100")])
    assert [(it.part, it.card, it.seconds) for it in read_records(here)] == [
        ("push", "H200", 59.0),
        ("step", "H200", 61.2),
        ("push", "H100", 61.2),
    ]
    page.write_text("head\n<!-- rows: python -m tests.gpu -->\nold\n<!-- end of rows -->\ntail\n")
    write_page(page, read_records(here))
    text = page.read_text()
    assert text.startswith("head\n") and text.endswith("<!-- end of rows -->\ntail\n") and "\nold\n" not in text


def test_a_part_that_hangs_is_ended_and_one_that_passed_is_not_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hanging = Part("sleep", "hangs", ("json",), limit_s=0.3)
    monkeypatch.setattr(command, "PARTS", {"sleep": hanging, "odd": Part("odd", "lacks", ("no_such_package",))})
    monkeypatch.setattr(command, "child_environment", lambda _: {"PATH": "/usr/bin:/bin"})
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    (tmp_path / "python").write_text("#!/bin/sh\nsleep 60 & sleep 60\n")
    (tmp_path / "python").chmod(0o755)
    results = tmp_path / "results.json"
    assert call(monkeypatch, "--device", "cpu", "--folder", tmp_path, "--results", results) == 1
    (record,) = read_records(results)
    assert (record.passed, record.reason, record.card) == (False, "did not end within 0 s", "CPU")
    assert "odd: not run: no_such_package cannot be imported" in capsys.readouterr().out
    merge(results, [replace(record, passed=True)])
    assert call(monkeypatch, "--device", "cpu", "--folder", tmp_path, "--results", results) == 3
    assert "sleep: passed before" in capsys.readouterr().out
    assert call(monkeypatch, "--device", "cpu", "--folder", tmp_path, "--again", "--only", "sleep", "--minutes", 0) == 3


def test_vllm_finds_our_plugin_without_an_installation(tmp_path: Path) -> None:
    (found,) = distributions(path=[str(machine_facts._announce_plugin(tmp_path))])
    (point,) = found.entry_points
    assert (point.group, point.name, point.value) == (
        "vllm.general_plugins",
        "gspo",
        "gspo.generation.engine.weights:register",
    )


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_the_code_of_the_parts_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = tmp_path / "results.json"
    code = call(monkeypatch, "--device", "cpu", "--folder", tmp_path, "--results", results)
    assert code == 0, json.loads(results.read_text())
    assert [it.part for it in read_records(results)] == [name for name, part in PARTS.items() if part.on_cpu]
