"""One process of `environment.mcp.command`, in a sandbox, with pipes to its standard input and output.

At the level bubblewrap it has namespaces of its own for files, processes, users and network. It reads its own files and
the system's, and reaches no address. Its processes end with the first of them, or with the process that started it.

At the level rlimits there are no namespaces: a process with limits, which does what its user may do. It ends with the
process that started it; processes that it started itself are ended with it only if they stay in its session.

Not covered: as for agents (services/gspo/agents/agent_sandbox.py). Messages are in stdio_streams.py.
"""

import asyncio
import json
import os
import sys

import structlog

from gspo.common.config.gateway import McpConfig
from gspo.reward.sandbox.bubblewrap import INSIDE, new_uid, python_places, start_process
from gspo.reward.sandbox.launch import ConfinementLevel
from gspo.reward.sandbox.memory_watch import MemoryWatch
from gspo.reward.sandbox.program_sandbox import END_S, GRACE_S, ProgramSandbox

# The log has the beginning of the output of each process: there is one for each rollout.
_MAX_OUTPUT_BYTES = 4096
# -I leaves out PYTHONPATH and the working folder.
_PROGRAM = """
import sys
sys.path.insert(0, {folder!r})
from inside import agent_profile
agent_profile.become_command(sys.argv[1])
"""
log = structlog.get_logger()


class ServerProgram(ProgramSandbox):
    """The process; started once."""

    def __init__(self, config: McpConfig, level: ConfinementLevel, watch: MemoryWatch) -> None:
        super().__init__(level, watch, config.memory_mb)
        self._config = config

    async def start(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Start it.

        Returns:
            Its standard output and its standard input.

        Raises:
            OSError: It does not start.
        """
        uid = new_uid()
        if not self._wrapped:
            self._make_folder("gspo-mcp-", 0o1777)
        places = [*python_places(), *(path.resolve() for path in self._config.reads)]
        program = _PROGRAM.format(folder=str(INSIDE.parent))
        setup = self._profile(uid, places, self._config.command, self._config.reads)
        setup["parent"] = 0 if self._wrapped else os.getpid()
        self._process = await start_process(
            *self._bubblewrap(places, uid),
            *(sys.executable, "-I", "-X", "utf8", "-c", program, json.dumps(setup)),
            env=self._environment("mcp"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        assert self._process.stdin and self._process.stdout and self._process.stderr  # noqa: S101 - pipes
        self._printing = asyncio.create_task(self._log_output(self._process.stderr))
        self._watch.add(self._process.pid, self._memory_mb, self._end_for_memory, has_network=self._wrapped)
        return self._process.stdout, self._process.stdin

    async def close(self) -> None:
        """End it: its input ends, and after a moment its processes are killed. Its output must be read meanwhile."""
        if (process := self._process) is not None:
            self._watch.remove(process.pid)
            assert process.stdin is not None  # noqa: S101 - a pipe
            process.stdin.close()
            if not await self._has_ended(GRACE_S):
                self._kill_group()
                if not await self._has_ended(END_S):
                    log.error("mcp_server_not_ended", pid=process.pid, detail=f"{END_S:g} s after SIGKILL")
            self._kill_group()  # processes of its group that are left
        await self._clean_up()

    def _end_for_memory(self, excess: str) -> None:
        if self.pid is not None:
            log.warning("mcp_server_over_memory", detail=f"it {excess}")
            self._kill_group()

    async def _log_output(self, stderr: asyncio.StreamReader) -> None:
        """Log what it prints to standard error, by lines."""
        num_printed = 0
        async for line in self._lines(stderr):
            num_printed += len(line) + 1
            if num_printed <= _MAX_OUTPUT_BYTES:
                log.info("mcp_output", line=line)
