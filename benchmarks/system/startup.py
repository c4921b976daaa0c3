"""The section `start`: from `gspo run` to the first answer, and the processor time of each process until then.

Time says little on a machine that does other things too; processor time does.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field

import pandas as pd
import psutil
from redis import Redis
from redis.exceptions import RedisError

from benchmarks.harness.child_process import MeasurementError, process_tree, tail
from benchmarks.harness.gspo_run import START_S, ObservedRun, observed_run
from benchmarks.harness.section import Effort, Measurement, PageSection, Record, Results
from benchmarks.harness.tables import table
from benchmarks.harness.workload import write_config
from gspo.common.streams.keys import SERVICES, Keys

_LOOK_EVERY_S = 0.05
_NUM_TOKENS = 4
_COMMAND_LINE, _OTHERS = "gspo run", "others"
_TEXT = """
From `gspo run` to the first answer, without compiled graphs, with answers of four tokens. *Checked*: the checks have \
passed and the run begins. The other columns are the processor time of each service and its children until the first \
answer; *others* is Redis and the like.

{starts}
"""


def measurements(effort: Effort) -> Iterator[Measurement]:
    """The same start several times: the first one may compile what the next ones load. Quick: one."""
    for number in range(1, 2 if effort.quick else 4):
        yield Measurement(f"start {number}", _measure, (number,))


@dataclass
class StartupSamples:
    """A run's start so far: name and processor time by process, and the time of each event."""

    processes: dict[int, tuple[str, float]] = field(default_factory=dict)
    reached_s: dict[str, float] = field(default_factory=dict)

    def look(self, run: ObservedRun) -> None:
        """Count the processor time of every process that runs now; an ended one keeps its last count."""
        for process in process_tree(run.process.pid):
            with suppress(psutil.Error):
                times = process.cpu_times()
                # The newest name: between fork and exec a process has its parent's, and at its end none.
                is_first = process.pid == run.process.pid
                name = _COMMAND_LINE if is_first else _name(process.cmdline())
                name = name or self.processes.get(process.pid, (_OTHERS, 0.0))[0]
                self.processes[process.pid] = (name, times.user + times.system)

    def reach(self, event: str, run: ObservedRun) -> None:
        """Note the time of an event, the first time."""
        self.reached_s.setdefault(event, time.time() - run.started_unix_s)


def _measure(number: int) -> Record:
    # A small run's default, no compiled graphs; and answers that take no time.
    sections = {"generation": {"engine": {}}, "algorithm": {"response_length": _NUM_TOKENS}}
    samples = StartupSamples()
    with observed_run(write_config("start", "fixed", "float32", **sections)) as run:
        deadline = time.monotonic() + START_S
        while not _has_answer(run, samples):
            samples.look(run)
            if run.process.poll() is not None or time.monotonic() > deadline:
                raise MeasurementError(f"no answer came. {tail(run.output)}")
            time.sleep(_LOOK_EVERY_S)
        samples.look(run)
    used: Counter[str] = Counter()
    for name, seconds in samples.processes.values():
        used[name] += seconds  # type: ignore[assignment]
    return {"number": number, "reached_s": samples.reached_s, "processor_s": dict(used)}


def _has_answer(run: ObservedRun, samples: StartupSamples) -> bool:
    """Whether the first answer is in Redis; the events before it are noted."""
    stream = Keys("run").rollouts
    try:
        with Redis.from_url(run.redis_url, socket_timeout=1) as redis:
            samples.reach("checked", run)
            if not redis.exists(stream) or redis.xinfo_stream(stream)["last-generated-id"] == b"0-0":
                return False
    except (OSError, ValueError, RedisError):  # Redis does not run yet
        return False
    samples.reach("first answer", run)
    return True


def _name(command: list[str]) -> str:
    """The service of a command line; empty for an empty one."""
    if any("EngineCore" in word for word in command):
        return "generation"
    return next((service for service in SERVICES if f"gspo.{service}" in command), _OTHERS if command else "")


def text(results: Results) -> str:
    """Seconds until the end of the checks and until the first answer, and processor time by process."""
    frame = pd.json_normalize(results["start"])
    names = (_COMMAND_LINE, *SERVICES, _OTHERS)
    used = frame.reindex(columns=[f"processor_s.{name}" for name in names], fill_value=0.0).fillna(0.0)
    return _TEXT.format(
        starts=table(
            ("", "start " + frame.number.astype(str), ""),
            ("checked, s", frame["reached_s.checked"], ".1f"),
            ("first answer, s", frame["reached_s.first answer"], ".1f"),
            *((name, used[f"processor_s.{name}"], ".1f") for name in names),
            ("processor time, s", used.sum(axis=1), ".1f"),
        )
    )


START = PageSection("start", "The start", measurements, text)
