"""The cost of a test run by area in minutes, engines and processes, the slowest tests, and the budget of the counts.

An area is the first two folders of a test below tests/, such as unit/learner. Counted are

- engines: vLLM's engine processes anywhere below the test process, those of supervisors too (engine_watch.py),
- processes: those that the test process starts itself, with subprocess, posix_spawn or fork, not what these start.

tests/budget.toml has the largest counts by area. A run that has more fails, but for the nightly tests. With xdist each
worker counts its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import tomllib
from bisect import bisect
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from heapq import nlargest
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest

BUDGET = Path(__file__).parents[2] / "budget.toml"
WATCHER = Path(__file__).with_name("engine_watch.py")
NUM_SLOWEST = 20
# Python reports these to an audit hook; subprocess.Popen with close_fds, the default, is no posix_spawn.
STARTS = ("subprocess.Popen", "os.posix_spawn", "os.fork")

Counts = dict[str, dict[str, int]]  # engines or processes -> area -> their number


def area_of(test: str) -> str:
    """Return the area of a test by its id: tests/unit/learner/push/test_x.py::test_y is in unit/learner."""
    folders = test.partition("::")[0].split("/")[1:-1]
    return "/".join(folders[:2]) or "."


def excesses(counts: Mapping[str, Mapping[str, int]], budget: Counts) -> Iterator[str]:
    """Yield the counts above their budget; an area without one has no limit."""
    for kind, areas in counts.items():
        for area, number in areas.items():
            largest = budget.get(kind, {}).get(area)
            if largest is not None and number > largest:
                yield (
                    f"tests/{area}: {number} {kind} started, and tests/budget.toml has {largest}: "
                    "share them between tests, or test the part that needs none"
                )


class StartCounter:
    """Counts what the tests of this process start."""

    def __init__(self) -> None:
        self._area, self._since = "", list[tuple[float, str]]()
        self._processes = Counter[str]()
        # The output is read at the end: a pipe holds 64 KiB, which is more than 3,000 engines.
        self._watcher = subprocess.Popen(
            [sys.executable, "-I", "-S", str(WATCHER), str(os.getpid())], stdout=subprocess.PIPE, text=True
        )
        sys.addaudithook(self._audit)

    def _audit(self, event: str, _arguments: tuple[Any, ...]) -> None:
        if event in STARTS and self._area:
            self._processes[self._area] += 1

    def begin(self, test: str) -> None:
        """Count for the area of this test from now on."""
        if (area := area_of(test)) != self._area:
            self._area = area
            self._since.append((time.time(), area))

    def counts(self) -> Counts:
        """Stop counting; returns the counts."""
        self._area = ""
        self._watcher.terminate()
        printed, _ = self._watcher.communicate()
        times = [since for since, _ in self._since]
        engines = Counter(self._since[max(bisect(times, float(line)) - 1, 0)][1] for line in printed.splitlines())
        return {"engines": dict(engines), "processes": dict(self._processes)}


class RunReport:
    """Pytest's plugin: counts in each process that runs tests, adds up and reports in the one that has the terminal."""

    def __init__(self, config: pytest.Config) -> None:
        self._is_worker = hasattr(config, "workerinput")
        self._runs_tests = self._is_worker or not config.getoption("numprocesses", default=None)
        self._counter: StartCounter | None = None
        self._counts: dict[str, Counter[str]] = {"engines": Counter(), "processes": Counter()}
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._excesses: list[str] = []

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        """Start to count."""
        if self._runs_tests and not session.config.option.collectonly:
            self._counter = StartCounter()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> None:
        """Count for the area of this test."""
        if self._counter:
            self._counter.begin(item.nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add the time of a test's setup, call or teardown."""
        self._seconds[report.nodeid] += report.duration

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Add the counts of a worker; one that was killed has none."""
        self._add(getattr(node, "workeroutput", {}).get("counts", {}))

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Give the counts to the process with the terminal; there the run fails above the budget."""
        counts = self._counter.counts() if self._counter else {}
        if self._is_worker:
            session.config.workeroutput["counts"] = counts  # type: ignore[attr-defined]
            return
        self._add(counts)
        if session.config.option.markexpr in ("", "not long"):  # the nightly tests have no budget
            self._excesses = [*excesses(self._counts, _budget())]
        if self._excesses and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def _add(self, counts: Counts) -> None:
        for kind, areas in counts.items():
            self._counts[kind].update(areas)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the table of areas, the slowest tests, and the counts above their budget."""
        if not self._seconds:
            return
        minutes: defaultdict[str, float] = defaultdict(float)
        for test, seconds in self._seconds.items():
            minutes[area_of(test)] += seconds / 60
        terminalreporter.section("minutes, engines and started processes by area")
        for area, value in sorted(minutes.items(), key=itemgetter(1), reverse=True):
            engines, processes = (self._counts[kind][area] for kind in ("engines", "processes"))
            terminalreporter.line(f"{value:7.1f} min {engines:4} engines {processes:5} processes  {area}")
        engines, processes = (self._counts[kind].total() for kind in ("engines", "processes"))
        terminalreporter.line(f"{sum(minutes.values()):7.1f} min {engines:4} engines {processes:5} processes  together")
        terminalreporter.section(f"the {NUM_SLOWEST} slowest tests")
        for test, seconds in nlargest(NUM_SLOWEST, self._seconds.items(), key=itemgetter(1)):
            terminalreporter.line(f"{seconds:7.1f} s  {test}")
        for excess in self._excesses:
            terminalreporter.line(f"ERROR {excess}", red=True)


def _budget() -> Counts:
    return tomllib.loads(BUDGET.read_text())
