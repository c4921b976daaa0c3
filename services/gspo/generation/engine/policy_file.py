"""A file in memory with whole policies in slots, which the generators of a host have in common.

One of them fills a slot, and all load from it. The process that started them has the file open, so a policy outlives
the generator that took it. A generator locks a slot for itself to fill it, and with others to read it. The kernel
releases the locks of a process that ends, so a killed generator keeps no slot. `staging.py` chooses the slots.
"""

import fcntl
import mmap
import os
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import structlog

log = structlog.get_logger()

_UNIT = mmap.ALLOCATIONGRANULARITY
# struct flock, for locks of an open file description, which the kernel keeps for each byte.
_FLOCK = "hhqqq"
EMPTY, FILLING, WHOLE = range(3)
# The lock of the choice of a slot, and one that is only tried.
_CHOICE, _TRIAL = 1 << 40, 1 << 41


class PolicyFile:
    """Slots of one size.

    Args:
        path: The file, of other generators too, or a folder in memory for a file of each layout; None makes one for
            this process. So does a file of another layout, and one that this process cannot open or lock.
        layout: Identifies what a slot has: a hexadecimal number.
        policy_bytes: Of the elements of a policy.
        num_tensors: Of a policy, for their fingerprints.
    """

    def __init__(self, path: Path | None, layout: str, policy_bytes: int, num_tensors: int) -> None:
        self._note = np.dtype(
            [
                ("state", "u1"),
                ("is_start", "u1"),
                ("progress_s", "<f8"),
                ("digest", "S80"),
                ("present", "u1", (num_tensors,)),
                ("fingerprints", "<u8", (num_tensors, 2)),
            ]
        )
        self._policy_bytes = -(-max(policy_bytes, 1) // _UNIT) * _UNIT
        self._slot_bytes = self._policy_bytes + -(-self._note.itemsize // _UNIT) * _UNIT
        common = _opened(path, f"{layout} {self._slot_bytes}\n".encode()) if path is not None else None
        self._is_common = common is not None
        self._file = os.memfd_create("gspo-policies") if common is None else common

    def __len__(self) -> int:
        """Slots that were ever used."""
        return max(os.fstat(self._file).st_size - _UNIT, 0) // self._slot_bytes

    @property
    def path(self) -> str:
        """By which other processes open the file, as long as this one has it open."""
        return f"/proc/{os.getpid()}/fd/{self._file}"

    @property
    def used_bytes(self) -> int:
        """Memory that the file has."""
        return os.fstat(self._file).st_blocks * 512

    def offset(self, slot: int) -> int:
        """Where the policy of a slot begins in the file."""
        return _UNIT + slot * self._slot_bytes

    def has_memory(self, slot: int) -> bool:
        """Whether a slot's elements have memory already."""
        begin = self.offset(slot)
        try:
            return os.lseek(self._file, begin, os.SEEK_DATA) < begin + self._policy_bytes
        except OSError:  # behind the last data
            return False

    def reserve(self, slot: int) -> None:
        """Give a slot its memory.

        Raises:
            OSError: There is none. Without this, a write would end the process by SIGBUS.
        """
        os.posix_fallocate(self._file, self.offset(slot), self._slot_bytes)

    def map_policy(self, slot: int) -> mmap.mmap:
        """A slot's elements."""
        return mmap.mmap(self._file, self._policy_bytes, offset=self.offset(slot))

    def map_note(self, slot: int) -> np.void:
        """A description of the slot's policy, by field. Only who has seized the slot writes to it."""
        size = self._slot_bytes - self._policy_bytes
        memory = mmap.mmap(self._file, size, offset=self.offset(slot) + self._policy_bytes)
        note: np.void = np.frombuffer(memory, self._note, 1)[0]
        return note

    def share(self, slot: int) -> bool:
        """Lock a slot for reading; whether no other generator fills it. It also ends this process' own filling."""
        return self._lock(slot, fcntl.F_RDLCK)

    def seize(self, slot: int) -> bool:
        """Lock a slot for writing; whether no other generator reads or fills it."""
        return self._lock(slot, fcntl.F_WRLCK)

    def release(self, slot: int) -> None:
        """Give up this process' lock."""
        self._lock(slot, fcntl.F_UNLCK)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Two generators that choose a slot do so one after another, unless the first stands still for a second."""
        deadline = time.monotonic() + 1.0
        while not self._lock(_CHOICE, fcntl.F_WRLCK) and time.monotonic() < deadline:
            time.sleep(0.001)
        try:
            yield
        finally:
            self._lock(_CHOICE, fcntl.F_UNLCK)

    def extend(self) -> None:
        """Have one more slot, without memory yet."""
        os.ftruncate(self._file, self.offset(len(self) + 1))

    def drop(self, slot: int) -> None:
        """Give the memory of a seized slot back."""
        with mmap.mmap(self._file, self._slot_bytes, offset=self.offset(slot)) as memory:
            memory.madvise(mmap.MADV_REMOVE)

    def close(self) -> None:
        """Give up all locks of this process; the maps of it stay until their arrays go."""
        # A map has the file open too, so the kernel would keep the locks for it.
        if self._is_common:
            _set_lock(self._file, 0, fcntl.F_UNLCK, num_bytes=0)
        os.close(self._file)

    def _lock(self, slot: int, kind: int) -> bool:
        if self._is_common:
            try:
                _set_lock(self._file, slot, kind)
            except (BlockingIOError, PermissionError):
                return False
        return True


def _opened(path: Path, layout: bytes) -> int | None:
    """The file in common; None if it has another layout, or cannot be opened or locked here."""
    try:
        file = _file_of(path, layout) if path.is_dir() else os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        log.warning("policies_apart", reason=f"{path}: {error.strerror}")
        return None
    try:
        # Some kernels in user space have no such locks.
        _set_lock(file, _TRIAL, fcntl.F_RDLCK)
        if not os.pread(file, len(layout), 0):
            os.pwrite(file, layout, 0)
        if os.pread(file, len(layout), 0) == layout:
            return file
        reason = "it has policies of another model"
    except OSError as error:
        reason = f"it cannot be locked: {error.strerror}"
    os.close(file)
    log.warning("policies_apart", reason=f"{path}: {reason}")
    return None


def _file_of(folder: Path, layout: bytes) -> int:
    """The file of this layout in a folder. Files of other models, of which no generator loads any more, are deleted."""
    name = layout.split()[0].decode()
    for other in folder.iterdir():
        if other.name != name:
            with suppress(OSError), other.open("r+b") as file:
                _set_lock(file.fileno(), 0, fcntl.F_WRLCK, num_bytes=0)
                other.unlink()
    return os.open(folder / name, os.O_RDWR | os.O_CLOEXEC | os.O_CREAT, 0o600)


def _set_lock(file: int, begin: int, kind: int, num_bytes: int = 1) -> None:
    """Lock some bytes, or with 0 all from `begin` on.

    Raises:
        OSError: Another process has locked one of them, or this kernel has no such locks.
    """
    fcntl.fcntl(file, fcntl.F_OFD_SETLK, struct.pack(_FLOCK, kind, os.SEEK_SET, begin, num_bytes, 0))
