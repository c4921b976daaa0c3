"""One sandbox of an agent: the processes that play one rollout, behind relays to the gateway and to named hosts.

At the level bubblewrap it has namespaces of its own for files, processes, users and network. Within, only the loopback
interface exists. The sandbox's program (player/program.py) opens sockets that listen there, and passes them out: this
process accepts their connections, and connects each to the socket's one address. A host's name leads to its socket by
the sandbox's /etc/hosts.

At the level rlimits there are no namespaces: a process with limits, which reaches what its user reaches.

A sandbox plays one rollout and ends. So no rollout finds what another has written, nor a process that it has changed.

Not covered: as for reward functions (services/gspo/reward/sandbox/execution.py), and what named hosts let through.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import structlog

from gspo.agents import player
from gspo.agents.player.loading import UnfitAgentError
from gspo.agents.player.program import HEAD_BYTES, LISTENING, framed
from gspo.agents.player.task import Task
from gspo.agents.relay import Dial, Relay, dial_host, readable
from gspo.agents.worker import AgentFailedError, RolloutLostError
from gspo.common.config.gateway import AgentConfig
from gspo.common.host.module_command import SUPERVISOR_VARIABLE
from gspo.common.plain_json import whole_text
from gspo.common.score_numbers import NUMBER_RULE, bounded_number
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
    site_folders,
    start_process,
    system_folders,
)
from gspo.reward.sandbox.inside import scratch
from gspo.reward.sandbox.launch import ConfinementLevel
from gspo.reward.sandbox.memory_watch import MemoryWatch

# The agent's own imports, on a busy machine.
LOAD_TIMEOUT_S = 120.0
_END_S, _GRACE_S, _LOOK_EVERY_S = 5.0, 1.0, 0.005
# Files in memory: of a rollout, and of /dev/shm.
FOLDER_BYTES, SHARED_BYTES = 256 * 2**20, 64 * 2**20
# As many as fit if none is empty: of each, the kernel has a kilobyte beside the size.
FOLDER_FILES, SHARED_FILES = 65536, 4096
_NUM_TASKS = 1024
_MAX_OUTPUT_BYTES, _MAX_LINE = 65536, 4096
_MAX_ANSWER_BYTES = 2**20
_MAX_DESCRIPTORS = 250
_FOLDER_INSIDE, _SHARED_INSIDE = "/tmp", "/dev/shm"  # noqa: S108 - of the sandbox alone
_LOOPBACK = "127.0.0.1"
_PLAYER = Path(player.__file__).parent
# Certificates of authorities, for connections of TLS to named hosts.
_CERTIFICATES = ("/etc/ssl", "/etc/pki", "/etc/ca-certificates")
# -I leaves out PYTHONPATH, on which all packages may lie.
_PROGRAM = """
import sys
sys.path += {paths!r}
sys.path[:0] = {folders!r}
from inside import agent_profile, confine
from player import program
del sys.path[:2]
program.main(agent_profile.confine_agent, confine.hide, agent_profile.become_rollout)
"""
log = structlog.get_logger()


class AgentSandbox:
    """A place for sandboxes: each plays one rollout and ends with it; another is started by `start`, or on demand.

    Args:
        level: bubblewrap or rlimits.
        gateway: Opens a connection to a gateway.
        watch: Ends it if it has too much memory.
        max_connections: Through its relays at a time; further ones wait.
    """

    def __init__(
        self, config: AgentConfig, level: ConfinementLevel, gateway: Dial, watch: MemoryWatch, max_connections: int
    ) -> None:
        self._config, self._filter, self._gateway = config, level.filter, gateway
        self._wrapped = level.name == "bubblewrap"
        self._watch, self._max_connections, self._url = watch, max_connections, ""
        self._process: asyncio.subprocess.Process | None = None
        self._folder: Path | None = None
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._relays: list[Relay] = []
        self._printing: asyncio.Task[None] | None = None
        self._rollout, self._num_printed, self._last_line = "", 0, ""
        self._excess = ""

    @property
    def pid(self) -> int | None:
        """The id of its first process; None while it has none."""
        return self._process.pid if self._process and self._process.returncode is None else None

    async def start(self) -> None:
        """Start it and load the agent, unless it is running.

        Raises:
            UnfitAgentError: There is no agent that could play.
            RolloutLostError: It does not start; the text is the last line that it wrote.
        """
        if self.pid is not None and self._streams:
            return
        await self.close()
        self._rollout, self._num_printed, self._excess = "", 0, ""
        try:
            async with asyncio.timeout(LOAD_TIMEOUT_S):
                await self._launch()
                loaded = await self._receive()
        except (OSError, EOFError, TimeoutError) as error:
            await asyncio.sleep(0)  # the last line may have come with the end
            reason = self._last_line or str(error) or f"it took longer than {LOAD_TIMEOUT_S:g} s"
            await self.close()
            raise RolloutLostError(f"the agent's sandbox does not start: {reason}") from error
        except BaseException:
            await self.close()
            raise
        if "unfit" in loaded:
            await self.close()
            raise UnfitAgentError(str(loaded["unfit"]), str(loaded["fix"]))

    async def play(self, task: Task) -> float | None:
        """Play one rollout to its end; its reward. Every process of it has ended then.

        Raises:
            AgentFailedError: The agent has failed.
            RolloutLostError: A process of the sandbox has died.
        """
        await self.start()
        self._rollout, self._num_printed = task.id, 0
        if self.pid is not None:
            self._watch.add(self.pid, self._config.memory_mb, self._end_for_memory, has_network=self._wrapped)
        try:
            await self._send({"task": asdict(replace(task, base_url=f"{self._url}/v1"))})
            answer = await self._receive()
        except (OSError, EOFError) as error:
            if self._excess:
                raise AgentFailedError("memory", self._excess) from error
            raise RolloutLostError("the sandbox that played it has died") from error
        finally:
            await self.close()
        return _reward_of(answer)

    def _end_for_memory(self, excess: str) -> None:
        self._excess = excess
        self._kill()

    async def close(self) -> None:
        """End every process of it."""
        if self._process is not None:
            self._watch.remove(self._process.pid)
        self._kill()
        if not await self._has_ended(_END_S):  # without namespaces, and stopped or within the agent's own import
            self._kill_group()
            await self._has_ended(_END_S)
        if self._process is not None:
            with suppress(TimeoutError):  # unless a process that has left it holds the end of its output
                async with asyncio.timeout(_GRACE_S):
                    await self._process.wait()
        if self._printing is not None:
            self._printing.cancel()
            await asyncio.gather(self._printing, return_exceptions=True)
        for relay in self._relays:
            await relay.__aexit__()
        if self._streams:
            self._streams[1].transport.abort()
        if self._folder is not None:
            scratch.remove(self._folder)
        self._process, self._folder, self._streams, self._printing, self._relays = None, None, None, None, []

    async def _has_ended(self, patience_s: float) -> bool:
        # Not by wait(): it also waits for the ends of pipes, which another process may have inherited.
        deadline_s = time.monotonic() + patience_s
        while self.pid is not None and time.monotonic() < deadline_s:
            await asyncio.sleep(_LOOK_EVERY_S)
        return self.pid is None

    def _kill(self) -> None:
        """Every process: with the first one of a namespace all others end. Without one, the program ends the others."""
        if not self._wrapped and self._streams:
            self._streams[1].transport.abort()
        else:
            self._kill_group()

    def _kill_group(self) -> None:
        if self.pid is not None:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    async def _launch(self) -> None:
        here, there = socket.socketpair()
        folder = self._folder = Path(tempfile.mkdtemp(prefix="gspo-agent-")).resolve()
        uid = new_uid()
        folder.chmod(0o1777 if not self._wrapped else 0o755)
        places = [*python_places(), _PLAYER, *map(Path, _CERTIFICATES), *self._visible()]
        folders, paths = [str(INSIDE.parent), str(_PLAYER.parent)], site_folders()
        program = _PROGRAM.format(folders=folders, paths=paths)
        python = [sys.executable, "-I", "-u", "-X", "utf8", "-c", program, str(there.fileno())]
        command = [*(self._bubblewrap(places, uid, folder) if self._wrapped else []), *python]
        with there:
            self._process = await start_process(
                *command,
                env=self._environment(),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                pass_fds=(there.fileno(),),
            )
        self._printing = asyncio.create_task(self._log_output(self._process))
        listen = self._inner_addresses() if self._wrapped else []
        here.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(here, framed(self._setup(places, uid, folder, listen)))
        await self._open_relays(await _passed_out(here) if listen else [socket.create_server((_LOOPBACK, 0))])
        self._streams = await asyncio.open_connection(sock=here)

    def _setup(self, places: list[Path], uid: int, folder: Path, listen: list[tuple[str, int]]) -> dict[str, Any]:
        config, wrapped = self._config, self._wrapped
        return {
            "listen": listen,
            "uid": uid,
            "user_namespace": wrapped,
            "places": [str(place) for place in places],
            "in_memory": {_FOLDER_INSIDE: FOLDER_FILES, _SHARED_INSIDE: SHARED_FILES} if wrapped else {},
            "memory_mb": config.memory_mb,
            "num_tasks": _NUM_TASKS if wrapped or uid else 16 * _NUM_TASKS,
            "filter": self._filter.hex(),
            "path": str(config.path.resolve()) if config.path else "",
            "entry": config.entry,
            "command": list(config.command),
            "reads": [str(path.resolve()) for path in config.reads],
            "folder": _FOLDER_INSIDE if wrapped else str(folder),
        }

    def _visible(self) -> list[Path]:
        path = [self._config.path] if self._config.path else []
        return [place.resolve() for place in (*path, *self._config.reads)]

    def _environment(self) -> Mapping[str, str]:
        """The agent's: no variable of the service's, but without namespaces the one by which a run ends it."""
        path = f"{Path(sys.executable).parent}:{ENVIRONMENT['PATH']}"
        supervised = {} if self._wrapped else {SUPERVISOR_VARIABLE: os.environ.get(SUPERVISOR_VARIABLE, "")}
        return ENVIRONMENT | {"PATH": path, "PYTHONUNBUFFERED": "1", "USER": "agent"} | supervised

    def _bubblewrap(self, places: list[Path], uid: int, folder: Path) -> list[str]:
        """The command line before the program; it gives up the further capabilities before user code runs."""
        words = [*new_namespaces(uid, "CAP_NET_BIND_SERVICE", "CAP_SYS_ADMIN"), *system_folders()]
        words += proc_and_dev()
        words += [*memory_folder(_SHARED_INSIDE, SHARED_BYTES), "--remount-ro", "/dev"]
        words += memory_folder(_FOLDER_INSIDE, FOLDER_BYTES)
        names = "".join(f"{address} {name}\n" for name, address in self._addresses().items())
        (folder / "hosts").write_text(f"{_LOOPBACK} localhost\n{names}")
        (folder / "nsswitch.conf").write_text("hosts: files\n")
        words += shown_paths([*map(Path, (*ETC, *SHOWN)), *places])
        for name in ("hosts", "nsswitch.conf"):
            (folder / name).chmod(0o644)
            words += ["--ro-bind", str(folder / name), f"/etc/{name}"]
        return [*words, "--remount-ro", "/", "--chdir", "/", "--hostname", "sandbox", "--"]

    def _addresses(self) -> dict[str, str]:
        """Name of each host -> its address within: one of loopback's."""
        names = dict.fromkeys(address.rpartition(":")[0] for address in self._config.hosts)
        of_others = [name for name in names if not name.startswith("127.") and name != "localhost"]
        return {name: f"127.0.{1 + number // 250}.{1 + number % 250}" for number, name in enumerate(of_others)}

    def _inner_addresses(self) -> list[tuple[str, int]]:
        """The addresses at which the sandbox listens: of each host, then of the gateway, at any free port."""
        addresses = self._addresses() | {"localhost": _LOOPBACK}
        hosts = [address.rpartition(":") for address in self._config.hosts]
        return [*((addresses.get(host, host), int(port)) for host, _, port in hosts), (_LOOPBACK, 0)]

    async def _open_relays(self, listening: list[socket.socket]) -> None:
        """Relay the connections to these sockets: each host's, then the gateway's."""
        slots = asyncio.Semaphore(self._max_connections)
        *of_hosts, of_gateway = listening
        self._url = f"http://{_LOOPBACK}:{of_gateway.getsockname()[1]}"
        self._relays = [Relay(of_gateway, "gateway", self._gateway, slots)]
        for of_host, address in zip(of_hosts, self._config.hosts, strict=bool(of_hosts)):
            self._relays.append(Relay(of_host, address, dial_host(address), slots))
        for relay in self._relays:
            await relay.__aenter__()

    async def _send(self, message: dict[str, Any]) -> None:
        assert self._streams is not None  # noqa: S101 - it has started
        self._streams[1].write(framed(message))
        await self._streams[1].drain()

    async def _receive(self) -> dict[str, Any]:
        """The next answer, which user code may have forged: of whole text, and numbers that may be of any size.

        Raises:
            EOFError: There is none: it has ended, or sent something else.
        """
        assert self._streams is not None  # noqa: S101 - it has started
        reader = self._streams[0]
        size = int.from_bytes(await reader.readexactly(HEAD_BYTES), "big")
        if size > _MAX_ANSWER_BYTES:
            raise EOFError("its answer is too long")
        body = await reader.readexactly(size)
        try:
            answer: Any = whole_text(json.loads(body))
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict):
            raise EOFError("its answer is none")
        return answer

    async def _log_output(self, process: asyncio.subprocess.Process) -> None:
        """Log what it prints, by lines."""
        assert process.stdout is not None  # noqa: S101 - a pipe
        rest = b""
        while chunk := await process.stdout.read(_MAX_LINE):
            *lines, rest = (rest + chunk).split(b"\n")
            if len(rest) > _MAX_LINE:
                lines, rest = [*lines, rest], b""
            for line in lines:
                self._log_line(line)
        self._log_line(rest)

    def _log_line(self, line: bytes) -> None:
        text = line.decode(errors="replace").rstrip()
        if not text:
            return
        self._last_line = text
        was_all = self._num_printed <= _MAX_OUTPUT_BYTES
        self._num_printed += len(line) + 1
        if self._num_printed <= _MAX_OUTPUT_BYTES:
            log.info("agent_output", rollout=self._rollout, line=text)
        elif was_all:
            log.info("agent_output_cut", rollout=self._rollout, detail=f"it has printed {_MAX_OUTPUT_BYTES} bytes")


async def _passed_out(control: socket.socket) -> list[socket.socket]:
    """The sockets that listen within, which the sandbox's program passes out before user code runs.

    Raises:
        EOFError: It has ended.
    """
    await readable(control)
    data, descriptors, _, _ = socket.recv_fds(control, len(LISTENING), _MAX_DESCRIPTORS)
    if data != LISTENING:
        raise EOFError("it has ended")
    return [socket.socket(fileno=descriptor) for descriptor in descriptors]


def _reward_of(answer: dict[str, Any]) -> float | None:
    """The reward of an answer.

    Raises:
        AgentFailedError: The agent has failed.
        RolloutLostError: Its process has died.
    """
    if "died" in answer:
        raise RolloutLostError(f"the process that played it was killed by {_signal_name(answer['died'])}")
    if "failure" in answer:
        raise AgentFailedError(str(answer.get("kind")), str(answer["failure"]))
    reward = answer.get("reward")
    if reward is not None and bounded_number(reward) is None:
        raise AgentFailedError("invalid_return", f"its reward is {reward!r:.100}, and a reward is {NUMBER_RULE}")
    return bounded_number(reward)


def _signal_name(number: Any) -> str:
    try:
        return signal.Signals(int(number)).name
    except (ValueError, TypeError):
        return f"signal {number!r:.20}"
