"""The program of an agent's sandbox: it loads the agent, and plays one rollout in a process of its own.

It takes messages on a socket, each a length of four bytes and JSON, and answers each:

- first the setup of agent_sandbox.py. The answer is a byte with the sockets that listen within the sandbox, if there
  are any, then {} once the agent is loaded, or {"unfit": text, "fix": text}
- {"task": {...}}: {"reward": number or null}, {"failure": text, "kind": name}, or {"died": number of the signal}

It ends every process that the rollout has left, answers, and ends. When the socket closes, everything ends.
User code runs in this process at the agent's import: the service trusts none of the answers. The rollout itself, which
a policy may steer, neither reads nor writes the memory of this process.
"""

import asyncio
import json
import math
import os
import select
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

from .loading import UnfitAgentError, load_agent
from .task import Agent, Task

HEAD_BYTES = 4
LISTENING = b"L"
_MAX_REWARD_BYTES, _MAX_RESULT_BYTES = 256, 65536
_TEXT_CHARS = 2000
_END_S, _ROUND_S = 10.0, 0.02
Message = dict[str, Any]
Confine = Callable[[Message], None]
Hide = Callable[[], None]
Become = Callable[[int], None]


def main(confine: Confine, hide: Hide, become_rollout: Become) -> None:
    """Play the rollout that comes on the socket that is descriptor `argv[1]`, unless it closes.

    Args:
        confine: Gives up the privileges of this process.
        hide: Closes this process to others of its user.
        become_rollout: What the rollout's process does first, with the id of this one.
    """
    control = socket.socket(fileno=int(sys.argv[1]))
    sys.argv = [""]
    setup = _receive(control)
    if setup is None:
        return
    if setup["listen"]:
        sockets = [socket.create_server((host, port)) for host, port in setup["listen"]]
        socket.send_fds(control, [LISTENING], [listening.fileno() for listening in sockets])
        for listening in sockets:
            listening.close()
    confine(setup)
    host = RolloutHost(setup, become_rollout)
    try:
        host.load()
    except UnfitAgentError as error:
        _send(control, {"unfit": str(error), "fix": error.fix})
        return
    hide()
    _send(control, {})
    host.serve(control)


class RolloutHost:
    """Plays one rollout.

    Args:
        setup: path and entry, or command, and reads. The rollout has a new folder in folder.
        become: What the rollout's process does first, with the id of this one.
    """

    def __init__(self, setup: Message, become: Become) -> None:
        self._setup, self._become = setup, become
        self._work = Path(setup["folder"]) / "work"
        self._agent: Agent | None = None

    def load(self) -> None:
        """Import the agent, or look for the program.

        Raises:
            UnfitAgentError: There is none.
        """
        self._make_folder()
        if self._setup["path"]:
            sys.path.insert(0, str(self._work))
            self._agent = load_agent(Path(self._setup["path"]), self._setup["entry"])
        elif shutil.which(self._setup["command"][0]) is None:
            raise UnfitAgentError(
                "names a program that the sandbox does not have",
                "Install it below /usr, or name its file in agent.reads",
            )

    def serve(self, control: socket.socket) -> None:
        """Play the rollout that comes, unless the socket closes."""
        if (message := _receive(control)) is None:
            return
        wake, waker = socket.socketpair()
        waker.setblocking(False)
        signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        answer = self._play(Task(**message["task"]), control, wake)
        _end_descendants()
        if answer is not None:
            _send(control, answer)

    def _play(self, task: Task, control: socket.socket, wake: socket.socket) -> Message | None:
        """The answer of the rollout; None where the socket has closed meanwhile."""
        results, result = os.pipe()
        host, pid = os.getpid(), os.fork()
        if pid == 0:
            self._become_rollout(host, task, result, (control, wake))
        os.close(result)
        status = _wait(pid, control, wake)
        return None if status is None else self._answer(status, _read_now(results))

    def _become_rollout(self, host: int, task: Task, result: int, foreign: Iterable[socket.socket]) -> NoReturn:
        """In the copy: play, or become the user's program."""
        code = 1
        try:
            os.setsid()
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for connection in foreign:
                connection.close()
            self._become(host)
            os.chdir(self._work)
            if self._agent is None:
                _become_command(self._setup["command"], task, self._work)
            os.write(result, json.dumps(_played(self._agent, task)).encode())
            code = 0
        except BaseException:  # noqa: BLE001 - the process ends here, and its log has the reason
            traceback.print_exc()
        finally:
            for stream in (sys.stdout, sys.stderr):
                with suppress(OSError, ValueError, AttributeError):  # closed or replaced by the user's code
                    stream.flush()
            os._exit(code)

    def _answer(self, status: int, result: bytes) -> Message:
        code = os.waitstatus_to_exitcode(status)
        if code < 0:
            return {"died": -code}
        if self._agent is None:
            if code:
                return {"failure": f"{self._setup['command'][0]} ended with exit code {code}", "kind": "agent_failed"}
            return _written_reward(self._work / "gspo-reward")
        with suppress(ValueError):
            if isinstance(answer := json.loads(result), dict):
                return answer
        return {"failure": f"its process ended with exit code {code} and without a result", "kind": "crash"}

    def _make_folder(self) -> None:
        """Make the rollout's folder, with a link to each file and folder that the agent may read, and go home there."""
        self._work.mkdir(mode=0o700)
        for path in self._setup["reads"]:
            (self._work / Path(path).name).symlink_to(path)
        # A temporary folder of its own: a program may make one there of the name that a link to a file has.
        temporary = self._work / ".tmp"
        temporary.mkdir()
        os.environ.update(HOME=str(self._work), TMPDIR=str(temporary))
        tempfile.tempdir = None  # forget the folder of the first use


def _played(agent: Agent, task: Task) -> Message:
    """The answer that the agent's function returns, or its exception as one."""
    try:
        reward = asyncio.run(_finished(agent, task))
    except MemoryError:
        traceback.print_exc()
        return {"failure": "asked for more memory than agent.memory_mb", "kind": "memory"}
    except Exception as error:  # noqa: BLE001 - the agent is the user's: its errors end its rollout alone
        traceback.print_exc()
        return {"failure": f"{type(error).__name__}: {error}"[:_TEXT_CHARS], "kind": "exception"}
    if reward is None:
        return {"reward": None}
    if not isinstance(reward, int | float) or not math.isfinite(reward):
        text = f"returned {reward!r:.100}, where a finite number or None belongs"
        return {"failure": text, "kind": "invalid_return"}
    return {"reward": float(reward)}


async def _finished(agent: Agent, task: Task) -> Any:
    return await agent(task)


def _become_command(command: list[str], task: Task, work: Path) -> NoReturn:
    """Run the user's program in place of this process, with the task as its input and in its environment."""
    file = work / "gspo-task.json"
    file.write_text(json.dumps(asdict(task)))
    os.environ.update(
        OPENAI_BASE_URL=task.base_url,
        OPENAI_API_KEY=task.api_key,
        ANTHROPIC_BASE_URL=task.base_url.removesuffix("/v1"),
        ANTHROPIC_API_KEY=task.api_key,
        GSPO_MODEL=task.model,
        GSPO_TASK_FILE=str(file),
        GSPO_REWARD_FILE=str(work / "gspo-reward"),
    )
    os.dup2(os.open(file, os.O_RDONLY), 0)
    os.execvp(command[0], command)  # noqa: S606 - what this process is for


def _written_reward(file: Path) -> Message:
    """The number that a program has written to its reward's file; none where there is no file."""
    try:
        opened = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return {"reward": None}
    except OSError as error:
        return {"failure": f"its reward cannot be read ({error.strerror})", "kind": "invalid_return"}
    try:
        text = os.read(opened, _MAX_REWARD_BYTES).decode(errors="replace").strip()
    except OSError as error:  # a folder
        return {"failure": f"its reward cannot be read ({error.strerror})", "kind": "invalid_return"}
    finally:
        os.close(opened)
    with suppress(ValueError):
        if math.isfinite(reward := float(text)):
            return {"reward": reward}
    return {"failure": f"wrote {text!r:.100} as its reward, and a reward is a finite number", "kind": "invalid_return"}


def _wait(pid: int, control: socket.socket, wake: socket.socket) -> int | None:
    """The status with which a child ended; None where the socket has closed first. Orphans are children too."""
    while True:
        ended, status = os.waitpid(-1, os.WNOHANG)
        if ended == pid:
            return status
        if ended:
            continue
        ready, _, _ = select.select([control, wake], [], [])
        if control in ready:  # nothing is sent before the answer: it has closed
            return None
        wake.recv(4096)


def _end_descendants() -> None:
    """Kill every process below this one. Orphans are children of this one."""
    deadline = time.monotonic() + _END_S
    while time.monotonic() < deadline:
        for pid in _descendants(os.getpid()):
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(_ROUND_S)


def _descendants(root: int) -> list[int]:
    """Ids of all processes below one; none where it has no child."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):  # noqa: PTH208 - names alone
        if entry.isdecimal():
            with suppress(OSError, IndexError, ValueError):
                fields = Path(f"/proc/{entry}/stat").read_bytes().rpartition(b")")[2].split()
                children.setdefault(int(fields[1]), []).append(int(entry))
    below, queue = list[int](), [root]
    while queue:
        queue += children.get(queue[0], [])
        below += children.get(queue.pop(0), [])
    return below


def _read_now(descriptor: int) -> bytes:
    """The content of a pipe, to which others may still write."""
    os.set_blocking(descriptor, False)
    try:
        return os.read(descriptor, _MAX_RESULT_BYTES)
    except BlockingIOError:
        return b""


def _receive(control: socket.socket) -> Message | None:
    """The next message; None at the end."""
    head = _exactly(control, HEAD_BYTES)
    body = _exactly(control, int.from_bytes(head, "big")) if head else b""
    return json.loads(body) if body else None


def _exactly(control: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        chunk = control.recv(size - len(data))
        if not chunk:
            return b""
        data += chunk
    return bytes(data)


def framed(message: Message) -> bytes:
    """The bytes of a message: its length, then its JSON."""
    body = json.dumps(message).encode()
    return len(body).to_bytes(HEAD_BYTES, "big") + body


def _send(control: socket.socket, message: Message) -> None:
    with suppress(BrokenPipeError, ConnectionResetError):
        control.sendall(framed(message))
