"""One sandbox of an agent: the processes that play one rollout, behind relays to the gateway and to named hosts.

At the level bubblewrap it has namespaces of its own for files, processes, users and network. Within, only the loopback
interface exists. The sandbox's program (player/program.py) opens sockets that listen there, and passes them out: this
process accepts their connections, and connects each to the socket's one address. A host's name leads to its socket by
the sandbox's /etc/hosts.

At the level rlimits there are no namespaces: a process with limits, which reaches what its user reaches.

A sandbox plays one rollout and ends. So no rollout finds what another has written, nor a process that it has changed.

Not covered: as for reward functions (services/gspo/reward/sandbox/execution.py), and what named hosts let through.
"""

import asyncio
import json
import signal
import socket
import sys
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
from gspo.common.plain_json import whole_text
from gspo.common.score_numbers import NUMBER_RULE, bounded_number
from gspo.reward.sandbox.bubblewrap import INSIDE, new_uid, python_places, site_folders, start_process
from gspo.reward.sandbox.launch import ConfinementLevel
from gspo.reward.sandbox.memory_watch import MemoryWatch
from gspo.reward.sandbox.program_sandbox import END_S, ProgramSandbox

# The agent's own imports, on a busy machine.
LOAD_TIMEOUT_S = 120.0
_MAX_OUTPUT_BYTES, _MAX_ANSWER_BYTES = 65536, 2**20
_MAX_DESCRIPTORS = 250
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


class AgentSandbox(ProgramSandbox):
    """A place for sandboxes: each plays one rollout and ends with it; another is started by `start`, or on demand.

    Args:
        gateway: Opens a connection to a gateway.
        max_connections: Through its relays at a time; further ones wait.
    """

    def __init__(
        self, config: AgentConfig, level: ConfinementLevel, gateway: Dial, watch: MemoryWatch, max_connections: int
    ) -> None:
        super().__init__(level, watch, config.memory_mb)
        self._config, self._gateway, self._max_connections, self._url = config, gateway, max_connections, ""
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._relays: list[Relay] = []
        self._rollout, self._num_printed, self._excess = "", 0, ""

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
            reason = self.last_line or str(error) or f"it took longer than {LOAD_TIMEOUT_S:g} s"
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
            self._watch.add(self.pid, self._memory_mb, self._end_for_memory, has_network=self._wrapped)
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
        if self._process is not None:
            self._watch.remove(self._process.pid)
        self._kill()
        if not await self._has_ended(END_S):  # without namespaces, and stopped or within the agent's own import
            self._kill_group()
            await self._has_ended(END_S)
        for relay in self._relays:
            await relay.__aexit__()
        if self._streams:
            self._streams[1].transport.abort()
        self._streams, self._relays = None, []
        await self._clean_up()

    def _kill(self) -> None:
        """Every process: with the first one of a namespace all others end. Without one, the program ends the others."""
        if not self._wrapped and self._streams:
            self._streams[1].transport.abort()
        elif self.pid is not None:
            self._kill_group()

    async def _launch(self) -> None:
        here, there = socket.socketpair()
        folder, uid = self._make_folder("gspo-agent-", 0o755 if self._wrapped else 0o1777), new_uid()
        places = [*python_places(), _PLAYER, *map(Path, _CERTIFICATES), *self._visible()]
        folders, paths = [str(INSIDE.parent), str(_PLAYER.parent)], site_folders()
        program = _PROGRAM.format(folders=folders, paths=paths)
        python = [sys.executable, "-I", "-u", "-X", "utf8", "-c", program, str(there.fileno())]
        more = self._name_files(folder) if self._wrapped else []
        command = [*self._bubblewrap(places, uid, "CAP_NET_BIND_SERVICE", more=more), *python]
        with there:
            self._process = await start_process(
                *command,
                env=self._environment("agent"),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                pass_fds=(there.fileno(),),
            )
        self._printing = asyncio.create_task(self._log_output(self._process))
        listen = self._inner_addresses() if self._wrapped else []
        here.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(here, framed(self._setup(places, uid, listen)))
        await self._open_relays(await _passed_out(here) if listen else [socket.create_server((_LOOPBACK, 0))])
        self._streams = await asyncio.open_connection(sock=here)

    def _setup(self, places: list[Path], uid: int, listen: list[tuple[str, int]]) -> dict[str, Any]:
        config = self._config
        path = str(config.path.resolve()) if config.path else ""
        profile = self._profile(uid, places, config.command, config.reads)
        return {**profile, "listen": listen, "path": path, "entry": config.entry}

    def _visible(self) -> list[Path]:
        path = [self._config.path] if self._config.path else []
        return [place.resolve() for place in (*path, *self._config.reads)]

    def _name_files(self, folder: Path) -> list[str]:
        """The words for files in which the names of hosts are addresses of relays."""
        names = "".join(f"{address} {name}\n" for name, address in self._addresses().items())
        files = {"hosts": f"{_LOOPBACK} localhost\n{names}", "nsswitch.conf": "hosts: files\n"}
        words: list[str] = []
        for name, text in files.items():
            (folder / name).write_text(text)
            (folder / name).chmod(0o644)
            words += ["--ro-bind", str(folder / name), f"/etc/{name}"]
        return words

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
        async for line in self._lines(process.stdout):
            was_all = self._num_printed <= _MAX_OUTPUT_BYTES
            self._num_printed += len(line) + 1
            if self._num_printed <= _MAX_OUTPUT_BYTES:
                log.info("agent_output", rollout=self._rollout, line=line)
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
