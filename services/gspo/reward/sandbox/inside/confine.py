"""A process gives up what it will not need, for good: capabilities, files, signals, system calls, memory.

Landlock, seccomp and rlimits by direct calls of the kernel: no library of the standard ones knows them, and a filter
for seccomp comes ready-made from outside. Numbers are those of the kernel's headers, the same on every architecture.
"""

import ctypes
import os
import resource
import struct
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_ASK_VERSION = 1
_RULE_PATH_BENEATH = 1
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR, _TRUNCATE, _IOCTL_DEV = 1, 1 << 1, 1 << 2, 1 << 3, 1 << 14, 1 << 15
_MAKE_CHAR, _MAKE_SOCK, _MAKE_BLOCK = 1 << 6, 1 << 9, 1 << 11
_READ = _EXECUTE | _READ_FILE | _READ_DIR
# The rights on a file; the others are on a folder.
_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEV
_IN_SCRATCH = ((1 << 16) - 1) & ~(_EXECUTE | _MAKE_CHAR | _MAKE_SOCK | _MAKE_BLOCK | _IOCTL_DEV)
_ALL_TCP = 0b11
_SCOPES = 0b11  # abstract unix sockets, signals
SIGNAL_SCOPE_ABI, _TCP_ABI = 6, 4
# Rights over files that a kernel knows, by its Landlock version.
_RIGHTS_BY_ABI = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 4: (1 << 15) - 1}
_ALL_RIGHTS = (1 << 16) - 1

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38
_PR_SET_CHILD_SUBREAPER = 36
_PR_CAPBSET_DROP, _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL = 24, 47, 4
_SECCOMP_MODE_FILTER = 2
_CAPABILITY_VERSION_3 = 0x20080522
_CLONE_NEWUSER = 0x10000000
_MS_NOSUID, _MS_NODEV, _MS_REMOUNT = 2, 4, 32
_libc = ctypes.CDLL(None, use_errno=True)
_libc.prctl.argtypes = [ctypes.c_int, *[ctypes.c_ulong] * 4]


@dataclass(frozen=True)
class WorkerBounds:
    """The resource limits of a worker; bytes.

    Attributes:
        written_memory: `memory` limits writable pages, not address space, of which some languages reserve much more.
    """

    memory: int
    file: int
    num_files: int
    num_tasks: int
    written_memory: bool = False


def _checked(result: int, what: str) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
    return result


def landlock_abi() -> int:
    """The kernel's Landlock version; 0 if it has none or refuses it."""
    version: int = _libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), _ASK_VERSION)
    return max(version, 0)


class FileRules:
    """A Landlock ruleset, made once and completed for each worker with its own scratch.

    Args:
        reads: Files and folders that may be read and executed; missing ones are left out.
        devices: Files that may be read and written.
    """

    def __init__(self, reads: Iterable[Path], devices: Iterable[Path]) -> None:
        self.abi = landlock_abi()
        self._rights = _RIGHTS_BY_ABI.get(self.abi, _ALL_RIGHTS)
        self._reads, self._devices = [*reads], [*devices]

    def apply(self, scratch: Path) -> None:
        """Restrict this process, from now on and for good, to its files, no TCP, and signals to itself."""
        if self.abi == 0:
            return
        attributes = [self._rights]
        attributes += [_ALL_TCP] if self.abi >= _TCP_ABI else []
        attributes += [_SCOPES] if self.abi >= SIGNAL_SCOPE_ABI else []
        packed = struct.pack(f"{len(attributes)}Q", *attributes)
        ruleset = _checked(_libc.syscall(_CREATE_RULESET, packed, ctypes.c_size_t(len(packed)), 0), "landlock")
        try:
            for path in self._reads:
                self._allow(ruleset, path, _READ)
            for path in self._devices:
                self._allow(ruleset, path, _READ_FILE | _WRITE_FILE)
            self._allow(ruleset, Path("/proc/self"), _READ_FILE | _READ_DIR)
            self._allow(ruleset, scratch, _IN_SCRATCH)
            no_new_privileges()
            _checked(_libc.syscall(_RESTRICT_SELF, ruleset, 0), "landlock")
        finally:
            os.close(ruleset)

    def _allow(self, ruleset: int, path: Path, rights: int) -> None:
        try:
            place = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:
            return  # not on this machine
        try:
            rights &= self._rights if path.is_dir() else self._rights & _OF_FILES
            rule = struct.pack("=Qi", rights, place)
            _checked(_libc.syscall(_ADD_RULE, ruleset, _RULE_PATH_BENEATH, rule, 0), f"landlock: {path}")
        finally:
            os.close(place)


def no_new_privileges() -> None:
    """No program that is started may gain rights; Landlock and seccomp ask for it."""
    _checked(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")


def load_filter(program: bytes) -> None:
    """Load a seccomp filter: an array of struct sock_filter."""
    no_new_privileges()
    instructions = ctypes.create_string_buffer(program, len(program))
    header = ctypes.create_string_buffer(struct.pack("HP", len(program) // 8, ctypes.addressof(instructions)))
    _checked(_libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.addressof(header), 0, 0), "seccomp")


def limit(bounds: WorkerBounds) -> None:
    """Set the rlimits of this process; they cannot be raised again."""
    for name, value in (
        (resource.RLIMIT_DATA if bounds.written_memory else resource.RLIMIT_AS, bounds.memory),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, bounds.file),
        (resource.RLIMIT_NOFILE, bounds.num_files),
        (resource.RLIMIT_NPROC, bounds.num_tasks),
        (resource.RLIMIT_MSGQUEUE, 0),
        (resource.RLIMIT_SIGPENDING, 256),
    ):
        hard = resource.getrlimit(name)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(name, (value, value))


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent has ended, so that none can leave unseen."""
    _checked(_libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "subreaper")


def die_with_parent(parent: int) -> None:
    """End by SIGKILL when the process `parent` ends."""
    _checked(_libc.prctl(_PR_SET_PDEATHSIG, 9, 0, 0, 0), "pdeathsig")
    if os.getppid() != parent:
        os._exit(0)  # it ended before the line above


def hide() -> None:
    """Close this process to others of the same user: its /proc entries become root's, ptrace is refused."""
    _checked(_libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0), "dumpable")


def show() -> None:
    """Own the entries of /proc/self again: a worker may look at itself."""
    _checked(_libc.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0), "dumpable")


def limit_files(folder: str, num_files: int) -> None:
    """Let a file system in memory, mounted at a folder, have no more files and folders.

    Raises:
        OSError: This process lacks CAP_SYS_ADMIN in the namespace.
    """
    flags = _MS_REMOUNT | _MS_NOSUID | _MS_NODEV
    _checked(_libc.mount(None, folder.encode(), None, ctypes.c_ulong(flags), f"nr_inodes={num_files}".encode()), folder)


def be_first_to_go() -> None:
    """If the machine runs out of memory, the kernel ends this process first; needs a writable /proc."""
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def become(uid: int) -> None:
    """Root becomes another user, for good; needs CAP_SETUID and CAP_SETGID."""
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def enter_user_namespace(inner_id: int | None = None) -> None:
    """A user namespace of its own, in which only this user exists.

    Args:
        inner_id: Id of the user and of its group there; by default the same as outside.
    """
    uid, gid = os.geteuid(), os.getegid()
    _checked(_libc.unshare(_CLONE_NEWUSER), "unshare")
    show()  # its own /proc/self is not writable after a change of user
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{uid if inner_id is None else inner_id} {uid} 1")
    Path("/proc/self/gid_map").write_text(f"{gid if inner_id is None else inner_id} {gid} 1")


def take_own_user(uid: int, places: Iterable[Path], *, namespace: bool) -> bool:
    """Root becomes the sandbox's user, if that one can read `places`; whether it has.

    Args:
        uid: 0 where the process is not root, and stays what it is.
        namespace: Enter a user namespace, in which there is no other user.
    """
    if not uid or os.geteuid() != 0 or not _readable_by(uid, places):
        return False
    try:
        become(uid)
    except OSError:  # no such user may exist in a container's user namespace
        return False
    if namespace:  # root cannot be mapped into one without privileges
        enter_user_namespace()
    return True


def _readable_by(uid: int, places: Iterable[Path]) -> bool:
    """Whether another user can reach all these places; tried by a process that becomes that user."""
    pid = os.fork()
    if pid == 0:
        with suppress(OSError):
            become(uid)
            os._exit(0 if all(os.access(place, os.R_OK) for place in places if _exists(place)) else 1)
        os._exit(1)
    return os.waitpid(pid, 0)[1] == 0


def _exists(place: Path) -> bool:
    try:
        return place.exists()
    except PermissionError:
        return True


def drop_capabilities() -> None:
    """Give up every capability, also those that a program of root would get back."""
    _libc.prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    for number in range(64):
        _libc.prctl(_PR_CAPBSET_DROP, number, 0, 0, 0)
    header = struct.pack("Ii", _CAPABILITY_VERSION_3, 0)
    _checked(_libc.capset(header, bytes(24)), "capset")
