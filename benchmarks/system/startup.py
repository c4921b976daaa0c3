"""Part S, the start: from `gspo run` to the first answer, and the processor time that each process has used by then.

Time says little on a machine that does other things too; processor time does.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import psutil
from redis import Redis
from redis.exceptions import RedisError

from benchmarks.harness.child_process import MeasurementError, tail
from benchmarks.harness.gspo_run import START_S, ObservedRun, observed_run
from benchmarks.harness.measurement import Measurement
from benchmarks.harness.workload import write_config
from gspo.common.streams.keys import Keys

_LOOK_EVERY_S = 0.05
_NUM_TOKENS = 4
_SERVICES = ("coordinator", "generation", "reward", "learner")


def cases(*, quick: bool) -> Iterator[Measurement]:
    """The same start several times: the first one may compile what the next ones find. Quick: one."""
    for number in range(1, 2 if quick else 4):
        yield Measurement(f"start {number}", _measure, (number,))


@dataclass
class StartupSamples:
    """What was seen of a run's processes so far: processor time by process, and when each step of the start was."""

    processor_s: dict[int, tuple[str, float]] = field(default_factory=dict)
    reached_s: dict[str, float] = field(default_factory=dict)

    def look(self, run: ObservedRun) -> None:
        """Count the processor time of everything that runs now; what has ended keeps what it had."""
        with suppress(psutil.Error):
            command_line = psutil.Process(run.process.pid)
            for process in (command_line, *command_line.children(recursive=True)):
                with suppress(psutil.Error):
                    times = process.cpu_times()
                    # The last one: between fork and exec a process has its parent's, and at its end none.
                    name = _name(process.cmdline(), is_command_line=process == command_line)
                    name = name or self.processor_s.get(process.pid, ("others", 0.0))[0]
                    self.processor_s[process.pid] = (name, times.user + times.system)

    def reach(self, what: str, run: ObservedRun) -> None:
        """Note when this happened, the first time."""
        self.reached_s.setdefault(what, time.time() - run.started_unix_s)

    def by_name(self) -> dict[str, float]:
        """Processor time, of all processes of a name together."""
        found: dict[str, float] = {}
        for name, seconds in self.processor_s.values():
            found[name] = found.get(name, 0.0) + seconds
        return found


def _measure(number: int) -> dict[str, Any]:
    # A small run's default, no compiled graphs; and answers that take no time.
    sections = {"generation": {"engine": {}}, "algorithm": {"response_length": _NUM_TOKENS}}
    config = write_config("start", "fixed", "float32", **sections)
    watch = StartupSamples()
    with observed_run(config) as run:
        deadline = time.monotonic() + START_S
        while not _has_answer(run, watch):
            watch.look(run)
            if run.process.poll() is not None or time.monotonic() > deadline:
                raise MeasurementError(f"no answer came. {tail(run.output)}")
            time.sleep(_LOOK_EVERY_S)
        watch.look(run)
    return {"number": number, "reached_s": watch.reached_s, "processor_s": watch.by_name()}


def _has_answer(run: ObservedRun, watch: StartupSamples) -> bool:
    """Whether the first answer is in Redis; what comes before it is noted."""
    keys = Keys("run")
    try:
        with Redis.from_url(run.redis_url, socket_timeout=1) as redis:
            watch.reach("checked", run)
            if redis.exists(keys.rollouts) and redis.xinfo_stream(keys.rollouts)["last-generated-id"] != b"0-0":
                watch.reach("first answer", run)
    except (OSError, ValueError, RedisError):  # there is none yet
        return False
    return "first answer" in watch.reached_s


def _name(command: list[str], *, is_command_line: bool) -> str:
    if is_command_line:
        return "gspo run"
    if not command:
        return ""
    if any("EngineCore" in word for word in command):
        return "generation"
    return next((service for service in _SERVICES if f"gspo.{service}" in command), "others")
