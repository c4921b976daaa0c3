"""A service's first process: its verdict, its start with the same process, its end if it is not taken."""

from __future__ import annotations

import asyncio
import os
import sys
import textwrap
from pathlib import Path

import psutil
import pytest

from gspo.cli.processes import preflight
from gspo.cli.processes.preflight import Preflight, PreflightProcess

_WAITS = """
import os, sys
from gspo.common.service.options import receive_start_command, report_checked
sys.stderr.write("warning: looked\\n"); sys.stderr.flush()
report_checked()
receive_start_command()
print(os.getpid(), *sys.argv[1:])
"""


def program(body: str, *arguments: str) -> tuple[str, ...]:
    return (sys.executable, "-P", "-c", textwrap.dedent(body), *arguments)


async def started(command: tuple[str, ...]) -> PreflightProcess:
    return await PreflightProcess.start("reward", command, os.environ)


async def test_the_process_that_has_checked_becomes_the_service(tmp_path: Path) -> None:
    command, log = program(_WAITS, "--check", "config.yaml"), tmp_path / "reward-0.log"
    log.write_text("before\n")
    first = await started(command)
    assert await first.verdict() == (0, "warning: looked\n")
    service = first.become_service((*command[:4], "--run-dir", "runs/a b"), log)
    assert service is not None
    assert await service.wait() == 0
    assert log.read_text() == f"before\n{service.pid} --run-dir runs/a b\n"


async def test_a_refusal_is_the_verdict() -> None:
    first = await started(program("import sys; sys.exit('error: no')"))
    assert await first.verdict() == (1, "error: no\n")
    assert first.become_service(first.program, Path("unused")) is None


async def test_a_check_has_ended_though_its_child_holds_the_connection() -> None:
    body = "import subprocess, sys; subprocess.Popen(['sleep', '60'], stderr=subprocess.DEVNULL); sys.exit(2)"
    first = await started(program(body))
    async with asyncio.timeout(20):
        assert await first.verdict() == (2, "")
    os.killpg(first._process.pid, 9)


async def test_another_program_is_not_taken_for_it(tmp_path: Path) -> None:
    first = await started(program(_WAITS))
    await first.verdict()
    assert first.become_service(program("print()", "--run-dir", "x"), tmp_path / "log") is None
    assert await first._process.wait() == -9


async def test_it_ends_when_the_command_line_has_died() -> None:
    first = await started(program(_WAITS))
    await first.verdict()
    first._close()
    assert await first._process.wait() == 0


async def test_a_check_that_hangs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "CHECK_TIMEOUT_S", 0.2)
    first = await started(program("import time; time.sleep(60)"))
    with pytest.raises(Exception, match=r"the check of reward took longer than 0\.2 s"):
        await first.verdict()
    first.end()


async def test_those_that_nobody_takes_end_with_the_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "check_command", lambda service, _: program(_WAITS, service))
    with Preflight(tmp_path, coordinator_options=("--evaluate",)) as first:
        for service in ("coordinator", "reward"):
            assert (await first.check(service, Path("config.yaml"), {}))[0] == 0
        assert "--evaluate" in psutil.Process(first._processes["coordinator-0"]._process.pid).cmdline()
        remaining, taken = first._processes["coordinator-0"], first.take("reward-0")
    assert taken is not None
    command = psutil.Process(taken._process.pid).cmdline()
    assert command[-4:] == ["--name", "reward-0", "--run-dir", str(tmp_path)]
    assert "--evaluate" not in command
    assert await remaining._process.wait() == -9
    assert taken._process.returncode is None
    taken.end()
