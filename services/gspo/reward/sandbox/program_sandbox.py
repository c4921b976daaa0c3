"""The sandbox of one program of any language, with processes of its own: an agent in a rollout, or an MCP server.

It is the outer side of inside/agent_profile.py. Its two kinds start their program and talk to it:
services/gspo/agents/agent_sandbox.py and services/gspo/environments/mcp/server_program.py.
"""

import asyncio
import os
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from gspo.common.host.module_command import SUPERVISOR_VARIABLE
from gspo.reward.sandbox.bubblewrap import (
    ENVIRONMENT,
    ETC,
    SHOWN,
    memory_folder,
    new_namespaces,
    proc_and_dev,
    shown_paths,
    system_folders,
)
from gspo.reward.sandbox.inside import scratch
from gspo.reward.sandbox.launch import ConfinementLevel
from gspo.reward.sandbox.memory_watch import MemoryWatch

# From the end of its input, or from SIGKILL.
GRACE_S, END_S, _LOOK_EVERY_S = 1.0, 5.0, 0.005
# Files in memory: of the program, and of /dev/shm.
_FOLDER_BYTES, _SHARED_BYTES = 256 * 2**20, 64 * 2**20
# As many as fit if none is empty: of each, the kernel has a kilobyte beside the size.
_FOLDER_FILES, _SHARED_FILES = 65536, 4096
_NUM_TASKS, _MAX_LINE = 1024, 4096
_FOLDER_INSIDE, _SHARED_INSIDE = "/tmp", "/dev/shm"  # noqa: S108 - of the sandbox alone


class ProgramSandbox:
    """A sandbox, with one program at a time.

    Args:
        level: bubblewrap or rlimits.
        watch: Ends the program if it has too much memory.

    Attributes:
        last_line: What the program wrote last.
    """

    def __init__(self, level: ConfinementLevel, watch: MemoryWatch, memory_mb: int) -> None:
        self._wrapped, self._filter = level.name == "bubblewrap", level.filter
        self._watch, self._memory_mb = watch, memory_mb
        self._process: asyncio.subprocess.Process | None = None
        self._printing: asyncio.Task[None] | None = None
        self._folder: Path | None = None
        self.last_line = ""

    @property
    def pid(self) -> int | None:
        """The id of its first process; None while it has none."""
        return self._process.pid if self._process and self._process.returncode is None else None

    def _make_folder(self, prefix: str, mode: int) -> Path:
        self._folder = Path(tempfile.mkdtemp(prefix=prefix)).resolve()
        self._folder.chmod(mode)
        return self._folder

    def _profile(
        self, uid: int, places: Iterable[Path], command: Iterable[str], reads: Iterable[Path]
    ) -> dict[str, Any]:
        """The setup of agent_profile.py, but for the process with which it ends."""
        return {
            "uid": uid,
            "user_namespace": self._wrapped,
            "places": [str(place) for place in places],
            "in_memory": {_FOLDER_INSIDE: _FOLDER_FILES, _SHARED_INSIDE: _SHARED_FILES} if self._wrapped else {},
            "memory_mb": self._memory_mb,
            "num_tasks": _NUM_TASKS if self._wrapped or uid else 16 * _NUM_TASKS,
            "filter": self._filter.hex(),
            "command": list(command),
            "reads": [str(path.resolve()) for path in reads],
            "folder": _FOLDER_INSIDE if self._wrapped else str(self._folder),
        }

    def _environment(self, user: str) -> dict[str, str]:
        """No variable of the service's, but without namespaces the one by which a run ends it."""
        path = f"{Path(sys.executable).parent}:{ENVIRONMENT['PATH']}"
        supervised = {} if self._wrapped else {SUPERVISOR_VARIABLE: os.environ.get(SUPERVISOR_VARIABLE, "")}
        return {**ENVIRONMENT, "PATH": path, "PYTHONUNBUFFERED": "1", "USER": user, **supervised}

    def _bubblewrap(self, places: Iterable[Path], uid: int, *capabilities: str, more: Iterable[str] = ()) -> list[str]:
        """The command line before the program, which gives up its capabilities before user code runs.

        Args:
            capabilities: Beside those by which it enters namespaces of its own.
            more: Further words.
        """
        if not self._wrapped:
            return []
        words = [*new_namespaces(uid, *capabilities, "CAP_SYS_ADMIN"), *system_folders(), *proc_and_dev()]
        words += [*memory_folder(_SHARED_INSIDE, _SHARED_BYTES), "--remount-ro", "/dev"]
        words += memory_folder(_FOLDER_INSIDE, _FOLDER_BYTES)
        words += [*shown_paths([*map(Path, (*ETC, *SHOWN)), *places]), *more]
        return [*words, "--remount-ro", "/", "--chdir", "/", "--hostname", "sandbox", "--"]

    async def _lines(self, output: asyncio.StreamReader) -> AsyncIterator[str]:
        """The lines that the program prints, but for empty ones; a long one comes in pieces."""
        rest = b""
        while chunk := await output.read(_MAX_LINE):
            *lines, rest = (rest + chunk).split(b"\n")
            if len(rest) > _MAX_LINE:
                lines, rest = [*lines, rest], b""
            for line in filter(None, map(_text, lines)):
                self.last_line = line
                yield line
        if text := _text(rest):
            self.last_line = text
            yield text

    async def _has_ended(self, patience_s: float) -> bool:
        # Not by wait(): it also waits for the ends of pipes, which another process may have inherited.
        deadline_s = time.monotonic() + patience_s
        while self.pid is not None and time.monotonic() < deadline_s:
            await asyncio.sleep(_LOOK_EVERY_S)
        return self.pid is None

    def _kill_group(self) -> None:
        """Kill the first process with its group: with the first one of a namespace all others end."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    async def _clean_up(self) -> None:
        """Forget the process, which has ended, with its output and its folder."""
        if self._process is not None:
            with suppress(TimeoutError):  # unless a process that has left it holds the end of its output
                async with asyncio.timeout(GRACE_S):
                    await self._process.wait()
            # Its ends of pipes that stay open; two turns of the loop close them.
            self._process._transport.close()  # type: ignore[attr-defined]
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        if self._printing is not None:
            self._printing.cancel()
            await asyncio.gather(self._printing, return_exceptions=True)
        if self._folder is not None:
            scratch.remove(self._folder)
        self._process, self._printing, self._folder = None, None, None


def _text(line: bytes) -> str:
    return line.decode(errors="replace").rstrip()
