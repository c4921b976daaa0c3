"""CPU and memory of the run's processes: measured on a real one, and never of a stranger with the same process id."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from gspo.cli.monitor.process_usage import UsageMeter
from gspo.common.streams.instances import Instance

# A process that keeps a core busy, with a child that holds 50 MB.
_PROGRAM = """
import subprocess, sys
subprocess.Popen([sys.executable, "-c", "import sys; held = bytearray(50_000_000); sys.stdin.read()"], stdin=-1)
while True:
    pass
"""


@pytest.fixture
def busy() -> Iterator[int]:
    """The process id of a program started as a service is."""
    process = subprocess.Popen([sys.executable, "-c", _PROGRAM, "--name", "reward-0"])
    yield process.pid
    process.kill()
    process.wait(10)


def test_a_process_is_measured_with_its_children(busy: int) -> None:
    usage, instance = UsageMeter(), Instance("reward", "reward-0", pid=busy, uid="a")
    first = usage.measure([instance])["a"]
    assert first.cpu is None, "a share of time needs two looks"
    deadline = time.monotonic() + 20
    while ((used := usage.measure([instance])["a"]).memory_bytes or 0) < 55_000_000 or not used.cpu:
        assert time.monotonic() < deadline, used
        time.sleep(0.1)
    assert 0 < used.cpu < 8


def test_a_process_id_of_another_machine_is_nobody_here(busy: int) -> None:
    usage = UsageMeter()
    assert usage.measure([Instance("learner", "learner-0", pid=busy, uid="b")]) == {}
    assert usage.measure([Instance("learner", "learner-0", pid=2**22 + 1, uid="c")]) == {}
