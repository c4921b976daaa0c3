"""Locks that keep two runs of one user off a GPU, also before they have taken its memory.

The lock of a GPU is a file of its UUID with an advisory lock, which the operating system releases when its process
ends. A run of another user shows in the memory in use.
"""

import fcntl
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TextIO

from gspo.common.errors import InputError
from gspo.common.host.machine import VISIBLE, Gpu

_RUNTIME = "XDG_RUNTIME_DIR"


@contextmanager
def lock_gpus(gpus: Iterable[Gpu], run_dir: Path, visible: Sequence[Gpu]) -> Iterator[None]:
    """Keep GPUs for this process while the block lasts.

    Args:
        visible: All GPUs that the caller may choose from, for the message.

    Raises:
        InputError: Another run has one of them, or the folder of the locks cannot be used.
    """
    with ExitStack() as stack:
        files = [stack.enter_context(_open(gpu)) for gpu in gpus]
        if all(_lock(file) for file in files):
            for file in files:
                file.truncate(0)
                file.write(f"process {os.getpid()}, {run_dir}")
                file.flush()
            yield
            return
    raise _in_use(visible)


def find_holder(gpu: Gpu) -> str:
    """The process and run directory that keep a GPU; empty if no run does."""
    with _open(gpu) as file:
        if _lock(file):
            return ""
        file.seek(0)
        return file.read() or "a process that is starting"


def _in_use(visible: Sequence[Gpu]) -> InputError:
    holders = {gpu.name: holder for gpu in visible if (holder := find_holder(gpu))}
    free = [gpu.name for gpu in visible if gpu.name not in holders]
    kept = "; ".join(f"GPU {name} by {holder}" for name, holder in holders.items())
    rule = f"other runs keep {len(holders)} of {len(visible)} GPUs ({kept})"
    others = f"choose among the {len(free)} free GPUs: {VISIBLE}={','.join(free)}" if free else "choose other GPUs"
    return InputError(VISIBLE, rule, f"End them, or {others}")


def _lock(file: TextIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _open(gpu: Gpu) -> TextIO:
    folder = _folder()
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        if folder.stat().st_uid == os.getuid():
            return (folder / f"{(gpu.uuid or gpu.name).replace('/', '-')}.lock").open("a+")
        reason = "belongs to another user"
    except OSError as error:
        reason = f"cannot be written ({error.strerror})"
    raise InputError(str(folder), f"is the folder of the GPUs' locks, and {reason}", f"Set {_RUNTIME} to another one")


def _folder() -> Path:
    runtime_dir = os.environ.get(_RUNTIME)
    return Path(runtime_dir) / "gspo" if runtime_dir else Path(tempfile.gettempdir()) / f"gspo-{os.getuid()}"
