"""The parts of every sandbox: words of bubblewrap, paths that user code may read, its user and its environment.

launch.py makes the sandboxes of reward functions and environments of it, program_sandbox.py those of agents and MCP
servers. It chooses nothing that only one of them may do.
"""

import asyncio
import os
import signal
import sys
import sysconfig
from collections.abc import Iterable
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

from gspo.reward.sandbox import inside

INSIDE = Path(inside.__file__).parent
# Paths from which a Linux system loads programs and libraries; none has a user's data.
SYSTEM = ("/usr", "/bin", "/lib", "/lib32", "/lib64", "/libx32", "/sbin", "/opt/rh")
ETC = ("/etc/ld.so.cache", "/etc/localtime", "/etc/alternatives", "/etc/mime.types")
SHOWN = ("/sys/devices/system/cpu",)
_SETTINGS = "/proc/sys"
# The environment of user code: no variable of the service's, and one thread for each numerical library.
ENVIRONMENT = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8"} | dict.fromkeys(
    ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS"), "1"
)
# systemd's range for users that exist only while a service runs; no other user is in it.
_FIRST_UID, _NUM_UIDS = 61184, 4336
_numbers = count()


def new_uid() -> int:
    """A user for one sandbox, if this process is root; else 0."""
    return _FIRST_UID + (os.getpid() * 64 + next(_numbers)) % _NUM_UIDS if os.geteuid() == 0 else 0


def python_places() -> list[Path]:
    """Folders of Python and of the installed packages, none within another of them."""
    places = {Path(path) for path in (sys.prefix, sys.base_prefix, *site_folders(), str(INSIDE))}
    places |= {Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")}
    # A virtual environment's python is a link, maybe through several folders.
    places.add(Path(sys.executable).resolve().parent.parent)
    return [path for path in sorted(places) if not any(path.is_relative_to(other) for other in places - {path})]


def site_folders() -> list[str]:
    """Folders of installed packages."""
    return [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]


def new_namespaces(uid: int, *capabilities: str) -> list[str]:
    """The first words: new namespaces, and no capability but those that the program gives up itself.

    As root the program enters a user and a user namespace of its own: bubblewrap's own namespace maps to root. Without
    privileges a program with capabilities enters one too, and bubblewrap does that for another program.

    Args:
        uid: User of `new_uid`.
        capabilities: Further ones, within the new namespaces.
    """
    words = ["bwrap", "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"]
    words += ["--die-with-parent", "--cap-drop", "ALL"]
    if uid:
        capabilities += ("CAP_SETUID", "CAP_SETGID")
    else:
        inner_id = "0" if capabilities else "65534"
        words += ["--unshare-user", "--uid", inner_id, "--gid", inner_id]
        capabilities += ("CAP_SETFCAP",) if capabilities else ()  # to map 0 in another user namespace
    for name in capabilities:
        words += ["--cap-add", name]
    return words


async def start_process(*command: str, **keys: Any) -> asyncio.subprocess.Process:
    """Start the first process of a sandbox, in a session of its own. A cancellation ends the whole session.

    asyncio would kill the first process alone. Another one of bubblewrap's waits for that, and would stay.

    Args:
        keys: Arguments of asyncio.create_subprocess_exec.

    Raises:
        OSError: It does not start.
    """
    starting = asyncio.ensure_future(asyncio.create_subprocess_exec(*command, cwd="/", start_new_session=True, **keys))
    try:
        return await asyncio.shield(starting)
    except asyncio.CancelledError:
        await asyncio.wait({starting})
        if starting.exception() is None:
            process = starting.result()
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        raise


def system_folders() -> list[str]:
    """The words that show the system's programs and libraries."""
    words: list[str] = []
    for name in SYSTEM:
        path = Path(name)
        if path.is_symlink():
            words += ["--symlink", str(path.readlink()), name]
        elif path.is_dir():
            words += ["--ro-bind", name, name]
    return words


def proc_and_dev() -> list[str]:
    """The words for /proc and /dev.

    The kernel lets its root change settings below /proc/sys also where it has no capability, and bubblewrap protects
    them only from a root with one.
    """
    protected = ["--ro-bind", _SETTINGS, _SETTINGS] if os.access(f"{_SETTINGS}/kernel/core_pattern", os.W_OK) else []
    return ["--proc", "/proc", *protected, "--dev", "/dev"]


def memory_folder(folder: str, size_bytes: int) -> list[str]:
    """The words for a folder in memory that every user may write to."""
    return ["--size", str(size_bytes), "--perms", "1777", "--tmpfs", folder]


def shown_paths(paths: Iterable[Path]) -> list[str]:
    """The words that show paths outside of the system's folders, read-only; missing ones are left out."""
    words: list[str] = []
    for path in paths:
        if not any(path.is_relative_to(name) for name in SYSTEM):
            for parent in reversed(path.parents[:-1]):  # without it bubblewrap makes them for root alone
                words += ["--perms", "0755", "--dir", str(parent)]
            words += ["--ro-bind-try", str(path), str(path)]
    return words
