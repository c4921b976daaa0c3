"""What hostile or careless user code does, and which kind of failure that has to be, at every level of the sandbox.

`python -m tests.support.sandbox_attacks LEVEL USER [without_landlock]` runs them all in one sandbox, each beside a
bystander, and prints the outcome of each as JSON. USER is `root`, or `plain`: then the process first becomes a user
without any privilege.
What it is not: a test; tests/integration/reward/sandbox/test_attacks.py runs it and judges.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import json
import os
import socket
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyseccomp
import structlog

from gspo.reward.sandbox.calls import CallError, CallLimits, Code
from gspo.reward.sandbox.execution import Sandbox
from gspo.reward.sandbox.inside import confine
from gspo.reward.sandbox.launch import ConfinementLevel
from gspo.reward.sandbox.levels import try_level

LIMITS = CallLimits(timeout_s=20.0, memory_mb=256)
SHORT = CallLimits(timeout_s=0.5, memory_mb=256)
# So many attacks side by side, each with its bystander.
AT_ONCE = 4
BENIGN_EVERY_S = 0.25
NO_NAMESPACE = 77  # exit code: root cannot become a plain user
SECRET = "the service's secret"
# Runs what it is given, so that one warm sandbox serves all attacks.
RUNNER = """
def reward(completions, attack):
    space = {"__name__": "attack"}
    exec(compile(attack, "attack.py", "exec"), space)
    return space["values"]()
"""
GOOD = "def values(): return [1.0, 2.0]"


@dataclass(frozen=True)
class Attack:
    """One way to misbehave: the body of a function, and the kind of failure it must be; None: it may return.

    Attributes:
        kind: One or more, with ` or ` between them.
    """

    name: str
    body: str
    kind: str | None

    @property
    def source(self) -> str:
        """The text that RUNNER runs."""
        lines = "".join(f"    {line}\n" for line in self.body.strip().splitlines())
        return f"{HEAD}\ndef values():\n{lines}    return [1.0, 2.0]\n"


HEAD = """
import builtins, ctypes, gc, itertools, json, mmap, os, signal, socket, struct, subprocess, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
def system(number, *arguments):
    result = libc.syscall(number, *arguments)
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
def forge(**reply):
    # Answers the harness's own question, whose id is found in its frames.
    frame = sys._getframe()
    while "question" not in frame.f_locals or "id" not in frame.f_locals["question"]:
        frame = frame.f_back
    os.write(3, sys.modules["inside.frames"].frame(reply | {"id": frame.f_locals["question"]["id"]}))
def grow(hide):
    # Writes files without end, each out of sight at once.
    for n in itertools.count():
        fd = os.open(str(n), os.O_CREAT | os.O_RDWR)
        os.write(fd, bytes(2**22))
        hide(str(n), fd)
        time.sleep(0.01)
"""

TIME = [
    Attack("endless loop", "while True: pass", "timeout"),
    Attack("endless loop in C", "all(itertools.repeat(True))", "timeout"),
    Attack("sleep", "time.sleep(60)", "timeout"),
    Attack("SIGTERM ignored", "signal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(60)", "timeout"),
    Attack(
        "BaseException caught",
        "while True:\n    try:\n        while True: pass\n    except BaseException: pass",
        "timeout",
    ),
    Attack("signals blocked", "signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))\ntime.sleep(60)", "timeout"),
    Attack("waits for input", "while not sys.stdin.read(1): pass", "timeout"),
]
SIZE = [
    Attack("memory bomb", "x = []\nwhile True: x.append(bytearray(2**24))", "memory"),
    Attack("one huge object", "bytearray(2**40)", "memory"),
    Attack("memory mapped", "x = [mmap.mmap(-1, 2**28) for _ in range(100)]", "memory"),
    Attack("memory without a mapping", "os.memfd_create('x')", "forbidden"),
    Attack("shared memory", "system(29, 0, 2**30, 0o1600)", "forbidden"),
    Attack("10 GiB of output", "for _ in range(10 * 2**10): print('x' * 2**20)", "output_too_large"),
    Attack("output by the descriptor", "while True: os.write(2, b'x' * 2**20)", "output_too_large"),
    Attack("a huge file", "f = open('x', 'wb')\nwhile True: f.write(bytes(2**22))", "output_too_large"),
    Attack("a huge hole", "os.truncate(os.open('x', os.O_CREAT | os.O_RDWR), 2**40)", "output_too_large"),
    Attack(
        "the disk filled",
        "for n in itertools.count():\n    open(str(n), 'wb').write(bytes(2**23))\n    time.sleep(0.01)",
        "output_too_large",
    ),
    Attack(
        "files without a name",
        "x = []\nfor n in itertools.count():\n    x.append(open('x', 'wb', buffering=0))\n    os.unlink('x')\n"
        "    x[-1].write(bytes(2**22))\n    time.sleep(0.01)",
        "output_too_large",
    ),
    Attack(
        "removed files that are mapped alone",
        "libc.mmap.argtypes = [ctypes.c_void_p] + [ctypes.c_size_t] * 5\n"
        "def hide(name, fd):\n    os.unlink(name)\n    libc.mmap(None, 4096, 1, 1, fd, 0)\n    os.close(fd)\n"
        "grow(hide)",
        "output_too_large",
    ),
    Attack(
        "removed files of a thread whose process seems dead",
        "threading.Thread(target=grow, args=(lambda name, fd: os.unlink(name),)).start()\nlibc.syscall(60, 0)",
        "output_too_large or crash",  # where its scratch is full, the last thread ends, and with it the process
    ),
    Attack("a thread with descriptors of its own", "system(56, 0x50B00, 0, 0, 0, 0)", "forbidden"),
    Attack("descriptors copied", "system(436, 3, 2**32 - 1, 2)", "forbidden"),
    Attack(
        "large socket buffers",
        "socket.socketpair()[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**22)",
        "forbidden",
    ),
    Attack("a large pipe", "import fcntl\nfcntl.fcntl(os.pipe()[1], 1031, 2**20)", "forbidden"),
    Attack(
        "locks on parts of files",
        "import fcntl\nfor n in range(200):\n    fd = os.open(str(n), os.O_CREAT | os.O_RDWR)\n"
        "    for place in range(0, 3000, 2): fcntl.lockf(fd, fcntl.LOCK_EX, 1, place)",
        "forbidden",
    ),
    Attack(
        "watches of epoll",
        "import select\nx, y = [select.epoll() for _ in range(60)], [os.eventfd(0) for _ in range(60)]\n"
        "for n in range(130, 250):\n    for event in y:\n        os.dup2(event, n)\n"
        "        for watching in x: watching.register(n)",
        "forbidden",
    ),
    Attack("Landlock rulesets", "system(444, struct.pack('Q', 1), 8, 0)", "forbidden"),
    Attack("a filter of its own", "system(317, 1, 2, 0)", "forbidden"),
    Attack("the same by prctl", "system(157, 22, 2, 0, 0, 0)", "forbidden"),
    Attack(
        "a folder that nobody can list",
        "os.mkdir('d', 0o300)\nfor n in itertools.count():\n    open(f'd/{n}', 'wb').close()\n    time.sleep(0.01)",
        "output_too_large",
    ),
    Attack(
        "folders too deep to look into",
        "for n in range(1200):\n    os.mkdir('d')\n    os.chdir('d')\ntime.sleep(5)",
        "output_too_large",
    ),
    Attack(
        "empty files without end",
        "for n in itertools.count(): open(str(n), 'w').close()",
        "output_too_large or timeout",  # on a slow disk so many are not made in time
    ),
    Attack("100,000 open files", "x = [open('/dev/null') for _ in range(100_000)]", "forbidden"),
    Attack("100,000 pipes", "x = [os.pipe() for _ in range(100_000)]", "forbidden"),
    Attack(
        "10,000 threads",
        "threading.stack_size(2**15)\nfor _ in range(10_000): threading.Thread(target=time.sleep, args=(9,)).start()",
        "forbidden",
    ),
    Attack("recursion", "f = lambda n: f(n + 1)\nf(0)", "exception"),
    Attack(
        "recursion beyond the stack",
        "sys.setrecursionlimit(10**9)\nf = lambda: [].sort(key=g) or [0].sort(key=g)\ng = lambda _: f()\nf()",
        "crash",
    ),
    Attack("a million numbers", "return [1.0] * 1_000_000", "output_too_large"),
    Attack("a huge answer", "return [{'x' * 2**23: 1.0}]", "output_too_large"),
]
END = [
    Attack("segmentation fault", "ctypes.string_at(0)", "crash"),
    Attack("os._exit", "os._exit(0)", "crash"),
    Attack("os.abort", "os.abort()", "crash"),
    Attack("killed by itself", "os.kill(os.getpid(), 9)", "crash"),
    Attack("its group killed", "os.killpg(0, 9)", "crash"),
    Attack("sys.exit", "sys.exit(0)", "exception"),
    Attack("KeyboardInterrupt", "raise KeyboardInterrupt", "exception"),
    Attack(
        "an exception that cannot be shown",
        "class E(Exception):\n    def __str__(self): raise ValueError\nraise E",
        "exception",
    ),
    Attack(
        "an exception that hangs",
        "class E(Exception):\n    def __str__(self):\n        while True: pass\nraise E",
        "timeout",
    ),
    Attack(
        "a value that hangs", "class V:\n    def item(self):\n        while True: pass\nreturn [V(), V()]", "timeout"
    ),
    Attack("descriptors closed", "os.closerange(0, 256)", "crash"),
]
PROCESSES = [
    Attack("fork", "os.fork()", "forbidden"),
    Attack("fork bomb", "while True: os.fork()", "forbidden"),
    Attack("stubborn fork bomb", "while True:\n    try: os.fork()\n    except OSError: pass", "timeout"),
    Attack("fork by number", "system(57)", "forbidden"),
    Attack("clone by number", "system(56, 17, 0, 0, 0, 0)", "forbidden"),
    Attack("a program", "subprocess.Popen(['sleep', '60'])", "forbidden"),
    Attack("posix_spawn", "os.posix_spawn('/bin/sleep', ['sleep', '60'], {})", "forbidden"),
    Attack("exec", "os.execv('/bin/sleep', ['sleep', '60'])", "forbidden"),
    Attack(
        "multiprocessing",
        "import multiprocessing as m\nm.get_context('fork').Process(target=print).start()",
        "forbidden",
    ),
    Attack("a namespace", "system(272, 0x10000000)", "forbidden"),
    Attack("ptrace of the supervisor", "system(101, 16, os.getppid(), 0, 0)", "forbidden"),
    Attack("ptrace of the service", "system(101, 16, PID, 0, 0)", "forbidden"),
    Attack("a signal to the supervisor", "os.kill(os.getppid(), 9)", "forbidden"),
    Attack(
        "a signal to the service", "try: os.kill(PID, 9)\nexcept ProcessLookupError: raise PermissionError", "forbidden"
    ),
    Attack("a signal to everybody", "os.kill(-1, 9)", None),
    Attack(
        "limits of the supervisor",
        "import resource\nresource.prlimit(os.getppid(), resource.RLIMIT_NOFILE, (0, 0))",
        "forbidden",
    ),
    Attack(
        "limits raised",
        "import resource\nresource.setrlimit(resource.RLIMIT_AS, (-1, -1))\nbytearray(2**30)",
        "exception",
    ),
    Attack("priority", "os.nice(-5)", "forbidden"),
    Attack("life after the supervisor", "if libc.prctl(1, 0, 0, 0, 0): raise PermissionError", "forbidden"),
    Attack("the same, beyond 32 bits", "system(157, ctypes.c_ulong(2**32 + 1), 0, 0, 0, 0)", "forbidden"),
    Attack("out of the supervisor's sight", "if libc.prctl(4, 0, 0, 0, 0): raise PermissionError", "forbidden"),
    Attack("a handle of the supervisor", "system(434, os.getppid(), 0)", "forbidden"),
    Attack("a signal to a file's owner", "import fcntl\nfcntl.fcntl(0, fcntl.F_SETOWN, PID)", "forbidden"),
    Attack(
        "a signal to a socket's owner",
        "import fcntl\na, b = socket.socketpair()\nfcntl.ioctl(a, 0x8901, struct.pack('i', PID))",
        "forbidden",
    ),
    Attack("a system call of the x32 ABI", "system(0x40000000 + 41, 1, 1, 0)", "forbidden"),
    Attack(
        "a system call of 32 bits",
        "m = mmap.mmap(-1, 4096, prot=7)\nm.write(b'\\xb8\\x14\\0\\0\\0\\xcd\\x80\\xc3')  # getpid by int 0x80\n"
        "ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(m)))()",
        "forbidden",
    ),
    Attack("a lock on a shared file", "import fcntl\nfcntl.flock(open(json.__file__), fcntl.LOCK_EX)", "forbidden"),
    Attack("urgent bytes", "socket.socketpair()[0].send(b'x', socket.MSG_OOB)", "forbidden"),
    Attack(
        "a timer that wakes a stopped process",
        "system(222, 1, struct.pack('QiiQ40x', 0, signal.SIGCONT, 0, 0), ctypes.byref(ctypes.c_int()))",
        "forbidden",
    ),
    Attack(
        "a name that is no text",
        "assert libc.prctl(15, b'\\xff) 1 \\n\\xfe', 0, 0, 0) == 0\ntime.sleep(0.3)",
        None,
    ),
    Attack("last to go where memory ends", "open('/proc/self/oom_score_adj', 'w')", "forbidden"),
    Attack("first to go where memory ends", "assert open('/proc/self/oom_score_adj').read() == '1000\\n'", None),
    Attack("page faults", "system(323, 0)", "forbidden"),
    Attack("a key in the kernel", "system(248, b'user', b'a', b'b', 1, -2)", "forbidden"),
    Attack("another user", "os.setuid(1)", "forbidden"),
]
NETWORK = [
    Attack("TCP", "socket.create_connection(('127.0.0.1', PORT))", "forbidden"),
    Attack("UDP", "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', PORT))", "forbidden"),
    Attack("a server", "socket.create_server(('127.0.0.1', 0))", "forbidden"),
    Attack("DNS", "socket.getaddrinfo('example.com', 80)", "forbidden"),
    Attack("HTTP", "import urllib.request\nurllib.request.urlopen(f'http://127.0.0.1:{PORT}/')", "forbidden"),
    Attack("unix socket", "socket.socket(socket.AF_UNIX).connect(UNIX)", "forbidden"),
    Attack("unix datagrams", "socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)[0].sendto(b'x', UNIX)", "forbidden"),
    Attack("an abstract socket", "socket.socketpair()[0].connect('\\0x')", "forbidden"),
    Attack(
        "descriptors sent",
        "socket.socketpair()[0].sendmsg([b'x'], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack('i', 0))])",
        "forbidden",
    ),
    Attack("netlink", "socket.socket(socket.AF_NETLINK)", "forbidden"),
    Attack("io_uring", "system(425, 1, 0)", "forbidden"),
]
FILES = [
    Attack("the service's environment", "assert SECRET not in str(os.environ)", None),
    Attack("the service's environment by /proc", "open(f'/proc/{PID}/environ').read()", "forbidden"),
    Attack("the supervisor's environment by /proc", "open(f'/proc/{os.getppid()}/environ').read()", "forbidden"),
    Attack("the service's memory by /proc", "open(f'/proc/{PID}/mem', 'rb').read(1)", "forbidden"),
    Attack("the supervisor's memory by /proc", "open(f'/proc/{os.getppid()}/mem', 'r+b').read(1)", "forbidden"),
    Attack("what the supervisor has open", "os.listdir(f'/proc/{os.getppid()}/fd')", "forbidden"),
    Attack("the supervisor's root", "os.readlink(f'/proc/{os.getppid()}/root')", "forbidden"),
    Attack(
        "other workers by /proc",
        "for pid in {*range(os.getppid() + 1, os.getpid() + 20)} - {os.getpid()}:\n"
        "    for name in ('mem', 'environ', 'maps', 'fd/3', 'cwd/x'):\n"
        "        try: entry = open(f'/proc/{pid}/{name}', 'rb')\n"
        "        except OSError: continue\n"
        # The kernel lets every user open the maps of a process that has ended; they are empty.
        "        assert name == 'maps' and not entry.read(1), (pid, name)",
        None,
    ),
    Attack("the service's memory by number", "system(310, PID, 0, 0, 0, 0, 0)", "forbidden"),
    Attack("a file that all may read", "open(FILE).read()", "forbidden"),
    Attack("the folder it is in", "os.listdir(FOLDER)", "forbidden"),
    Attack("the user's home", "os.listdir(HOME)", "forbidden"),
    Attack("users of the machine", "open('/etc/passwd').read()", "forbidden"),
    Attack("the root", "os.listdir('/')", "forbidden"),
    Attack("scratch of others", "os.listdir('..')", "forbidden"),
    Attack("a symlink out of scratch", "os.symlink(FILE, 'link')\nopen('link').read()", "forbidden"),
    Attack("a hard link out of scratch", "os.link(FILE, 'link')\nopen('link').read()", "forbidden"),
    Attack("a file written", "open(FILE, 'a').write('x')", "forbidden"),
    Attack("a file made", "open(FOLDER + '/new', 'w').write('x')", "forbidden"),
    Attack("a file removed", "os.remove(FILE)", "forbidden"),
    Attack("a file moved", "os.rename(FILE, 'mine')", "forbidden"),
    Attack("the mode of a file", "os.chmod(FILE, 0o777)", "forbidden"),
    Attack("the mode of a file that is open", "os.fchmod(os.open(json.__file__, os.O_RDONLY), 0)", "forbidden"),
    Attack("the times of a file", "os.utime(FILE)", "forbidden"),
    Attack("the length of a file", "os.truncate(FILE, 0)", "forbidden"),
    Attack("watching a file", "if libc.inotify_init() < 0: raise PermissionError", "forbidden"),
    Attack("/tmp", "open('/tmp/x', 'w')", "forbidden"),
    Attack("/dev/shm", "open('/dev/shm/x', 'w')", "forbidden"),
    Attack("the harness changed on disk", "open(sys.modules['inside.worker'].__file__, 'a')", "forbidden"),
    Attack("json changed on disk", "open(json.__file__, 'a')", "forbidden"),
    Attack("a device", "os.mknod('x', 0o20666, os.makedev(1, 1))", "forbidden"),
    Attack("owner changed", "os.chown('.', 0, 0)", "forbidden"),
    Attack("mount", "system(165, b'none', b'/', b'tmpfs', 0, 0)", "forbidden"),
    Attack("handles", "system(304, -100, b'x', 0)", "forbidden"),
    Attack("scratch is its own", "open('x', 'w').write('x')\nassert open('x').read() == 'x'", None),
    Attack("links in scratch", "os.symlink('x', 'l')\nos.mkdir('d')\nos.rename('l', 'd/l')", None),
]
REPLIES = [
    Attack("results printed", "print('{\"values\": [100.0]}' * 100)", None),
    Attack(
        "a frame on every descriptor",
        "frame = b'{\"values\": [9.0, 9.0]}'\n"
        "for fd in range(64):\n"
        "    try: os.write(fd, len(frame).to_bytes(8, 'big') + frame)\n"
        "    except OSError: pass",
        "forbidden",
    ),
    Attack(
        "noise on every descriptor",
        "for fd in range(64):\n    try: os.write(fd, b'x' * 100)\n    except OSError: pass",
        "forbidden",
    ),
    Attack(
        "a deep frame",
        "frame = b'\\x91' * 100_000\nos.write(3, len(frame).to_bytes(8, 'big') + frame)",
        "forbidden",
    ),
    Attack("a kind of failure that is no word", "forge(error={'kind': {}, 'type': '', 'text': ''})", "forbidden"),
    Attack("an error that is none", "forge(error=[1])", "forbidden"),
    Attack("values that are none", "forge(values=5)", "forbidden"),
    Attack("a signature for values", "forge(signature={'entry': 5})", "forbidden"),
    Attack("JSON for values", "forge(values_json='[1, 2]')", "forbidden"),
    Attack("threads by the word", "forge(values=[1.0, 2.0], threads_left='x')", "forbidden"),
    Attack("half a character", "raise ValueError('\\ud800')", "exception"),
    Attack("half a character as a name", "return [{'\\ud800': 1.0}, 2.0]", None),
    Attack("json changed", "json.dumps = json.JSONEncoder.encode = lambda *a, **k: '{}'", None),
    Attack(
        "the harness changed",
        "w = sys.modules['inside.worker']\nw.serve = w.list_values = w.LoadedCode.answer = w.plain_value = None",
        None,
    ),
    Attack("builtins changed", "builtins.len = builtins.isinstance = lambda *a: 100", "forbidden"),
]
ALL = [*TIME, *SIZE, *END, *PROCESSES, *NETWORK, *FILES, *REPLIES]
# Those that the level rlimits ends too: it is for code that may reach what its user reaches.
OF_TRUSTED = [*TIME, *END, *REPLIES, *(attack for attack in SIZE if attack.name in ("memory bomb", "a huge answer"))]
# What differs on a kernel without Landlock: no signal at all, and the sandbox's own folders may be listed. Watches and
# locks are not counted there: workers are closed to their supervisor too.
WITHOUT_LANDLOCK = {
    **dict.fromkeys(("killed by itself", "its group killed", "a signal to everybody"), "forbidden"),
    **dict.fromkeys(("the user's home", "the root", "scratch of others"), "None"),
    **dict.fromkeys(("last to go where memory ends", "what the supervisor has open"), "forbidden or None"),
}


def attacks(level_name: str) -> list[Attack]:
    """The attacks of a level."""
    return OF_TRUSTED if level_name == "rlimits" else ALL


async def run(level_name: str) -> dict[str, Any]:
    """Every attack's outcome by its name; `listened` tells whether anything reached the sockets."""
    found = ConfinementLevel("rlimits") if level_name == "rlimits" else await try_level(level_name)  # type: ignore[arg-type]
    code = Code("attacks", RUNNER, "0" * 64, "runner.py")
    num_workers = 2 * AT_ONCE + 1
    patient, short = (Sandbox(code, limits, found, num_workers=num_workers) for limits in (LIMITS, SHORT))
    benign = Sandbox(code, LIMITS, found)
    outcomes: dict[str, Any] = {"parts": found.parts}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o777)
        target = Path(folder) / "file"
        target.write_text(SECRET)
        target.chmod(0o666)
        with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX) as unix:
            unix.bind(str(Path(folder) / "socket"))
            unix.listen()
            (Path(folder) / "socket").chmod(0o777)
            port = tcp.getsockname()[1]
            facts = {"PID": os.getpid(), "PORT": port, "UNIX": str(Path(folder) / "socket"), "SECRET": SECRET}
            facts |= {"FILE": str(target), "FOLDER": folder, "HOME": str(Path.home())}
            known = "".join(f"{name} = {value!r}\n" for name, value in facts.items())
            await asyncio.gather(patient.load(), short.load(), benign.load())
            supervisors = [sandbox._supervisor for sandbox in (patient, short)]
            free = asyncio.Semaphore(AT_ONCE)

            async def suffer(attack: Attack) -> None:
                sandbox = short if attack.kind == "timeout" else patient
                async with free:
                    outcomes[attack.name] = await _beside_a_bystander(sandbox, known + attack.source)

            calling = asyncio.create_task(_call_on(benign))
            await asyncio.gather(*(suffer(attack) for attack in attacks(level_name)))
            calling.cancel()
            outcomes["benign_s"] = await calling
            alive = [sandbox._supervisor for sandbox in (patient, short)]
            outcomes["supervisors_live"] = alive == supervisors and all(one and one.alive for one in alive)
            for listener in (tcp, unix):
                listener.setblocking(False)
            outcomes["reached"] = [name for name, one in (("tcp", tcp), ("unix", unix)) if _was_reached(one)]
        outcomes["file"] = target.read_text()
    await asyncio.gather(patient.close(), short.close(), benign.close())
    return outcomes


def _was_reached(listener: socket.socket) -> bool:
    try:
        listener.accept()
    except BlockingIOError:
        return False
    return True


async def _call_on(sandbox: Sandbox) -> list[float]:
    """Seconds of a call now and then of another function, until this task is cancelled."""
    seconds = []
    try:
        while True:
            outcome = await _outcome(sandbox, GOOD, "benign")
            assert outcome.values == [1.0, 2.0], outcome
            seconds.append(outcome.seconds)
            await asyncio.sleep(BENIGN_EVERY_S)
    except asyncio.CancelledError:
        return seconds


async def _beside_a_bystander(sandbox: Sandbox, text: str) -> dict[str, Any]:
    """An attack's outcome, and what a call beside it and one after it gave."""
    attack = asyncio.create_task(_outcome(sandbox, text, None))
    beside = await _outcome(sandbox, GOOD, "bystander")
    outcome = await attack
    after = await _outcome(sandbox, GOOD, None)
    return asdict(outcome) | {"beside": beside.values, "after": after.values}


@dataclass(frozen=True)
class CallOutcome:
    """What became of a call."""

    kind: str | None
    text: str
    values: Any
    seconds: float


async def _outcome(sandbox: Sandbox, text: str, session: str | None) -> CallOutcome:
    question = {"arguments": {"completions": ["a", "b"], "attack": text}}
    started = asyncio.get_running_loop().time()
    kind, said, values = None, "", None
    try:
        values = (await sandbox.call(question, session=session)).values
        values = values if len(values) < 10 else len(values)
    except CallError as error:
        kind, said = error.kind, str(error)
    return CallOutcome(kind, said, values, asyncio.get_running_loop().time() - started)


def become_plain() -> None:
    """Give up root: a user namespace in which this process is user 1000 and has no capability."""
    if os.geteuid() != 0:
        return
    if ctypes.CDLL(None).unshare(0x10000000) != 0:
        raise SystemExit(NO_NAMESPACE)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text("1000 0 1")
    Path("/proc/self/gid_map").write_text("1000 0 1")
    confine.drop_capabilities()


def lose_landlock() -> None:
    """Be on a kernel without Landlock, for this process and those that it starts."""
    refusal = pyseccomp.SyscallFilter(pyseccomp.ALLOW)
    refusal.add_rule(pyseccomp.ERRNO(errno.ENOSYS), "landlock_create_ruleset")
    refusal.load()


if __name__ == "__main__":
    os.environ["GSPO_SECRET"] = SECRET
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    if sys.argv[2] == "plain":
        become_plain()
    if sys.argv[3:] == ["without_landlock"]:
        lose_landlock()
    print(json.dumps(asyncio.run(run(sys.argv[1]))))  # noqa: T201
