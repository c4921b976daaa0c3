"""One process of `environment.mcp.command`, in a sandbox, with pipes to its standard input and output.

At the level bubblewrap it has namespaces of its own for files, processes, users and network. It reads its own files and
the system's, and reaches no address. Its processes end with the first of them, or with the process that started it.

At the level rlimits there are no namespaces: a process with limits, which does what its user may do. It ends with the
process that started it; processes that it started itself are ended with it only if they stay in its session.

Not covered: as for agents (services/gspo/agents/agent_sandbox.py). Messages are in stdio_streams.py.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import structlog

from gspo.common.config.gateway import McpConfig
from gspo.common.host.module_command import SUPERVISOR_VARIABLE
from gspo.reward.sandbox.bubblewrap import (
    ENVIRONMENT,
    ETC,
    INSIDE,
    SHOWN,
    memory_folder,
    new_namespaces,
    new_uid,
    proc_and_dev,
    python_places,
    shown_paths,
    start_process,
    system_folders,
)
from gspo.reward.sandbox.inside import scratch
from gspo.reward.sandbox.launch import ConfinementLevel
from gspo.reward.sandbox.memory_watch import MemoryWatch

# From the end of its input to SIGKILL: a server that ends by itself does so in this time.
_GRACE_S, _END_S, _LOOK_EVERY_S = 1.0, 5.0, 0.01
_FOLDER_BYTES, _SHARED_BYTES, _NUM_TASKS = 256 * 2**20, 64 * 2**20, 1024
_FOLDER_FILES, _SHARED_FILES = 65536, 4096
# The log has the beginning of the output of each process: there is one for each rollout.
_MAX_OUTPUT_BYTES, _MAX_LINE = 4096, 4096
_FOLDER_INSIDE, _SHARED_INSIDE = "/tmp", "/dev/shm"  # noqa: S108 - of the sandbox alone
# -I leaves out PYTHONPATH and the working folder.
_PROGRAM = """
import sys
sys.path.insert(0, {folder!r})
from inside import agent_profile
agent_profile.become_command(sys.argv[1])
"""
log = structlog.get_logger()


class ServerProgram:
    """The process; started once.

    Args:
        level: bubblewrap or rlimits.
        watch: Ends it if it has too much memory.

    Attributes:
        last_line: What it wrote last to standard error.
    """

    def __init__(self, config: McpConfig, level: ConfinementLevel, watch: MemoryWatch) -> None:
        self._config, self._level, self._watch = config, level, watch
        self._wrapped = level.name == "bubblewrap"
        self._process: asyncio.subprocess.Process | None = None
        self._printing: asyncio.Task[None] | None = None
        self._folder: Path | None = None
        self.last_line = ""

    @property
    def pid(self) -> int | None:
        """The id of its first process; None while it has none."""
        return self._process.pid if self._process and self._process.returncode is None else None

    async def start(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Start it.

        Returns:
            Its standard output and its standard input.

        Raises:
            OSError: It does not start.
        """
        uid = new_uid()
        if not self._wrapped:
            self._folder = Path(tempfile.mkdtemp(prefix="gspo-mcp-")).resolve()
            self._folder.chmod(0o1777)
        reads = [path.resolve() for path in self._config.reads]
        places = [*python_places(), *reads]
        program = _PROGRAM.format(folder=str(INSIDE.parent))
        setup = json.dumps(self._setup(uid, places, reads))
        self._process = await start_process(
            *(_bubblewrap(places, uid) if self._wrapped else []),
            *(sys.executable, "-I", "-X", "utf8", "-c", program, setup),
            env=self._environment(),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        assert self._process.stdin and self._process.stdout and self._process.stderr  # noqa: S101 - pipes
        self._printing = asyncio.create_task(self._log_output(self._process.stderr))
        self._watch.add(self._process.pid, self._config.memory_mb, self._end_for_memory, has_network=self._wrapped)
        return self._process.stdout, self._process.stdin

    async def close(self) -> None:
        """End it: its input ends, and after a moment its processes are killed. Its output must be read meanwhile."""
        process = self._process
        if process is not None:
            self._watch.remove(process.pid)
            assert process.stdin is not None  # noqa: S101 - a pipe
            process.stdin.close()
            if not await self._has_ended(_GRACE_S):
                _kill_session(process.pid)
                if not await self._has_ended(_END_S):
                    log.error("mcp_server_not_ended", pid=process.pid, detail=f"{_END_S:g} s after SIGKILL")
            _kill_session(process.pid)  # processes of its group that are left
            with suppress(TimeoutError):  # unless another process holds the ends of its pipes
                async with asyncio.timeout(_GRACE_S):
                    await process.wait()
        if self._printing is not None:
            self._printing.cancel()
            await asyncio.gather(self._printing, return_exceptions=True)
        if self._folder is not None:
            scratch.remove(self._folder)

    def _end_for_memory(self, excess: str) -> None:
        if self.pid is not None:
            log.warning("mcp_server_over_memory", detail=f"it {excess}")
            _kill_session(self.pid)

    async def _has_ended(self, patience_s: float) -> bool:
        # Not by wait(): it also waits for the ends of pipes, which another process may have inherited.
        deadline_s = time.monotonic() + patience_s
        while self.pid is not None and time.monotonic() < deadline_s:
            await asyncio.sleep(_LOOK_EVERY_S)
        return self.pid is None

    def _setup(self, uid: int, places: list[Path], reads: list[Path]) -> dict[str, Any]:
        return {
            "uid": uid,
            "user_namespace": self._wrapped,
            "places": [str(place) for place in places],
            "in_memory": {_FOLDER_INSIDE: _FOLDER_FILES, _SHARED_INSIDE: _SHARED_FILES} if self._wrapped else {},
            "memory_mb": self._config.memory_mb,
            "num_tasks": _NUM_TASKS if self._wrapped or uid else 16 * _NUM_TASKS,
            "filter": self._level.filter.hex(),
            "parent": 0 if self._wrapped else os.getpid(),
            "command": list(self._config.command),
            "reads": [str(path) for path in reads],
            "folder": str(self._folder or _FOLDER_INSIDE),
        }

    def _environment(self) -> dict[str, str]:
        """No variable of the service's, but without namespaces the one by which a run ends it."""
        path = f"{Path(sys.executable).parent}:{ENVIRONMENT['PATH']}"
        supervised = {} if self._wrapped else {SUPERVISOR_VARIABLE: os.environ.get(SUPERVISOR_VARIABLE, "")}
        return {**ENVIRONMENT, "PATH": path, "PYTHONUNBUFFERED": "1", "USER": "mcp", **supervised}

    async def _log_output(self, stderr: asyncio.StreamReader) -> None:
        """Log what it prints to standard error, by lines."""
        num_printed, rest = 0, b""
        while chunk := await stderr.read(_MAX_LINE):
            *lines, rest = (rest + chunk).split(b"\n")
            if len(rest) > _MAX_LINE:
                lines, rest = [*lines, rest], b""
            for line in filter(None, (line.decode(errors="replace").rstrip() for line in lines)):
                self.last_line = line
                num_printed += len(line) + 1
                if num_printed <= _MAX_OUTPUT_BYTES:
                    log.info("mcp_output", line=line)
        self.last_line = rest.decode(errors="replace").rstrip() or self.last_line


def _bubblewrap(places: list[Path], uid: int) -> list[str]:
    """The command line before the program."""
    words = [*new_namespaces(uid, "CAP_SYS_ADMIN"), *system_folders(), *proc_and_dev()]
    words += [*memory_folder(_SHARED_INSIDE, _SHARED_BYTES), "--remount-ro", "/dev"]
    words += memory_folder(_FOLDER_INSIDE, _FOLDER_BYTES)
    words += shown_paths([*map(Path, (*ETC, *SHOWN)), *places])
    return [*words, "--remount-ro", "/", "--chdir", "/", "--hostname", "sandbox", "--"]


def _kill_session(pid: int) -> None:
    """Kill a process with its group: with the first one of a namespace all others end."""
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
