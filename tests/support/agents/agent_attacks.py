"""Attacks of a hostile rollout of an agent, and their outcomes, at every level of an agent's sandbox.

`python -m tests.support.agents.agent_attacks LEVEL USER [heavy]` plays them all, one after the other, while another
rollout plays each second, and prints the outcomes as JSON. After each attack a rollout lists every path that it
can write, and what else another could have left to it. USER is `root`, or `plain`: then the process first becomes a
user without any privilege. What it is not: a test; tests/integration/agents/test_agent_attacks.py runs it and judges.
"""

from __future__ import annotations

import asyncio
import json
import resource
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import psutil
import structlog

from gspo.agents.agent_pool import AgentPool
from gspo.agents.player.task import Task
from gspo.agents.worker import AgentFailedError, RolloutLostError
from gspo.common.config.gateway import AgentConfig
from gspo.reward.sandbox.launch import ConfinementLevel
from gspo.reward.sandbox.levels import find_agent_level
from tests.support.sandbox_attacks import become_plain

# The usual soft limit of a service; and the time after which a rollout is ended.
DESCRIPTORS, TIMEOUT_S, HEAVY_TIMEOUT_S = 1024, 3.0, 60.0
BENIGN_EVERY_S, BENIGN_REWARD = 1.0, 0.25
MEMORY_MB = 512
_MIB = 2**20

AGENT = r'''
import asyncio, ctypes, errno, fcntl, hashlib, json, mmap, os, pathlib, signal, socket, stat, struct, subprocess, sys
import threading, time

WRAPPED = os.path.exists("/etc/nsswitch.conf") and os.getppid() < 10
libc = ctypes.CDLL(None, use_errno=True)

def forge(data):
    """Write to the pipe of results, which the host reads, and end."""
    for fd in range(3, 30):
        try:
            if stat.S_ISFIFO(os.fstat(fd).st_mode) and fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_WRONLY:
                os.write(fd, data)
        except OSError:
            pass
    os._exit(0)

def writable_tops():
    """Where something can be written: mounts that are not read-only; without namespaces the own folder alone."""
    if not WRAPPED:
        return [os.environ["HOME"]]
    mounts = [line.split() for line in open("/proc/self/mountinfo")]
    tops = [fields[4] for fields in mounts if "rw" in fields[5].split(",")]
    return [top for top in tops if top != "/proc" and not stat.S_ISCHR(os.stat(top).st_mode)]

def content(path):
    status = os.lstat(path)
    if stat.S_ISREG(status.st_mode):
        return hashlib.sha256(open(path, "rb").read()).hexdigest()
    return os.readlink(path) if stat.S_ISLNK(status.st_mode) else stat.filemode(status.st_mode)

def traces():
    """All that another rollout could have left to this one."""
    seen = {"environment": dict(os.environ), "path": sys.path, "working folder": os.getcwd()}
    for top in writable_tops():
        seen[top] = {os.path.join(folder, name): content(os.path.join(folder, name))
                      for folder, folders, files in os.walk(top) for name in folders + files}
    if WRAPPED:
        seen["processes"] = sorted(name for name in os.listdir("/proc") if name.isdigit())
        seen["listening"] = sum(" 0A " in line for line in open("/proc/net/tcp"))
        for name in ("sysvipc/shm", "sysvipc/sem", "sysvipc/msg"):
            seen[name] = open("/proc/" + name).read()
        # Without their numbers, which count locks of the whole machine, and without those of open file descriptions,
        # which belong to no process: every namespace lists those of the whole machine.
        seen["locks"] = [line.partition(":")[2] for line in open("/proc/locks") if "OFDLCK" not in line]
        seen["unix"] = sorted(" ".join(line.split()[7:]) for line in list(open("/proc/net/unix"))[1:])
        import colorsys, tempfile
        seen["imports"] = [colorsys.__file__, tempfile.gettempdir()]
    return json.dumps(seen, sort_keys=True).replace(os.environ["HOME"], "HOME")

async def play(task):
    if task.columns["attack"] is None:
        return 0.25
    space = dict(globals(), task=task)
    exec("async def attack():\n" + "".join("    " + line + "\n" for line in task.columns["attack"].splitlines()), space)
    return await space["attack"]()
'''
LOOK = """
text = traces()
print("traces", text)
return float(int(hashlib.sha256(text.encode()).hexdigest()[:12], 16))
"""


@dataclass(frozen=True)
class RolloutAttack:
    """One way to misbehave: the body of a function, and the outcomes that the rollout may have.

    Attributes:
        outcome: A reward, a kind of failure, or lost; several with ` or ` between them.
        levels: Those at which it is tried: without namespaces an agent is trusted with all that its user reaches.
    """

    name: str
    body: str
    outcome: str
    levels: tuple[str, ...] = ("bubblewrap", "rlimits")


WRAPPED = ("bubblewrap",)
TAKEOVER = [
    RolloutAttack(
        "the memory of its host written",
        """
        finds = 0
        pids = [pid for pid in os.listdir("/proc") if pid.isdigit()] if WRAPPED else [os.getppid()]
        for pid in {int(pid) for pid in pids} - {os.getpid()}:
            for name, mode in (("mem", os.O_RDWR), ("environ", 0), ("maps", 0), ("fd/3", 0), ("cwd/x", os.O_CREAT)):
                try:
                    os.close(os.open(f"/proc/{pid}/{name}", mode))
                except OSError:
                    continue
                print("finds", pid, name)
                finds += 1
        return float(finds)
        """,
        "0.0",
    ),
    RolloutAttack(
        "its host traced",
        """
        refused = libc.ptrace(16, os.getppid(), 0, 0) < 0
        block = ctypes.create_string_buffer(8)
        part = (ctypes.c_size_t * 2)(ctypes.addressof(block), 8)
        read = libc.process_vm_readv(os.getppid(), part, 1, part, 1, 0)
        return 0.0 if refused and read < 0 else 1.0
        """,
        "0.0",
    ),
    RolloutAttack("its host killed", "os.kill(os.getppid(), signal.SIGKILL)\ntime.sleep(1)\nreturn 1.0", "lost"),
    RolloutAttack("its host stopped", "os.kill(os.getppid(), signal.SIGSTOP)\nreturn 1.0", "timeout", WRAPPED),
    RolloutAttack("everybody killed", "os.kill(-1, signal.SIGKILL)\ntime.sleep(1)\nreturn 1.0", "lost", WRAPPED),
    RolloutAttack(
        "settings of the kernel written",
        """
        finds = 0
        for folder, _, files in os.walk("/proc/sys"):
            for name in files:
                path = os.path.join(folder, name)
                try:
                    os.close(os.open(path, os.O_WRONLY))
                except OSError:
                    continue
                print("finds", path)
                finds += 1
        return float(finds)
        """,
        "0.0",
        WRAPPED,
    ),
    RolloutAttack(
        "others held up at a file that all read",
        """
        finds = 0
        for path in pathlib.Path(os.__file__).parent.glob("*.py"):
            with path.open() as file:
                finds += libc.fcntl(file.fileno(), 1024, fcntl.F_WRLCK) == 0
        return float(finds)
        """,
        "0.0",
        WRAPPED,
    ),
    RolloutAttack(
        "limits of its host",
        """
        import resource
        for what in (resource.RLIMIT_NOFILE, resource.RLIMIT_CPU, resource.RLIMIT_FSIZE):
            resource.prlimit(os.getppid(), what, (0, 0))
        return 1.0
        """,
        "lost or crash",
    ),
    RolloutAttack("all descriptors closed", "os.closerange(0, 1024)\nreturn 1.0", "crash or exception"),
]
LEAVINGS = [
    RolloutAttack(
        "something left wherever it can write",
        """
        for top in writable_tops():
            for folder, folders, files in os.walk(top):
                for name in ("colorsys.py", ".note", "left.so"):
                    try:
                        pathlib.Path(folder, name).write_text("PWNED = 1")
                    except OSError:
                        pass
                for name in files:
                    try:
                        open(os.path.join(folder, name), "a").write("x")
                    except OSError:
                        pass
                try:
                    os.mkdir(os.path.join(folder, "closed"), 0)
                except OSError:
                    pass
        return 1.0
        """,
        "1.0",
    ),
    RolloutAttack(
        "sockets, locks and shared memory left",
        """
        held = [socket.socket(socket.AF_UNIX) for _ in range(2)]
        held[0].bind("\\0left")
        held[1].bind(os.environ["TMPDIR"] + "/left")
        for one in held:
            one.listen()
        held.append(socket.create_server(("127.0.0.1", 4444)))
        locked = open(os.__file__)
        fcntl.flock(locked, fcntl.LOCK_EX)
        fcntl.lockf(open("lock", "w"), fcntl.LOCK_EX)
        libc.shmget(77, 4096, 0o1666)
        libc.semget(77, 1, 0o1666)
        libc.msgget(77, 0o1666)
        libc.mq_open(b"/left", 66, 438, 0)
        if os.fork() == 0:
            os.setsid()
            os.fork()
            time.sleep(1000)
        return 1.0
        """,
        "1.0",
        WRAPPED,
    ),
    RolloutAttack("its folders filled", "open('big', 'wb').write(bytes(250 * 2**20))\nreturn 1.0", "1.0", WRAPPED),
    RolloutAttack(
        "its folder removed", "import shutil\nshutil.rmtree(os.getcwd(), ignore_errors=True)\nreturn 1.0", "1.0"
    ),
]
WORDS = [
    RolloutAttack("an exception of half a character", "raise ValueError('\\ud83d')", "exception"),
    RolloutAttack("a failure of half a character", r"""forge(b'{"failure": "\\ud83d", "kind": "\\ud83d"}')""", "?"),
    RolloutAttack("a reward that is NaN", "forge(b'{\"reward\": NaN}')", "invalid_return"),
    RolloutAttack("a reward beyond numbers", "forge(b'{\"reward\": 1e400}')", "invalid_return"),
    RolloutAttack("a reward of 4,000 digits", "forge(b'{\"reward\": 1' + b'0' * 4000 + b'}')", "invalid_return"),
    RolloutAttack("a reward of too many digits", "forge(b'{\"reward\": 1' + b'0' * 5000 + b'}')", "crash"),
    RolloutAttack("a reward that is a list", "forge(b'{\"reward\": [1]}')", "invalid_return"),
    RolloutAttack("an unknown kind", 'forge(b\'{"failure": "x", "kind": "nosuch"}\')', "nosuch"),
    RolloutAttack("a kind that is a list", 'forge(b\'{"failure": {}, "kind": []}\')', "[]"),
    RolloutAttack("no kind", 'forge(b\'{"failure": "x"}\')', "None"),
    RolloutAttack("a death that is none", "forge(b'{\"died\": {}}')", "lost"),
    RolloutAttack("an empty answer", "forge(b'{}')", "invalid_return"),
    RolloutAttack("a deep answer", "forge(b'[' * 60000)", "crash or lost"),
    RolloutAttack(
        "a deep answer that is whole", "forge(b'{\"reward\":' + b'[' * 900 + b']' * 900 + b'}')", "invalid_return"
    ),
    RolloutAttack("no JSON", "forge(bytes(range(256)))", "crash"),
    RolloutAttack("output of no characters", "os.write(1, bytes(range(256)) * 1000)\nreturn 1.0", "1.0"),
    RolloutAttack("a line without an end", "os.write(1, b'x' * 10**6)\nreturn 1.0", "1.0"),
]
USES = [
    RolloutAttack(
        "descriptors",
        """
        held = []
        try:
            while True:
                held.append(os.dup(0))
        except OSError:
            return 1.0
        """,
        "1.0 or crash",
    ),
    RolloutAttack(
        "memory of the kernel that nobody measures",
        """
        finds, pages = 0, mmap.mmap(-1, 4096, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        part = (ctypes.c_size_t * 2)(ctypes.addressof(ctypes.c_char.from_buffer(pages)), 4096)
        finds += libc.vmsplice(os.pipe()[1], part, 1, 0) >= 0
        finds += libc.syscall(444, struct.pack("QQ", 0, 3), ctypes.c_size_t(16), 0) >= 0  # rules of Landlock
        finds += libc.syscall(436, 100, 200, 2) >= 0  # descriptors of its own for one thread, and at its start
        finds += libc.syscall(56, 0x10900, 0, 0, 0, 0) >= 0
        return float(finds)
        """,
        "0.0",
        WRAPPED,
    ),
    RolloutAttack(
        "larger buffers of sockets",
        """
        finds = 0
        for kind in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            with socket.socket(socket.AF_UNIX) as one, socket.socket() as other:
                for each in (one, other):
                    before = each.getsockopt(socket.SOL_SOCKET, kind)
                    each.setsockopt(socket.SOL_SOCKET, kind, 4 * before)
                    finds += each.getsockopt(socket.SOL_SOCKET, kind) != before
                    libc.setsockopt(each.fileno(), ctypes.c_long(2**32 + 1), kind, struct.pack("i", 4 * before), 4)
                    finds += each.getsockopt(socket.SOL_SOCKET, kind) != before
                    each.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                    finds += each.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) != 1
                other.setsockopt(socket.IPPROTO_TCP, socket.TCP_SYNCNT, 3)
                finds += other.getsockopt(socket.IPPROTO_TCP, socket.TCP_SYNCNT) != 3
        for protocol in (132, 262, 33):
            try:
                socket.socket(socket.AF_INET, socket.SOCK_STREAM, protocol)
                finds += 1
            except OSError:
                pass
        return float(finds)
        """,
        "0.0",
        WRAPPED,
    ),
    RolloutAttack(
        "connections to the gateway",
        """
        address = task.base_url.split("/")[2].split(":")
        held = []
        for _ in range(950):
            one = socket.socket()
            one.setblocking(False)
            one.connect_ex((address[0], int(address[1])))
            held.append(one)
        await asyncio.sleep(1)
        return 1.0
        """,
        "1.0 or memory",
    ),
]
# Ten processes, each with filled pairs of sockets until it has no descriptor. Its preparation, and the next pair.
_FILL = """
def fill():
    {}held = []
    try:
        while True:
            {}
            for one in held[-2:]:
                one.setblocking(False)
                try:
                    while True:
                        one.send(bytes(2**16))
                except BlockingIOError:
                    pass
    except OSError:
        time.sleep(1000)
for _ in range(10):
    if os.fork() == 0:
        fill()
await asyncio.sleep(30)
return 1.0
"""
_EMPTY_FILES = """
for number in range(433_000):
    os.close(os.open(f"{}/{{number}}", os.O_CREAT | os.O_WRONLY))
return 1.0
"""
_CONNECT = "held += [socket.create_connection(server.getsockname()), server.accept()[0]]"
HEAVY = [
    RolloutAttack(
        "socket buffers of ten processes",
        _FILL.format("", "held += socket.socketpair()"),
        "memory",
        WRAPPED,
    ),
    RolloutAttack(
        "buffers of TCP in ten processes",
        _FILL.format('server = socket.create_server(("127.0.0.1", 0)); ', _CONNECT),
        "memory",
        WRAPPED,
    ),
    RolloutAttack("433,000 empty files", _EMPTY_FILES.format("/tmp"), "exception", WRAPPED),
    RolloutAttack("433,000 empty files of shared memory", _EMPTY_FILES.format("/dev/shm"), "exception", WRAPPED),
    RolloutAttack(
        "pipes of forty processes",
        """
        def fill():
            try:
                while True:
                    os.write(os.pipe2(os.O_NONBLOCK)[1], bytes(2**16))
            except OSError:
                time.sleep(1000)
        for _ in range(40):
            if os.fork() == 0:
                fill()
        await asyncio.sleep(30)
        return 1.0
        """,
        "memory or 1.0",
        WRAPPED,
    ),
    RolloutAttack(
        "shared memory without pages",
        """
        memory = mmap.mmap(-1, 2**31)
        for start in range(0, 2**31, 2**26):
            memory[start:start + 2**26] = bytes(2**26)
            memory.madvise(mmap.MADV_DONTNEED, start, 2**26)
        return 1.0
        """,
        "memory",
        WRAPPED,
    ),
    RolloutAttack(
        "locks on parts of files",
        """
        for name in range(1000):
            file = os.open(str(name), os.O_CREAT | os.O_RDWR)
            for place in range(0, 3000, 2):
                fcntl.lockf(file, fcntl.LOCK_EX, 1, place)
        return 1.0
        """,
        "memory",
        WRAPPED,
    ),
    RolloutAttack(
        "watches of ten processes",
        """
        import select
        def fill():
            events = [os.eventfd(0) for _ in range(500)]
            watching = []
            try:
                while True:
                    watching.append(select.epoll())
                    for event in events:
                        watching[-1].register(event)
            except OSError:
                time.sleep(1000)
        for _ in range(10):
            if os.fork() == 0:
                fill()
        await asyncio.sleep(30)
        return 1.0
        """,
        "memory",
        WRAPPED,
    ),
    RolloutAttack(
        "a bomb of processes",
        "while True:\n    try: os.fork()\n    except OSError: time.sleep(0.1)",
        "memory or timeout or lost",
        WRAPPED,
    ),
]
QUICK = [*TAKEOVER, *LEAVINGS, *WORDS, *USES]


def attacks(level: str, *, heavy: bool) -> list[RolloutAttack]:
    """Those of a level."""
    return [attack for attack in (HEAVY if heavy else QUICK) if level in attack.levels]


async def run(level_name: Literal["bubblewrap", "rlimits"], *, heavy: bool) -> dict[str, Any]:
    """The outcome of every attack by its name, with the traces that a rollout finds after it, and the MiB it cost."""
    level = await find_agent_level("rlimits") if level_name == "bubblewrap" else ConfinementLevel("rlimits")
    assert level.name == level_name, level
    outcomes: dict[str, Any] = {"benign": [], "attacks": {}}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        path = Path(folder) / "agent.py"
        path.write_text(AGENT)
        config = AgentConfig(path=path, workers=2, memory_mb=MEMORY_MB)
        async with await asyncio.start_server(_answer, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            async with AgentPool(config, level, partial(asyncio.open_connection, "127.0.0.1", port)) as pool:
                calling = asyncio.create_task(_play_on(pool, outcomes["benign"]))
                outcomes["before"] = await _played(pool, LOOK)
                for attack in attacks(level_name, heavy=heavy):
                    lost = asyncio.create_task(_lost_mib())
                    # One that ends of itself may be slow on a machine with other work.
                    is_cut_off = "timeout" in attack.outcome and not heavy
                    outcome = await _played(pool, attack.body, TIMEOUT_S if is_cut_off else HEAVY_TIMEOUT_S)
                    lost.cancel()
                    after = outcomes["before"] if attack in WORDS else await _played(pool, LOOK)
                    outcomes["attacks"][attack.name] = {"outcome": outcome, "after": after, "lost_mib": await lost}
                outcomes["descriptors"] = len(list(Path("/proc/self/fd").iterdir()))
                calling.cancel()
                await asyncio.gather(calling, return_exceptions=True)
    return outcomes


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        await reader.read()
    writer.close()


async def _played(pool: AgentPool, body: str | None, timeout_s: float = HEAVY_TIMEOUT_S) -> str:
    """The outcome of a rollout: its reward, its kind of failure, or lost."""
    lines = (body or "").strip().splitlines()
    if all(line.startswith("        ") for line in lines[1:]):  # indented as in the list of attacks
        lines = [line.removeprefix("        ") for line in lines]
    columns = {"attack": "\n".join(lines) if body else None}
    task = Task("1-0", "2+2=", [], columns, "unused", "a-key", "policy", 1, "", timeout_s)
    try:
        async with asyncio.timeout(timeout_s):
            return str(await pool.play(task))
    except AgentFailedError as error:
        return error.kind
    except RolloutLostError:
        return "lost"
    except TimeoutError:
        return "timeout"


async def _play_on(pool: AgentPool, outcomes: list[str]) -> None:
    """Play a benign rollout each second."""
    while True:
        outcomes.append(await _played(pool, None))
        await asyncio.sleep(BENIGN_EVERY_S)


async def _lost_mib() -> float:
    """MiB of the machine's memory that were gone at most, until cancelled."""
    most, before = 0.0, psutil.virtual_memory().available
    with suppress(asyncio.CancelledError):
        while True:
            most = max(most, (before - psutil.virtual_memory().available) / _MIB)
            await asyncio.sleep(0.05)
    return most


if __name__ == "__main__":
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, hard))
    if sys.argv[2] == "plain":
        become_plain()
    began = time.monotonic()
    seen = asyncio.run(run(sys.argv[1], heavy="heavy" in sys.argv))  # type: ignore[arg-type]
    print(json.dumps(seen | {"seconds": time.monotonic() - began}))  # noqa: T201
