"""The sandbox of agents: what a hostile agent reaches, what ends it, and what it leaves behind.

Real bubblewrap, Redis and HTTP servers. Not here: an engine (tests/integration/generation/test_run_agents.py).
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import textwrap
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest

from gspo.agents.agent_pool import AgentPool
from gspo.agents.player.task import Task
from gspo.agents.worker import AgentFailedError, RolloutLostError
from gspo.common.config.gateway import AgentConfig
from gspo.reward.sandbox.launch import ConfinementLevel
from gspo.reward.sandbox.levels import find_agent_level
from gspo.reward.sandbox.memory_watch import memory_of, processes_below

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(120)]
# Each finds what it may not: an agent returns the number of its finds, and prints them.
HOSTILE = """
import ctypes, os, pathlib, signal, socket, subprocess, urllib.request

def connected(address):
    socket.create_connection(address, timeout=1).close()

def read(path):
    pathlib.Path(path).read_bytes()

def written(path):
    pathlib.Path(path).write_text("x")

def ran(*words):
    subprocess.run(words, check=True, capture_output=True)

def namespace():
    if ctypes.CDLL(None, use_errno=True).unshare(0x10000000):
        raise OSError("refused")

def attempts(task):
    for host, port in task.columns["closed"]:
        yield f"connect to {host}:{port}", lambda: connected((host, port))
    for name in ("example.org", "pypi.org"):
        yield f"resolve {name}", lambda: socket.gethostbyname(name)
    yield "send a datagram", lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("8.8.8.8", 53))
    yield "open a netlink socket", lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)
    for path in task.columns["hidden"]:
        yield f"read {path}", lambda: read(path)
        yield f"write {path}", lambda: written(path)
        yield f"run cat on {path}", lambda: ran("cat", path)
    for path in (__file__, "/etc/hosts", "/usr/x", "/x", "/dev/x", "/proc/sys/kernel/core_pattern"):
        yield f"write {path}", lambda: written(path)
    yield "signal a process outside", lambda: os.kill(task.columns["pid"], 0)
    yield "read the memory of another", lambda: read("/proc/1/mem")
    yield "make a namespace", namespace
    yield "make a namespace by a program", lambda: ran("unshare", "-U", "true")
    yield "mount", lambda: ran("mount", "-t", "tmpfs", "none", "/tmp")
    yield "become root", lambda: os.setuid(0)
    yield "write 300 MiB", lambda: pathlib.Path("big").write_bytes(bytes(300 * 2**20))

async def play(task):
    finds = []
    for name, attempt in attempts(task):
        try:
            attempt()
            finds.append(name)
        except (OSError, subprocess.SubprocessError):
            pass
    finds += [f"see process {pid}" for pid in os.listdir("/proc") if pid.isdigit() and int(pid) > 50]
    finds += [f"see variable {name}" for name in os.environ if "SECRET" in name]
    print("finds:", finds)
    return float(len(finds))
"""


def agent_file(folder: Path, source: str) -> Path:
    path = folder / "agent.py"
    path.write_text(textwrap.dedent(source))
    return path


def task(name: str = "1-0", **columns: Any) -> Task:
    return Task(name, "2+2=", [{"role": "user", "content": "2+2="}], columns, "unused", "a-key", "policy", 1, "", 30.0)


@asynccontextmanager
async def server(text: str) -> AsyncIterator[int]:
    """An HTTP server that answers each request with its own text and the request's path; its port."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        path = (await reader.readline()).split()[1].decode()
        writer.write(f"HTTP/1.0 200 OK\r\n\r\n{text} {path}".encode())
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as started:
        yield started.sockets[0].getsockname()[1]


@asynccontextmanager
async def pool(level: ConfinementLevel | None = None, **keys: Any) -> AsyncIterator[tuple[AgentPool, int]]:
    """The sandboxes of an agent, with a gateway of which there is the address alone; and its port."""
    config = AgentConfig(**{"workers": 1, **keys})
    level = level or await find_agent_level("bubblewrap")
    async with (
        server("gateway") as port,
        AgentPool(config, level, partial(asyncio.open_connection, "127.0.0.1", port)) as sandboxes,
    ):
        yield sandboxes, port


def processes_named(argument: str) -> list[int]:
    return [process.pid for process in psutil.process_iter(["cmdline"]) if argument in (process.info["cmdline"] or ())]


async def wait_until_none(argument: str) -> None:
    async with asyncio.timeout(10):
        while processes_named(argument):
            await asyncio.sleep(0.05)


async def test_a_hostile_agent_finds_nothing_outside(
    tmp_path: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("A_SECRET", "x")
    run_dir = tmp_path / "runs" / "run"
    run_dir.mkdir(parents=True)
    (run_dir / "config.yaml").write_text("secret")
    path = agent_file(tmp_path, HOSTILE)
    own = socket.gethostbyname(socket.gethostname())
    redis = urlsplit(redis_url)
    async with server("coordinator") as coordinator, pool(path=path) as (sandboxes, gateway):
        # The gateway's own port too: the agent reaches it by the relay alone.
        ports = (coordinator, redis.port, gateway, 22, 80)
        closed = [(host, port) for host in ("127.0.0.1", own) for port in ports] + [("1.1.1.1", 53), ("8.8.8.8", 443)]
        hidden = [str(run_dir / "config.yaml"), str(tmp_path / "other"), "/etc/passwd", "/etc/shadow", "/root/.ssh/x"]
        columns: dict[str, Any] = {"closed": closed, "hidden": hidden, "pid": os.getpid()}
        assert await sandboxes.play(task(**columns)) == 0.0, capsys.readouterr().out
    assert "finds: []" in capsys.readouterr().out


async def test_it_reaches_the_gateway_and_named_hosts(tmp_path: Path) -> None:
    source = """
    import urllib.request

    def read(url):
        return urllib.request.urlopen(url, timeout=10).read().decode()

    async def play(task):
        assert read(task.base_url + "/models") == "gateway /v1/models"
        by_address, by_name = task.columns["hosts"]
        assert read(f"http://{by_address}/a") == "first /a"
        assert read(f"http://{by_name}/b") == "second /b"
        return 1.0
    """
    async with server("first") as first, server("second") as second:
        hosts = (f"127.0.0.1:{first}", f"localhost:{second}")
        async with pool(path=agent_file(tmp_path, source), hosts=hosts) as (sandboxes, _):
            assert await sandboxes.play(task(hosts=hosts)) == 1.0


async def test_a_name_leads_to_the_host_of_that_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = """
    import urllib.request

    async def play(task):
        text = urllib.request.urlopen("http://search.example.org:80/q", timeout=10).read().decode()
        return float(text == "search /q")
    """
    asked, connect = [], asyncio.open_connection
    async with server("search") as port:

        async def resolved(*address: Any, **keys: Any) -> Any:
            if address:  # not the relay's own end
                asked.append(address)
                address = ("127.0.0.1", port)
            return await connect(*address, **keys)

        async with pool(path=agent_file(tmp_path, source), hosts=("search.example.org:80",)) as (sandboxes, _):
            await sandboxes.start_all()
            monkeypatch.setattr("gspo.agents.relay.asyncio.open_connection", resolved)
            assert await sandboxes.play(task()) == 1.0
    assert asked == [("search.example.org", 80)]


async def test_what_a_rollout_leaves_behind_is_gone_in_the_next(tmp_path: Path) -> None:
    source = """
    import os, subprocess, time, pathlib

    async def play(task):
        folders = [path for top in ("/tmp", "/dev/shm") for path in os.listdir(top) if path.startswith("left")]
        processes = [pid for pid in os.listdir("/proc") if pid.isdigit()]
        assert os.listdir(".") == [".tmp"] and folders == [] and len(processes) == 3, (folders, processes)
        for folder in (".", "/tmp", "/dev/shm"):
            os.makedirs(f"{folder}/left/{'deep/' * 50}")
            pathlib.Path(folder, "left.txt").write_text("x")
            os.chmod(f"{folder}/left", 0)
        subprocess.Popen(["setsid", "sleep", task.columns["seconds"]])
        if os.fork() == 0:
            os.setsid()
            os.fork()
            time.sleep(1000)
        return 1.0
    """
    seconds = f"{os.getpid()}.25"
    async with pool(path=agent_file(tmp_path, source)) as (sandboxes, _):
        await sandboxes.start_all()
        for _ in range(3):
            assert await sandboxes.play(task(seconds=seconds)) == 1.0
            assert processes_named(seconds) == []


async def test_a_rollout_ends_at_its_time_with_all_its_processes(tmp_path: Path) -> None:
    source = """
    import subprocess

    async def play(task):
        subprocess.run(["setsid", "--wait", "sleep", task.columns["seconds"]])
    """
    seconds = f"{os.getpid()}.5"
    async with pool(path=agent_file(tmp_path, source)) as (sandboxes, _):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(2):
                await sandboxes.play(task(seconds=seconds))
        await wait_until_none(seconds)


async def test_memory_is_of_all_processes_together(tmp_path: Path) -> None:
    source = """
    import os, time

    async def play(task):
        for _ in range(task.columns["processes"]):
            if os.fork() == 0:
                block = bytearray(60 * 2**20)
                block[::4096] = b"x" * (len(block) // 4096)  # every page is in memory then
                time.sleep(60)
        if not task.columns["processes"]:
            block = bytearray(10**9)
        time.sleep(task.columns["seconds"])
        return 1.0
    """
    async with pool(path=agent_file(tmp_path, source), memory_mb=256) as (sandboxes, _):
        assert await sandboxes.play(task(processes=2, seconds=1)) == 1.0
        with pytest.raises(AgentFailedError, match=r"had more memory than its 256 MiB") as together:
            await sandboxes.play(task(processes=6, seconds=30))
        with pytest.raises(AgentFailedError, match="asked for more memory") as alone:
            await sandboxes.play(task(processes=0, seconds=0))
        assert (together.value.kind, alone.value.kind) == ("memory", "memory")
        assert await sandboxes.play(task(processes=1, seconds=1)) == 1.0


async def test_a_killed_process_loses_its_rollout_and_no_other(tmp_path: Path) -> None:
    source = """
    import asyncio, os, signal

    async def play(task):
        if task.columns.get("kills"):
            os.kill(os.getpid(), signal.SIGKILL)
        await asyncio.sleep(task.columns["sleep_s"])
        return 1.0
    """
    async with pool(path=agent_file(tmp_path, source), workers=2) as (sandboxes, _):
        with pytest.raises(RolloutLostError, match="SIGKILL"):
            await sandboxes.play(task(kills=True))
        playing = [asyncio.create_task(sandboxes.play(task(sleep_s=seconds))) for seconds in (30, 1.5)]
        await asyncio.sleep(0.5)
        victim = sandboxes.sandboxes[1].pid
        assert victim is not None
        os.kill(victim, signal.SIGKILL)
        results = await asyncio.gather(*playing, return_exceptions=True)
        assert sorted(type(result).__name__ for result in results) == ["RolloutLostError", "float"]
        assert await asyncio.gather(*(sandboxes.play(task(sleep_s=0)) for _ in range(4))) == [1.0] * 4


@pytest.mark.parametrize(
    ("returns", "kind", "text"),
    [
        ("1 / 0", "exception", "ZeroDivisionError"),
        ("float('nan')", "invalid_return", "nan"),
        ("1e308", "invalid_return", "a reward is a number from -1e\\+30 to 1e\\+30"),
        ("'good'", "invalid_return", "'good'"),
        ("None", "invalid_return", "agent.weight"),
        ("os._exit(3)", "crash", "exit code 3"),
        ("sys.exit(4)", "crash", "exit code 1"),
    ],
)
async def test_how_an_agent_fails(tmp_path: Path, returns: str, kind: str, text: str) -> None:
    source = f"import os, sys\nasync def play(task):\n    return {returns}\n"
    async with pool(path=agent_file(tmp_path, source)) as (sandboxes, _):
        with pytest.raises(AgentFailedError, match=text) as caught:
            await sandboxes.play(task())
        assert caught.value.kind == kind


SHELL = """
test "$OPENAI_API_KEY" = a-key && test "$ANTHROPIC_API_KEY" = a-key && test "$GSPO_MODEL" = policy || exit 9
python3 -c '
import json, os, sys, urllib.request
task = json.load(sys.stdin)
assert task == json.load(open(os.environ["GSPO_TASK_FILE"]))
assert urllib.request.urlopen(os.environ["OPENAI_BASE_URL"] + "/x").read() == b"gateway /v1/x"
assert urllib.request.urlopen(os.environ["ANTHROPIC_BASE_URL"] + "/y").read() == b"gateway /y"
os.mkdir(os.environ["TMPDIR"] + "/corpus")  # of the name that a link has
print("plays", task["id"], open("corpus/a.txt").read())
columns = task["columns"]
if "reward" in columns:
    open(os.environ["GSPO_REWARD_FILE"], "w").write(columns["reward"])
sys.exit(columns.get("exit", 0))
' || exit 7
"""


async def test_a_program_of_any_language_plays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "a.txt").write_text("a text")
    (tmp_path / "play.sh").write_text(SHELL)
    reads = (tmp_path / "play.sh", tmp_path / "corpus")
    async with pool(command=("sh", "play.sh"), reads=reads, weight=None) as (sandboxes, _):
        assert await sandboxes.play(task(reward=" 0.5\n")) == 0.5
        assert await sandboxes.play(task()) is None
        for columns, kind, text in (
            ({"reward": "good"}, "invalid_return", "'good'"),
            ({"reward": "inf"}, "invalid_return", "inf"),
            ({"reward": "1", "exit": 5}, "agent_failed", "sh ended with exit code 7"),
        ):
            with pytest.raises(AgentFailedError, match=text) as caught:
                await sandboxes.play(task(**columns))
            assert caught.value.kind == kind
    assert "plays 1-0 a text" in capsys.readouterr().out


async def test_without_namespaces_processes_and_folders_end_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = """
    import pathlib, subprocess

    async def play(task):
        subprocess.Popen(["setsid", "sleep", task.columns["seconds"]])
        pathlib.Path("left.txt").write_text("x")
        return 1.0
    """
    seconds = f"{os.getpid()}.75"
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    (tmp_path / "temporary").chmod(0o755)
    tmp_path.chmod(0o755)
    async with pool(ConfinementLevel("rlimits"), path=agent_file(tmp_path, source)) as (sandboxes, _):
        assert await sandboxes.play(task(seconds=seconds)) == 1.0
        assert processes_named(seconds) == []
    assert list((tmp_path / "temporary").iterdir()) == []


async def test_memory_counts_below_a_process_alone() -> None:
    process = await asyncio.create_subprocess_exec("sh", "-c", "sleep 20 & sleep 20")
    try:
        while len(psutil.Process(process.pid).children()) < 2:
            await asyncio.sleep(0.01)
        below = processes_below([process.pid, os.getpid()])
        assert below[process.pid] == [child.pid for child in psutil.Process(process.pid).children()]
        assert not {process.pid, *below[process.pid]} & set(below[os.getpid()])
        assert 0 < memory_of(below[process.pid]) < memory_of([os.getpid()])
    finally:
        os.kill(process.pid, signal.SIGKILL)
        await process.wait()
    assert processes_below([]) == {}


async def test_a_start_that_is_cancelled_leaves_no_process(tmp_path: Path) -> None:
    path = agent_file(tmp_path, "async def play(task):\n    return 1.0\n")
    async with pool(path=path) as (sandboxes, _):
        for milliseconds in range(30):
            starting = asyncio.create_task(sandboxes.sandboxes[0].start())
            await asyncio.sleep(milliseconds / 2000)
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
    await wait_until_none(str(path))
