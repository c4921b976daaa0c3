"""A process that is forked early, while it is safe, and gets its work later. It knows nothing of vLLM.

A fork has every module that its parent has imported, and ends without tearing an interpreter down. It is safe only
while there is one thread: another thread's lock would stay locked in the fork for ever.
"""

from __future__ import annotations

import atexit
import gc
import os
from collections.abc import Callable, Mapping
from multiprocessing import current_process, get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any


class ForkedProcess:
    """A forked process that waits for its work; a multiprocessing.Process, and the context that makes it, in one.

    It also ends when this process ends before it has work.

    Raises:
        RuntimeError: This process has more than one thread.
    """

    def __init__(self) -> None:
        if (num_threads := len(list(Path("/proc/self/task").iterdir()))) > 1:
            raise RuntimeError(f"a process is forked while there is one thread, and there are {num_threads}")
        context = get_context("fork")
        receiver, self._sender = context.Pipe(duplex=False)
        self._process = context.Process(target=_wait_for_work, args=(receiver, self._sender))
        self._process.start()
        receiver.close()
        # It comes before multiprocessing's own exit handler, which joins the processes and would wait for this one.
        atexit.register(self._sender.close)
        self._work: tuple[Callable[..., None], Mapping[str, Any]] | None = None

    def Process(self, *, target: Callable[..., None], name: str, kwargs: Mapping[str, Any]) -> ForkedProcess:
        """As a multiprocessing context's: the process that will run `target(**kwargs)`. There is only one.

        Raises:
            RuntimeError: This is the second call.
        """
        if self._work is not None:
            raise RuntimeError(f"process {name}: the one forked process has its work already")
        self._work = (target, kwargs)
        self._process.name = name
        return self

    def start(self) -> None:
        """Let it run its work, with the environment variables of this moment."""
        self._sender.send((self._process.name, dict(os.environ), self._work))
        self._sender.close()

    def __getattr__(self, name: str) -> Any:
        """Everything else is the process's own: pid, sentinel, exitcode, join, kill."""
        return getattr(self._process, name)


def _wait_for_work(receiver: Connection, sender: Connection) -> None:
    # The other end is the parent's alone: its death is then the end of the stream.
    sender.close()
    try:
        current_process().name, environment, (target, kwargs) = receiver.recv()
    except EOFError:
        return
    receiver.close()
    # The objects of the fork stay frozen: vLLM would collect them three times before it ends (2 s).
    gc.unfreeze = _nothing
    os.environ.clear()
    os.environ.update(environment)
    target(**kwargs)


def _nothing() -> None:
    pass
