"""The trusted process of a sandbox: it starts, measures and ends the workers that run user code, and runs none itself.

It takes commands on a socket of packets, one JSON object each, from the reward service alone, and decides nothing:

- `{"op": "start", "id": N, "memory": BYTES}` with two descriptors, the worker's channel and its output
- `{"op": "measure", "id": N, "ticket": T}`, answered by
  `{"ticket": T, "usage": {"cpu_s", "num_threads", "scratch_bytes", "watch_bytes"}}`
- `{"op": "stop", "id": N, "ticket": T}` stops the worker, then as `measure`
- `{"op": "resume", "id": N}`
- `{"op": "kill", "id": N}`

It reports the end of a worker by {"id": N, "ended": WAIT STATUS}. When the socket closes, everything ends.
Started as a program by services/gspo/reward/sandbox/launch.py with its task as JSON in the first packet.
"""

import errno
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from . import confine, scratch, worker
from .kernel_memory import descriptor_bytes

PACKET_BYTES = 65536
# A worker's descriptors: standard input, output, error, and its channel.
_CHANNEL_FD = 3
_NICE, _MAX_REMOVERS = 10, 4
_REASON_CHARS = 500
# Of a worker's watches and locks on files.
MOST_WATCH_BYTES = 8 * 2**20
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Serve on the socket that is descriptor `argv[1]` until it closes."""
    control = socket.socket(fileno=int(sys.argv[1]))
    sys.argv = [""]
    SandboxSupervisor(control, json.loads(control.recv(PACKET_BYTES))).run()


class SandboxSupervisor:
    """Holds the workers of one sandbox.

    Args:
        task: The task from launch.py: scratch, reads, devices, uid, user_namespace, num_files, num_tasks, file_bytes,
            packages, num_slots and filter. `num_slots` is the number of file systems of limited size in scratch, one
            for each worker, or 0. With `filter`, the bytes of the filter are the next packet.
    """

    def __init__(self, control: socket.socket, task: dict[str, Any]) -> None:
        self._control, self._task = control, task
        self._program = control.recv(PACKET_BYTES) if task["filter"] else b""
        self._pids: dict[int, int] = {}
        self._folders: dict[int, Path] = {}
        self._removers: dict[int, Path] = {}
        self._scratch = Path(task["scratch"])
        self._free_slots = [self._scratch / str(slot) for slot in range(task["num_slots"])]
        self._preload_folder = self._scratch / "preload"
        self._reads = [Path(path) for path in task["reads"]]
        # Packages may remember the temporary folder of their import: workers read it, and write in their own.
        readable = [*self._reads, self._preload_folder]
        self._rules = confine.FileRules(readable, [Path(path) for path in task["devices"]])

    def run(self) -> None:
        """Take commands until the socket closes, then end every worker."""
        report = self._confine()
        report["failed_imports"] = _preload(self._task["packages"], self._preload_folder)
        gc.collect()
        gc.freeze()  # the collector would touch, and so copy, what workers share with this process
        wake, waker = socket.socketpair()
        waker.setblocking(False)
        signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._send(report | {"ready": True})
        while True:
            ready, _, _ = select.select([self._control, wake], [], [])
            if wake in ready:
                wake.recv(4096)
                self._reap()
            if self._control in ready and not self._take_command():
                break
        for number in list(self._pids):
            self._kill(number)
        for pid in (*self._pids.values(), *self._removers):
            os.waitpid(pid, 0)
        # The service does so too, unless it was killed.
        scratch.remove(self._scratch)

    def _confine(self) -> dict[str, Any]:
        """Become the sandbox's user, and give up all privileges; a report of the means that the machine has."""
        is_own = confine.take_own_user(self._task["uid"], self._reads, namespace=self._task["user_namespace"])
        report = {"landlock": self._rules.abi, "own_user": is_own}
        confine.drop_capabilities()
        confine.no_new_privileges()
        if not self._rules.abi:
            # Workers inherit it: they may not be open to each other even at their start, as a write of their own needs.
            confine.be_first_to_go()
        confine.hide()
        return report

    def _take_command(self) -> bool:
        data, descriptors, _, _ = socket.recv_fds(self._control, PACKET_BYTES, 2)
        if not data:
            return False
        command = json.loads(data)
        number = command["id"]
        match command["op"]:
            case "start":
                self._start(number, command["memory"], descriptors)
            case "kill":
                self._kill(number)
            case "measure" | "stop" as op:
                if op == "stop":
                    self._signal(number, signal.SIGSTOP)
                self._send({"ticket": command["ticket"], "usage": self._measure(number)})
            case "resume":
                self._signal(number, signal.SIGCONT)
        return True

    def _start(self, number: int, memory: int, descriptors: list[int]) -> None:
        parent = os.getpid()
        try:
            folder = self._folders[number] = self._new_folder()
            pid = os.fork()
        except OSError:  # no process can be made
            self._remove_folder(number)
            self._send({"id": number, "ended": 0})
            return
        finally:
            if os.getpid() == parent:
                for fd in descriptors:
                    os.close(fd)
        if pid == 0:
            self._become_worker(parent, folder, memory, descriptors)
        self._pids[number] = pid

    def _become_worker(self, parent: int, folder: Path, memory: int, descriptors: list[int]) -> None:
        """In the copy: give up everything, then serve; never returns."""
        try:
            os.setsid()
            confine.die_with_parent(parent)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            channel = _take_descriptors(*descriptors)
            os.chdir(folder)
            _use_as_temporary(folder)
            if self._rules.abi:  # Landlock keeps other workers out, which have the same user
                confine.show()
                confine.be_first_to_go()
            self._rules.apply(folder)
            task = self._task
            confine.limit(confine.WorkerBounds(memory, task["file_bytes"], task["num_files"], task["num_tasks"]))
            if self._program:
                confine.load_filter(self._program)
            sys.stdout, sys.stderr = _text_to(1), _text_to(2)
            worker.serve(channel)
        except OSError as error:
            os.write(2, f"the sandbox: {error}\n".encode())
            os._exit(1)
        os._exit(0)

    def _new_folder(self) -> Path:
        """A worker's scratch, under a name that no other worker can guess: some can query any path."""
        while self._task["num_slots"] and not self._free_slots:
            if not self._removers:
                raise OSError(errno.EAGAIN, "every slot for scratch is taken")
            self._end_remover(*os.waitpid(next(iter(self._removers)), 0))
        place = self._free_slots.pop() if self._free_slots else self._scratch
        folder = place / os.urandom(16).hex()
        folder.mkdir(mode=0o700)
        return folder

    def _remove_folder(self, number: int) -> None:
        """Remove a worker's scratch; in a process of its own unless it is empty, so that commands need not wait."""
        folder = self._folders.pop(number, None)
        if folder is None:
            return
        with suppress(OSError):
            folder.rmdir()
        pid = 0
        if folder.exists():
            if len(self._removers) >= _MAX_REMOVERS:  # no more is written than can be removed
                self._end_remover(*os.waitpid(next(iter(self._removers)), 0))
            pid = _fork_remover(self._control, folder)
        self._removers[pid] = folder
        if not pid:
            self._end_remover(pid)

    def _end_remover(self, pid: int, _status: int = 0) -> None:
        folder = self._removers.pop(pid)
        if self._task["num_slots"]:
            self._free_slots.append(folder.parent)

    def _kill(self, number: int) -> None:
        if number in self._pids:
            with suppress(ProcessLookupError):  # before it has a group of its own it is killed alone
                os.killpg(self._pids[number], signal.SIGKILL)
            self._signal(number, signal.SIGKILL)

    def _signal(self, number: int, which: signal.Signals) -> None:
        """All threads of a worker; only this process reaps it, so no other process has its id."""
        if number in self._pids:
            os.kill(self._pids[number], which)

    def _reap(self) -> None:
        for pid in list(self._removers):
            if os.waitpid(pid, os.WNOHANG)[0]:
                self._end_remover(pid)
        for number, pid in list(self._pids.items()):
            ended_pid, status = os.waitpid(pid, os.WNOHANG)
            if ended_pid:
                del self._pids[number]
                self._send({"id": number, "ended": status})  # the next command waits for this, its caller does not
                self._remove_folder(number)

    def _measure(self, number: int) -> dict[str, Any] | None:
        """The usage of a worker; None if it is gone. Its name may be any bytes, and it may hide its files."""
        try:
            pid = self._pids[number]
            fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
            # The fields of stat after the name: 11 and 12 are the ticks in user and kernel mode, 17 the threads.
            cpu_s = (int(fields[11]) + int(fields[12])) / _TICKS_PER_S
            folder = self._folders[number]
            scratch_bytes = scratch.size(folder) + scratch.nameless_size(pid, folder)
            watch_bytes = descriptor_bytes([pid], MOST_WATCH_BYTES)
            return {
                "cpu_s": cpu_s,
                "num_threads": int(fields[17]),
                "scratch_bytes": scratch_bytes,
                "watch_bytes": watch_bytes,
            }
        except (KeyError, OSError, ValueError, IndexError):
            return None

    def _send(self, message: dict[str, Any]) -> None:
        with suppress(BrokenPipeError, ConnectionResetError):
            self._control.send(json.dumps(message).encode())


def _preload(packages: Iterable[str], folder: Path) -> dict[str, str]:
    """Import packages once for all workers; `folder` is made for the files that they write at their import.

    Returns:
        Package -> why its import failed. A failed import leaves things behind in this process: half a module, or a C
        extension that cannot be loaded twice. Start another process without that package.
    """
    folder.mkdir(mode=0o700)
    _use_as_temporary(folder)
    failed = {}
    for name in packages:
        try:
            importlib.import_module(name)
        except Exception as error:  # noqa: BLE001 - whatever a package's import raises; the service logs it
            failed[name] = f"{type(error).__name__}: {error}"[:_REASON_CHARS]
    return failed


def _use_as_temporary(folder: Path) -> None:
    """Make a folder this process's temporary one, and its home."""
    os.environ.update(HOME=str(folder), TMPDIR=str(folder))
    tempfile.tempdir = None  # forget the folder of the first use


def _fork_remover(control: socket.socket, folder: Path) -> int:
    """A process that removes a folder and ends; 0 if there can be none, and the folder is removed already."""
    parent = os.getpid()
    try:
        pid = os.fork()
    except OSError:
        scratch.remove(folder)
        return 0
    if pid == 0:
        try:
            confine.die_with_parent(parent)
            signal.set_wakeup_fd(-1)
            control.close()
            os.nice(_NICE)
            scratch.remove(folder)
        finally:
            os._exit(0)
    return pid


def _take_descriptors(channel: int, output: int) -> socket.socket:
    """Keep the worker's four descriptors and close all others."""
    channel, output = os.dup(channel), os.dup(output)  # out of the way of the places below
    while min(channel, output) <= _CHANNEL_FD:
        channel, output = os.dup(channel), os.dup(output)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (output, 1), (output, 2), (channel, _CHANNEL_FD)):
        os.dup2(source, target, inheritable=False)
    os.closerange(_CHANNEL_FD + 1, max(channel, output, nothing, 1024) + 1)
    return socket.socket(fileno=_CHANNEL_FD)


def _text_to(fd: int) -> TextIO:
    return open(fd, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)
