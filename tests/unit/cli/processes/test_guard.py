"""A child process's last words, and the guard that sweeps."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gspo.cli.processes.child import LocalChild, Program
from gspo.cli.processes.exit_codes import describe_exit
from gspo.cli.processes.guard import kill_processes_of, processes_of, start_guard
from gspo.common.host.module_command import SUPERVISOR_VARIABLE


async def ended(tmp_path: Path, code: str) -> LocalChild:
    """A Python program that has ended."""
    child = LocalChild(Program("small-0", (sys.executable, "-c", code)), tmp_path, {})
    await child.start(is_restart=False)
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


def test_the_guard_kills_its_processes_when_its_input_closes() -> None:
    child = subprocess.Popen(
        ["sleep", "300"], env={**os.environ, SUPERVISOR_VARIABLE: "test-guard"}, start_new_session=True
    )
    other = subprocess.Popen(
        ["sleep", "300"], env={**os.environ, SUPERVISOR_VARIABLE: "test-other"}, start_new_session=True
    )
    try:
        guard = start_guard("test-guard")
        assert [process.pid for process in processes_of("test-guard")] == [child.pid], "not the guard itself"
        assert guard.stdin is not None
        guard.stdin.close()
        assert guard.wait(timeout=30) == 0
        assert child.wait(timeout=5) == -9
        assert other.poll() is None
    finally:
        kill_processes_of("test-other")
        child.kill()
        other.wait(timeout=5)


def test_the_guard_kills_the_sessions_it_knows() -> None:
    """Redis and vLLM's engine overwrite their environment, so it lacks the supervisor's id."""
    child = subprocess.Popen(["sh", "-c", "sleep 300 & wait"], start_new_session=True)
    ended = subprocess.Popen(["sleep", "300"], start_new_session=True)
    try:
        guard = start_guard("no-such-mark")
        assert guard.stdin is not None
        guard.stdin.write(f"{child.pid}\n{ended.pid}\n-{ended.pid}\n")
        guard.stdin.close()
        assert guard.wait(20) == 0
        assert child.wait(5) == -signal.SIGKILL
        assert processes_of("no-such-mark", (child.pid,)) == [], "the grandchild too"
        assert ended.poll() is None, "a session that was said to have ended is not ours any more"
    finally:
        for process in (child, ended):
            process.kill()
            process.wait(5)


def test_what_a_killed_leader_left_is_ended() -> None:
    leader = subprocess.Popen(["sh", "-c", "sleep 300 & wait"], start_new_session=True)
    while len(processes_of("", (leader.pid,))) < 2:
        time.sleep(0.01)
    leader.kill()
    leader.wait(5)
    assert len(processes_of("", (leader.pid,))) == 1
    kill_processes_of("", (leader.pid,))
    assert processes_of("", (leader.pid,)) == []
