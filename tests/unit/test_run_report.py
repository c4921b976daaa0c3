"""The report at the end of a test run: its counts by area, and the failure of a run above its budget."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.repository.run_report import area_of, excesses
from tests.support.repository.source_files import ROOT

CONFTEST = """
from pathlib import Path
from tests.support.repository import run_report

run_report.BUDGET = Path(__file__).with_name("budget.toml")

def pytest_configure(config):
    config.pluginmanager.register(run_report.RunReport(config))
"""
# Its children: a shell, and below it a process with the title of vLLM's engine, for longer than the watcher's interval.
ENGINE = """
import subprocess

def test_one():
    subprocess.run(["sh", "-c", "bash -c 'exec -a VLLM::EngineCore sleep 5'; true"], check=True)
"""
PROCESS = """
import subprocess

def test_one():
    subprocess.run(["true"], check=True)
"""


@pytest.mark.parametrize(
    ("test", "area"),
    [
        ("tests/unit/learner/push/test_x.py::test_y[a/b]", "unit/learner"),
        ("tests/unit/test_docs.py::test_y", "unit"),
        ("tests/chaos/test_kill.py::test_y", "chaos"),
    ],
)
def test_an_area_is_two_folders(test: str, area: str) -> None:
    assert area_of(test) == area


def test_more_than_the_budget_is_an_excess_and_an_area_without_one_has_no_limit() -> None:
    counts = {"engines": {"unit/view": 1, "unit/cli": 1}, "processes": {"unit/view": 2, "integration/run": 9}}
    budget = {"engines": {"unit/view": 0, "unit/cli": 1}, "processes": {"unit/view": 3}}
    (excess,) = excesses(counts, budget)
    assert excess.startswith("tests/unit/view: 1 engines started, and tests/budget.toml has 0")


def reported_run(folder: Path, test: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Pytest on one test of the area unit/a, which may start no engine and no process."""
    (folder / "parts/unit/a").mkdir(parents=True)
    (folder / "parts/unit/a/test_a.py").write_text(test)
    (folder / "parts/conftest.py").write_text(CONFTEST)
    (folder / "parts/budget.toml").write_text('[engines]\n"unit/a" = 0\n[processes]\n"unit/a" = 0\n')
    (folder / "pytest.ini").write_text(f"[pytest]\naddopts = --import-mode=importlib\npythonpath = {ROOT}\n")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *words, "parts"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=300)


def test_a_run_counts_engines_and_processes_and_fails_above_its_budget(tmp_path: Path) -> None:
    done = reported_run(tmp_path, ENGINE, "-n", "1")
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout + done.stderr
    assert "1 passed" in done.stdout
    assert "1 engines     1 processes  unit/a" in done.stdout
    assert "ERROR tests/unit/a: 1 engines started" in done.stdout
    assert "the 20 slowest tests" in done.stdout


def test_a_run_of_the_night_has_no_budget(tmp_path: Path) -> None:
    done = reported_run(tmp_path, PROCESS, "-m", "long or not long")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 engines     1 processes  unit/a" in done.stdout
    assert "ERROR" not in done.stdout
