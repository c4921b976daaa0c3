"""A child process's last words, and the guard that sweeps."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from services.cli.guard import MARK, kill_marked, marked, start_guard
from services.cli.processes import Child, Program, describe_exit


async def ended(tmp_path: Path, code: str) -> Child:
    """A Python program that has ended."""
    child = Child(Program("small-0", (sys.executable, "-c", code)), tmp_path, dict(os.environ))
    await child.start(again=False)
    await child.wait()
    return child


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ('print(\'{"event": "service_failed", "reason": "no space left"}\'); print(\'bye\')', "no space left"),
        ("print('{\"event\": \"fine\"}'); raise ValueError('seven')", "ValueError: seven"),
        ("print('{not json'); print('core dumped')", "{not json\ncore dumped"),
        ("", "it said nothing"),
    ],
)
async def test_last_words_are_the_logged_reason_or_the_last_lines(tmp_path: Path, code: str, words: str) -> None:
    child = await ended(tmp_path, code)
    assert child.last_words().endswith(words)


async def test_last_words_are_those_of_the_last_start(tmp_path: Path) -> None:
    (tmp_path / "small-0.log").write_text('{"reason": "of an earlier start"}\n')
    child = await ended(tmp_path, "")
    assert child.last_words() == "it said nothing"


def test_exit_codes_in_words() -> None:
    assert [describe_exit(code) for code in (3, -9, -11)] == ["exit code 3", "killed by SIGKILL", "killed by SIGSEGV"]


def test_the_guard_kills_what_carries_the_mark_when_its_input_closes() -> None:
    child = subprocess.Popen(["sleep", "300"], env={**os.environ, MARK: "test-guard"}, start_new_session=True)
    other = subprocess.Popen(["sleep", "300"], env={**os.environ, MARK: "test-other"}, start_new_session=True)
    try:
        guard = start_guard("test-guard")
        assert [process.pid for process in marked("test-guard")] == [child.pid], "not the guard itself"
        assert guard.stdin is not None
        guard.stdin.close()
        assert guard.wait(timeout=30) == 0
        assert child.wait(timeout=5) == -9
        assert other.poll() is None
    finally:
        kill_marked("test-other")
        child.kill()
        other.wait(timeout=5)
