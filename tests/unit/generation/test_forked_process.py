"""A process that is forked early: it runs what it is given later, and never outlives a parent that gives it nothing."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil

# In a process of its own: pytest's has threads.
_PROGRAM = """
import os, sys, threading, time
from multiprocessing import current_process
from multiprocessing.connection import wait
from gspo.generation.engine.process import ForkedProcess

def work(path, code):
    open(path, "w").write(f"{current_process().name} {os.environ['LATER']} {os.getpid()}")
    sys.exit(code)

"""


def _run(body: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", _PROGRAM + body, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)


def test_it_runs_its_work_with_the_environment_of_the_start(tmp_path: Path) -> None:
    done = _run(
        """
process = ForkedProcess()
os.environ["LATER"] = "yes"
made = process.Process(target=work, name="EngineCore", kwargs={"path": sys.argv[1], "code": 3})
made.start()
wait([made.sentinel], 10)
made.join()
print(made.name, made.pid, made.exitcode, made.is_alive())
""",
        tmp_path / "out",
    )
    name, pid, *rest = done.stdout.split()
    assert (tmp_path / "out").read_text() == f"EngineCore yes {pid}"
    assert [name, *rest] == ["EngineCore", "3", "False"]


def test_there_is_one_piece_of_work() -> None:
    done = _run(
        """
process = ForkedProcess()
process.Process(target=work, name="a", kwargs={})
process.Process(target=work, name="b", kwargs={})
"""
    )
    assert "process b: the one forked process has its work already" in done.stderr


def test_a_parent_that_ends_without_work_does_not_wait_for_it() -> None:
    done = _run("print(ForkedProcess().pid)")
    assert done.returncode == 0
    assert not psutil.pid_exists(int(done.stdout))


def test_it_ends_with_a_parent_that_is_killed() -> None:
    body = "process = ForkedProcess(); print(process.pid, flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", _PROGRAM + body], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        parent.stdout.readline()
        os.kill(parent.pid, signal.SIGKILL)
        # The forked process has inherited this pipe: its end comes when both are gone.
        assert parent.stdout.read() == ""


def test_it_is_refused_where_there_are_threads() -> None:
    done = _run("threading.Thread(target=time.sleep, args=(1,), daemon=True).start(); ForkedProcess()")
    assert "a process is forked while there is one thread, and there are 2" in done.stderr
