"""The record of a run's functions in its log: each version's source before it scores, and how its calls go.

consumes: the functions that the library hands out, and the totals of the usage counter.
produces: log/functions of the run directory, in the form of gspo.runlog.function_files.
"""

import asyncio
import copy
import time
from pathlib import Path

import structlog

from gspo.reward.functions.library import Function
from gspo.reward.registry.usage import UsageCounter
from gspo.reward.sandbox.execution import Sandbox
from gspo.runlog.function_files import FunctionSource, write_calls, write_source

WRITE_S = 10.0
log = structlog.get_logger()


class RunRecord:
    """Writes one process's part of the record.

    Args:
        log_folder: Folder of the log in the run directory.
        usage: The counter of this process.
        process: Id of this process among all of the run.
    """

    def __init__(self, log_folder: Path, usage: UsageCounter, process: str) -> None:
        self._folder, self._usage, self._process = log_folder, usage, process
        self._kept: set[str] = set()
        self._num_written = 0

    async def keep(self, function: Function) -> None:
        """Write the source of a version that is used for the first time; where the disk is full, at the next use."""
        version = function.code.version
        if version in self._kept:
            return
        try:
            await asyncio.to_thread(write_source, self._folder, source_of(function))
        except OSError as error:
            log.warning("function_not_recorded", function=function.code.name, version=version[:12], reason=str(error))
        else:
            self._kept.add(version)

    async def run(self) -> None:
        """Write the calls every WRITE_S where there are new ones, and at the end; until cancelled."""
        try:
            while True:
                await asyncio.sleep(WRITE_S)
                await self.write()
        finally:
            await asyncio.shield(self.write())

    async def write(self) -> None:
        """Write the calls, if there are new ones."""
        # A copy: the counter adds more while a thread writes.
        totals = copy.deepcopy(list(self._usage.totals.values()))
        num_counted = sum(total.calls + sum(total.failures.values()) for total in totals)
        if num_counted == self._num_written:
            return
        try:
            await asyncio.to_thread(write_calls, self._folder, self._process, totals)
        except OSError as error:
            log.warning("calls_not_recorded", reason=str(error))
        else:
            self._num_written = num_counted


def source_of(function: Function) -> FunctionSource:
    """A function as the log keeps it."""
    code = function.code
    return FunctionSource(
        name=code.name,
        version=code.version,
        kind=code.kind,
        filename=code.filename,
        entry=code.entry or "",
        source=code.text,
        args=function.args,
        # Built-ins that run a policy's code, servers and reward models are more than their text.
        is_tryable=bool(code.text) and type(function.callee) is Sandbox,
        reads=[str(path) for path in code.reads],
        used_unix_s=time.time(),
        modules=dict(code.modules),
    )
