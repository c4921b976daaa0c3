"""Starts a sandbox's supervisor at a level, inside namespaces that bubblewrap makes or beside the service.

It also chooses the packages that a supervisor imports for all its workers, by the text of the user's code.
"""

import asyncio
import json
import socket
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal

from gspo.common.modules_beside import top_names
from gspo.reward.sandbox.bubblewrap import (
    ENVIRONMENT,
    ETC,
    INSIDE,
    SHOWN,
    SYSTEM,
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

LevelName = Literal["bubblewrap", "landlock", "rlimits"]
# Weakest first.
LEVEL_NAMES: tuple[LevelName, ...] = ("rlimits", "landlock", "bubblewrap")
FILE_BYTES = 64 * 2**20
SCRATCH_BYTES = 64 * 2**20
# Workers that are being ended while others start in their place need scratch of their own.
_MORE_SLOTS = 2
NUM_FILES = 256
MAX_THREADS = 128
# Tasks of one user: those of all workers. The service's own user has many others, and their number changes.
_TASKS_OF_OWN_USER, _TASKS_OF_SHARED_USER = 1024, 16384
_PROGRAM = """
import sys
# -I leaves out PYTHONPATH, on which all packages may lie.
sys.path += [path for path in {paths!r} if path not in sys.path]
sys.path.insert(0, {folder!r})
from inside import supervisor
del sys.path[0]
supervisor.main()
"""
_SCRATCH_INSIDE = "/scratch"
_FACTS = ("/proc/cpuinfo", "/proc/meminfo", *SHOWN)
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
# Slow to import, and free of other effects: the supervisor, which is less confined, imports no others.
_KNOWN = """
    numpy scipy pandas sympy torch transformers sklearn math_verify latex2sympy2_extended regex rapidfuzz jsonschema
    pydantic nltk Levenshtein
"""
KNOWN = frozenset(_KNOWN.split())


@dataclass(frozen=True)
class ConfinementLevel:
    """A level of confinement for user code.

    Attributes:
        filter: seccomp's filter; empty for none.
        parts: Its parts on this machine.
        lacks: Why the machine does not support the stronger levels, each with a fix.
    """

    name: LevelName
    filter: bytes = b""
    parts: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.name} ({', '.join(self.parts)})"


async def start_supervisor(
    level: ConfinementLevel, reads: Sequence[Path], packages: Sequence[str], *, num_workers: int
) -> tuple[asyncio.subprocess.Process, socket.socket, Path | None]:
    """Start a supervisor at a level: its process, the socket of its commands, its scratch if that is on disk.

    Args:
        reads: Paths that user code may read beside Python and the installed packages.
        packages: Packages to import before user code runs.
        num_workers: Workers at a time; if scratch is in memory, each has a file system of its own.
    """
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    here.setblocking(False)
    wrapped = level.name == "bubblewrap"
    # As the kernel names it in lists of maps.
    scratch = None if wrapped else Path(tempfile.mkdtemp(prefix="gspo-scratch-")).resolve()
    uid = new_uid()
    if scratch is not None and uid:
        # Its user is known only once the supervisor has tried to become one; the folders in it are 0700.
        scratch.chmod(0o1777)
    places = [*python_places(), *reads]
    num_slots = num_workers + _MORE_SLOTS if wrapped else 0
    task = {
        "scratch": str(scratch or _SCRATCH_INSIDE),
        "uid": uid,
        "user_namespace": wrapped and bool(uid),
        "num_tasks": _TASKS_OF_OWN_USER if wrapped or uid else _TASKS_OF_SHARED_USER,
        "packages": list(packages),
        "num_slots": num_slots,
        "reads": [str(path) for path in (*map(Path, SYSTEM + ETC + _FACTS), *places)],
        "devices": _DEVICES,
        "num_files": NUM_FILES,
        "file_bytes": FILE_BYTES,
        "filter": bool(level.filter),
    }
    program = _PROGRAM.format(folder=str(INSIDE.parent), paths=site_folders())
    python = [sys.executable, "-I", "-X", "utf8", "-c", program]
    command = [*(_bubblewrap(places, uid, num_slots) if wrapped else []), *python, str(there.fileno())]
    try:
        process = await start_process(
            *command,
            env=ENVIRONMENT,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            pass_fds=(there.fileno(),),
        )
    finally:
        there.close()
    here.send(json.dumps(task).encode())
    if level.filter:
        here.send(level.filter)
    return process, here, scratch


def _bubblewrap(places: Sequence[Path], uid: int, num_slots: int) -> list[str]:
    """The command line before the program: no capabilities, a file system of the named paths, and scratch."""
    words = [*new_namespaces(uid), *system_folders(), *proc_and_dev(), "--remount-ro", "/dev"]
    for folder in (_SCRATCH_INSIDE, *(f"{_SCRATCH_INSIDE}/{slot}" for slot in range(num_slots))):
        words += memory_folder(folder, SCRATCH_BYTES)
    words += shown_paths([*map(Path, (*ETC, *SHOWN)), *places])
    return [*words, "--remount-ro", "/", "--chdir", "/", "--hostname", "sandbox", "--"]


class Importable:
    """The modules and packages at the paths that a function may read, and those that it takes along.

    Args:
        reads: The paths.
        carried: Paths of the others, from the folder of its file.

    Attributes:
        folders: Folders of modules.
        modules: Name -> file of single modules, and of packages.
    """

    def __init__(self, reads: Sequence[Path], carried: Iterable[str] = ()) -> None:
        packages = {path.name: path / "__init__.py" for path in reads if (path / "__init__.py").is_file()}
        self.folders = [path for path in reads if path.is_dir() and path.name not in packages]
        self.modules = packages | {path.stem: path for path in reads if path.suffix == ".py"}
        self._carried = top_names(carried)

    def __contains__(self, name: str) -> bool:
        places = (place for folder in self.folders for place in (folder / name, folder / f"{name}.py"))
        return name in self.modules or name in self._carried or any(place.exists() for place in places)


def packages_to_share(texts: Iterable[str], importable: Importable) -> list[str]:
    """Known packages that texts seem to import, in their order, but for those that its own files shadow.

    It compares lines and parses nothing, because the texts are not trusted. Workers do an import that it misses; an
    import in a comment costs time alone.
    """
    names = dict.fromkeys(name for text in texts for name in _imported(text))
    return [name for name in names if (top := name.partition(".")[0]) in KNOWN and top not in importable]


def _imported(text: str) -> Iterator[str]:
    for line in text.splitlines():
        words = line.replace(",", " , ").split()
        if words[:1] == ["from"] and len(words) > 2 and words[2] == "import":
            yield words[1]
        elif words[:1] == ["import"]:
            yield from (word for before, word in pairwise(words) if before in ("import", ","))
