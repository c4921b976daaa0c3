"""`python -m tests.gpu` without a GPU: its answer, its records and page, and the ends that it puts to parts."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from importlib.metadata import distributions
from pathlib import Path

import pytest

from gspo.cli.plan.rates import ASSUMED, Rate, rates_of
from gspo.common.config.schema import Config
from gspo.common.host.gpu_kinds import GPU_KINDS
from tests.gpu import __main__ as command
from tests.gpu import machine_facts
from tests.gpu.catalogue import NOT_ON_ONE_GPU, PARTS, Part
from tests.gpu.decode_rates import DecodePass, decode_rates
from tests.gpu.records import PAGE, RECORDS, PartRecord, merge, read_records, rows, write_page

GOALS = [{"name": "stall", "goal": "at most 0.1", "result": 0.31, "met": False}]
RECORD = PartRecord(
    "push",
    True,
    "",
    61.2,
    {"load_s": 0.25},
    "2026-12-01",
    "NVIDIA H200",
    "580",
    "torch 2.11.0",
    GOALS,
    {"load_bytes_s": 5e9},
)


def call(monkeypatch: pytest.MonkeyPatch, *words: object) -> int:
    monkeypatch.setattr(sys, "argv", ["tests.gpu", *map(str, words)])
    return command.main()


def test_without_a_gpu_nothing_is_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(command, "visible_gpus", list)
    assert call(monkeypatch) == 3
    assert capsys.readouterr().err.startswith("not yet run: no GPU")


def test_the_page_has_the_rows_of_the_records() -> None:
    assert rows(read_records(RECORDS)) in PAGE.read_text()


def test_the_key_of_shared_cards_says_that_no_gpu_has_run_it_until_one_has() -> None:
    has_run = any(record.part == "shared" and record.passed for record in read_records(RECORDS))
    says_never = "shared has never run on a GPU" in (Config.model_fields["placement"].description or "")
    assert says_never != has_run
    (section,) = re.findall(r"## Shared GPUs\n\n(.*)", PAGE.read_text())
    assert section.startswith("**Never run on a GPU**") != has_run


def test_every_part_has_a_row_whether_it_was_run_or_not() -> None:
    assert "No GPU has run this project yet" in rows([])
    assert rows([]).count("not yet run") == len(PARTS)
    failed = replace(RECORD, part="demo", passed=False, reason="exit code 1 | at step 3")
    found = rows([RECORD, failed])
    assert "No GPU has run this project yet" not in found
    assert found.count("not yet run") == len(PARTS) - 2
    missed = "| Pass. Stall 0.31: GOAL MISSED | `load_s 0.25` | 61 | 2026-12-01, NVIDIA H200, 580, torch 2.11.0 |"
    assert f"| {PARTS['push'].goal} {missed}" in found
    assert "goal met" in rows([replace(RECORD, goals=[{**GOALS[0], "met": True}])])
    assert "FAIL: exit code 1 / at step 3" in found


def test_results_of_another_machine_are_taken_over(tmp_path: Path) -> None:
    here, page = tmp_path / "here.json", tmp_path / "page.md"
    # With CUDA graphs, and then without: the rate of the first one counts, as vLLM starts so by default.
    merge(here, [replace(RECORD, part="push_graphs", rates={"load_bytes_s": 6e9}), RECORD])
    merge(here, [replace(RECORD, seconds=59.0), replace(RECORD, card="H100")])
    assert [(it.part, it.card, it.seconds) for it in read_records(here)] == [
        ("push", "NVIDIA H200", 59.0),
        ("push", "H100", 61.2),
        ("push_graphs", "NVIDIA H200", 61.2),
    ]
    assert rates_of(GPU_KINDS["NVIDIA H200"], here)["load_bytes_s"] == Rate(
        6e9, 6e9, "measured: part push_graphs, 2026-12-01", measured=True
    )
    page.write_text("head\n<!-- rows: python -m tests.gpu -->\nold\n<!-- end of rows -->\ntail\n")
    write_page(page, read_records(here))
    text = page.read_text()
    assert text.startswith("head\n") and text.endswith("<!-- end of rows -->\ntail\n") and "\nold\n" not in text


def test_every_rate_is_measured_by_a_part_unless_it_takes_several_hosts() -> None:
    measured = {rate for part in PARTS.values() for rate in part.rates}
    assert measured.isdisjoint(NOT_ON_ONE_GPU)
    assert measured | NOT_ON_ONE_GPU.keys() == ASSUMED.keys()


@pytest.mark.parametrize(("own_s", "share"), [(0.002, 0.6), (0.0001, 1.0)])
def test_two_measurements_of_decoding_give_both_rates(own_s: float, share: float) -> None:
    card = GPU_KINDS["NVIDIA H200"]
    alone, together = (
        DecodePass(own_s + read_bytes / (share * card.memory_bytes_s), read_bytes) for read_bytes in (1.2e9, 1.3e10)
    )
    expected = {"decode_bytes_share": share, "decode_passes_s": 1 / own_s}
    assert decode_rates(alone, together, card) == pytest.approx(expected)


def test_a_pass_that_many_sequences_make_no_longer_takes_its_own_time() -> None:
    card = GPU_KINDS["NVIDIA H200"]
    rates = decode_rates(DecodePass(0.01, 1e9), DecodePass(0.009, 1e10), card)
    assert rates == pytest.approx({"decode_bytes_share": 1.0, "decode_passes_s": 1 / (0.01 - 1e9 / 4.8e12)})


def test_a_part_that_hangs_is_ended_and_one_that_passed_is_not_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hanging = Part("sleep", "hangs", "", ("json",), limit_s=0.3)
    monkeypatch.setattr(command, "PARTS", {"sleep": hanging, "odd": Part("odd", "lacks", "", ("no_such_package",))})
    monkeypatch.setattr(command, "child_environment", lambda _: {"PATH": "/usr/bin:/bin"})
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    findings = '{"numbers": {"load_s": 0.2}, "reason": null}'
    (tmp_path / "python").write_text(f"#!/bin/sh\necho '{findings}' > \"$4\"\nsleep 60 & sleep 60\n")
    (tmp_path / "python").chmod(0o755)
    results = tmp_path / "results.json"
    assert call(monkeypatch, "--device", "cpu", "--folder", tmp_path, "--results", results) == 1
    (record,) = read_records(results)
    assert (record.passed, record.reason, record.card) == (False, "did not end within 0 s", "CPU")
    assert record.numbers == {"load_s": 0.2}, "what it had measured is lost"
    assert "odd: not run: no_such_package cannot be imported" in capsys.readouterr().out
    merge(results, [replace(record, passed=True)])
    assert call(monkeypatch, "--device", "cpu", "--folder", tmp_path, "--results", results) == 3
    assert "sleep: passed before" in capsys.readouterr().out
    results.unlink()
    soon = Part("sleep", "hangs", "", ("json",), least_s=0.0)
    monkeypatch.setattr(command, "PARTS", {"sleep": soon})
    words = ("--device", "cpu", "--folder", tmp_path, "--results", results)
    assert call(monkeypatch, *words, "--minutes", 0.01) == 3
    assert "sleep: FAIL: it was ended when no time was left" in capsys.readouterr().out
    (record,) = read_records(results)
    assert record.numbers == {"load_s": 0.2} and not record.passed, "a later call runs it again"
    assert call(monkeypatch, *words, "--minutes", -1) == 3
    assert "sleep: not run: too little time is left" in capsys.readouterr().out


def test_results_are_judged_beside_each_other_and_speed_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = {name: Part(name, "", "", ("json",), beside=name != "speed") for name in ("first", "speed", "second")}
    monkeypatch.setattr(command, "PARTS", parts)
    monkeypatch.setattr(command, "child_environment", lambda _: {"PATH": "/usr/bin:/bin"})
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    log = tmp_path / "log"
    lines = ["#!/bin/sh", f'echo "$3" >> {log}', "sleep 1", f"echo end >> {log}", 'echo \'{"reason": ""}\' > "$4"']
    (tmp_path / "python").write_text("\n".join(lines))
    (tmp_path / "python").chmod(0o755)
    words = ("--device", "cpu", "--beside", 2, "--folder", tmp_path, "--results", tmp_path / "results.json")
    assert call(monkeypatch, *words) == 0
    events = [json.loads(line) if line != "end" else None for line in log.read_text().splitlines()]
    begun = [(event["part"], event["beside"]) if event else "end" for event in events]
    assert sorted(begun[:2]) == [("first", 1), ("second", 1)]
    assert begun[2:] == ["end", "end", ("speed", 0), "end"]


def test_vllm_finds_our_plugin_without_an_installation(tmp_path: Path) -> None:
    (found,) = distributions(path=[str(machine_facts._announce_plugin(tmp_path))])
    (point,) = found.entry_points
    assert (point.group, point.name, point.value) == (
        "vllm.general_plugins",
        "gspo",
        "gspo.generation.engine.weights:register",
    )


def test_a_model_that_several_parts_want_is_drawn_once(tmp_path: Path) -> None:
    from tests.gpu.random_models import drawn_once  # here: it imports torch

    drawn: list[str] = []

    def draw(folder: Path) -> None:
        drawn.append(folder.name)
        if len(drawn) == 1:
            raise OSError("the disk is full")

    with pytest.raises(OSError, match="the disk is full"):
        drawn_once(tmp_path / "models/a-0.6b", draw)
    for name in ("a-0.6b", "a-0.6b", "a-8b"):
        assert drawn_once(tmp_path / "models" / name, draw).name == name
    assert drawn == ["a-0.6b", "a-0.6b", "a-8b"]


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_code_of_the_parts_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without duckdb, which is for pages alone."""
    results, modules = tmp_path / "results.json", tmp_path / "modules"
    modules.mkdir()
    (modules / "duckdb.py").write_text("raise ImportError('duckdb is not here')\n")
    monkeypatch.setenv("PYTHONPATH", str(modules))
    code = call(monkeypatch, "--device", "cpu", "--folder", tmp_path, "--results", results)
    assert code == 0, json.loads(results.read_text())
    assert [it.part for it in read_records(results)] == [name for name, part in PARTS.items() if part.on_cpu]
