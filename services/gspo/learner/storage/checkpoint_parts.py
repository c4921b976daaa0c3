"""The parts of a checkpoint that is written beside training: each rank writes its own, and rank zero waits for all.

The ranks train on meanwhile, so they agree through the disk: a rank that has written its files adds a note of their
sizes.
"""

import contextlib
import json
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Self

from gspo.common.host.durable_write import replace_file
from gspo.learner.storage.training_states import StatesFile

_POLL_S = 0.05


class GivenUpError(Exception):
    """A checkpoint is not finished, because the process ends."""


class RankPart:
    """One rank's part of a checkpoint, in host memory until it is on the disk.

    Args:
        files: All of them are copied at once.
    """

    def __init__(self, rank: int, files: Iterable[StatesFile]) -> None:
        self._rank, self._files = rank, deque(files)
        self._sizes: dict[str, int] = {}

    def write(self, folder: Path) -> None:
        """Write the files and then the note. Called again after an error, it continues with the file that failed."""
        while self._files:
            file = self._files[0]
            file.write(folder)
            self._sizes[file.name] = (folder / file.name).stat().st_size
            self._files.popleft()
        replace_file(_note(folder, self._rank), json.dumps(self._sizes).encode())


class BesideThread:
    """The thread in which a rank other than zero writes its parts beside training, or makes its shares of versions."""

    def __init__(self, name: str) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        self._working: Future[None] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._executor.shutdown()

    def begin(self, work: Callable[[], object]) -> None:
        """Begin some work; the one before is over, or rank zero would ask for no other."""
        self._working = self._executor.submit(_without_result, work)

    def raise_error(self) -> None:
        """Raise what ended the work, if anything did."""
        if self._working is not None and self._working.done():
            self._working.result()


def _without_result(work: Callable[[], object]) -> None:
    # A future would keep it.
    work()


def wait_for_parts(folder: Path, num_ranks: int, timeout_s: float, is_given_up: Callable[[], bool]) -> None:
    """Wait until every rank's files are whole in a folder, and remove their notes.

    Raises:
        TimeoutError: Nothing was written for so long.
        GivenUpError: The process ends.
    """
    num_bytes, deadline = -1, 0.0
    while missing := [rank for rank in range(num_ranks) if not _is_written(folder, rank)]:
        if (present := _num_bytes(folder)) != num_bytes:
            num_bytes, deadline = present, time.monotonic() + timeout_s
        if is_given_up():
            raise GivenUpError(f"rank {missing[0]} has not written its part of the checkpoint in {folder}")
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"rank {missing[0]} has not written its part of the checkpoint in {folder}, and nothing was written "
                f"there for learner.rank_timeout_s ({timeout_s:g} s); its own reason is in its log"
            )
        time.sleep(_POLL_S)
    for rank in range(num_ranks):
        _note(folder, rank).unlink()


def _note(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05d}.json"


def _is_written(folder: Path, rank: int) -> bool:
    """Whether a rank's note is there, and every file of it at its full size, as this host sees the disk."""
    try:
        sizes: dict[str, int] = json.loads(_note(folder, rank).read_bytes())
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except FileNotFoundError:
        return False


def _num_bytes(folder: Path) -> int:
    total = 0
    for file in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):  # a note loses its temporary name
            total += file.stat().st_size
    return total
