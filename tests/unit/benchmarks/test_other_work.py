"""The work of other processes beside a measurement, which then gives no number."""

from __future__ import annotations

import time
from typing import Any, Self

import pytest
from typer.testing import CliRunner

import benchmarks.__main__ as command
from benchmarks.harness import other_work
from benchmarks.harness.other_work import OtherWork
from benchmarks.harness.section import Measurement, PageSection


def test_own_work_is_no_other_work(monkeypatch: pytest.MonkeyPatch) -> None:
    # A machine with one processor, on which nothing but this process works.
    times = iter([(100.0, 500.0), (100.0 + 0.4, 500.0 + 1.0)])
    monkeypatch.setattr(other_work, "_processor_times", lambda: next(times))
    with OtherWork() as others:
        began = time.process_time()
        while time.process_time() < began + 0.4:
            pass
    assert others.share <= 0.1


def test_what_others_do_is_a_share_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([(100.0, 500.0), (150.0, 600.0)])
    monkeypatch.setattr(other_work, "_processor_times", lambda: next(times))
    with OtherWork() as others:
        pass
    assert others.share == pytest.approx(0.5, abs=0.01)


@pytest.mark.parametrize(("share", "is_quick", "code"), [(0.5, False, 1), (0.05, False, 0), (0.5, True, 0)])
def test_a_disturbed_measurement_has_no_number(
    share: float, is_quick: bool, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Beside:
        """Other work of this share."""

        def __enter__(self) -> Self:
            self.share = share
            return self

        def __exit__(self, *_error: object) -> None:
            pass

    saved: list[Any] = []
    section = PageSection("one", "", lambda _effort: iter([Measurement("a", dict, ())]), lambda _results: "", ())
    monkeypatch.setattr(command, "SECTIONS", (section,))
    monkeypatch.setattr(command, "OtherWork", Beside)
    monkeypatch.setattr(command, "save_results", lambda *record: saved.append(record))
    monkeypatch.setattr(command, "load_results", lambda _results: {"one": []})
    monkeypatch.setattr(command, "write_page", lambda *_arguments: "page")
    result = CliRunner().invoke(command.app, ["one", *(["--quick"] if is_quick else [])])
    assert result.exit_code == code, result.output
    assert bool(saved) == (code == 0)
    assert ("other processes took 50%" in result.output) == (code == 1)
