"""The process that makes the run's page, `gspo view` on a Unix socket: started at the first request, ended when idle.

A process of its own keeps the page's questions to the log, their memory and their libraries away from the coordinator.
It ends when its standard input does, so with the coordinator, however that ends.
"""

import asyncio
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import structlog

from gspo.common.host.module_command import module_command

START_S, IDLE_S = 120.0, 900.0
_LOOK_S, _END_S = 0.1, 5.0
_ERRORS, _MAX_ERROR_CHARS = "errors", 500
log = structlog.get_logger()


class PageUnavailableError(Exception):
    """The page's process does not start; the message says why."""


@dataclass(frozen=True)
class _Started:
    """A started process and the folder of its socket, which only this user may enter."""

    process: asyncio.subprocess.Process
    folder: Path

    @property
    def socket(self) -> Path:
        return self.folder / "page"

    def errors(self) -> str:
        """The end of its standard error."""
        text = (self.folder / _ERRORS).read_text(errors="replace").strip()
        return text[-_MAX_ERROR_CHARS:]

    async def end(self) -> None:
        """Close its standard input, wait for its end, and kill it if that takes long."""
        if self.process.returncode is None:
            if self.process.stdin is not None:
                self.process.stdin.close()
            try:
                async with asyncio.timeout(_END_S):
                    await self.process.wait()
            except TimeoutError:
                self.process.kill()
                await self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


class PageProcess:
    """Starts the process when it is asked for, again after a crash.

    Args:
        run_dir: Directory of the run.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir, self._changing = run_dir, asyncio.Lock()
        self._started: _Started | None = None
        self._num_users, self._used = 0, time.monotonic()

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Keep the process during the block."""
        self._num_users += 1
        try:
            yield
        finally:
            self._num_users -= 1
            self._used = time.monotonic()

    async def socket(self) -> Path:
        """The socket of the running process.

        Raises:
            PageUnavailableError: It ended at its start, or took longer than START_S.
        """
        async with self._changing:
            if self._started is None or self._started.process.returncode is not None:
                await self._end()
                self._started = await self._start()
                log.info("page_started", process=self._started.process.pid)
            return self._started.socket

    async def has_ended(self) -> bool:
        """Whether the process has ended, after a refused connection: the news of its end may come later than that."""
        started = self._started
        if started is None:
            return True
        try:
            async with asyncio.timeout(_END_S):
                await started.process.wait()
        except TimeoutError:
            return False
        return True

    async def _start(self) -> _Started:
        folder = Path(tempfile.mkdtemp(prefix="gspo-page-"))
        command = (*module_command("gspo.cli"), "view", str(self._run_dir), "--socket", str(folder / "page"))
        with (folder / _ERRORS).open("wb") as errors:
            process = await asyncio.create_subprocess_exec(
                *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.DEVNULL, stderr=errors
            )
        started, deadline = _Started(process, folder), time.monotonic() + START_S
        try:
            while not started.socket.exists():
                if process.returncode is not None or time.monotonic() > deadline:
                    why = started.errors() or f"it was not ready after {START_S:g} s"
                    log.error("page_does_not_start", reason=why)
                    raise PageUnavailableError(f"the page's process does not start: {why}")
                await asyncio.sleep(_LOOK_S)
        except BaseException:
            await asyncio.shield(started.end())
            raise
        return started

    async def run(self) -> None:
        """End the process when it is idle, and at the end; until cancelled."""
        try:
            while True:
                await asyncio.sleep(_END_S)
                if self._started is not None and not self._num_users and time.monotonic() > self._used + IDLE_S:
                    log.info("page_ended", detail="nobody reads it")
                    async with self._changing:
                        await self._end()
        finally:
            await asyncio.shield(self._end())

    async def _end(self) -> None:
        started, self._started = self._started, None
        if started is not None:
            await started.end()
