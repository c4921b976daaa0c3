"""The system calls of user code: a seccomp filter, compiled by libseccomp into bytes that the sandbox loads.

A call of ALLOWED works. A call of REFUSED fails with EPERM, which users see as `forbidden`. Any other, also one of a
later kernel, fails with ENOSYS, as if the kernel did not have it.

User code is one process with threads, which share their descriptors. It makes no process and starts no program. It
opens no socket but a connected pair of stream sockets, because event loops wake themselves with one. A timer sends
SIGALRM, SIGVTALRM or SIGPROF alone, and none of them can wake a stopped process. Landlock leaves mode, times,
attributes, watching and, on older kernels, length of a file open to its owner; the calls for these are refused too.
"""

import errno
import socket
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

_CLOEXEC, _INHERIT, _NOT_BLOCKING, _READABLE = 0x5451, 0x5450, 0x5421, 0x541B  # ioctl: FIOCLEX, FIONCLEX, ...
_TERMINAL, _WINDOW = 0x5401, 0x5413  # from isatty and the libraries of print
_DUP_CLOEXEC, _SET_PIPE, _GET_PIPE = 1030, 1031, 1032
# Calls with many commands: name, the argument with the command, those that work, and those that are refused; any other
# fails with ENOSYS. A worker must not change that it ends with its supervisor (prctl 1) and is visible to it (prctl 4).
# The owner of a file (fcntl 8 and 15, ioctl 0x8901 and 0x8902) is sent a signal, of any number (fcntl 10).
_BY_COMMAND: tuple[tuple[str, int, tuple[int, ...], tuple[int, ...]], ...] = (
    ("prctl", 0, (2, 3, 7, 15, 16, 21, 23, 29, 30, 36, 37, 38, 39, 40, 41, 42, 47), (1, 4, 22, 0x53564D41)),
    ("fcntl", 1, (*range(8), 9, 11, 16, 36, 37, 38, _DUP_CLOEXEC, _GET_PIPE, 1034), (8, 10, 15, 1026, _SET_PIPE)),
    ("ioctl", 1, (_TERMINAL, _WINDOW, _READABLE, _NOT_BLOCKING, _INHERIT, _CLOEXEC), (0x8901, 0x8902)),
)
# Refused where no process can count kernel memory: locks on parts of files (fcntl 6, 7, 37, 38), and another number for
# an open file (fcntl 0 and 1030). Epoll has a watch for each number of a file, so these are few then.
_UNCOUNTED = "dup dup2 dup3"
_UNCOUNTED_COMMANDS = (0, 6, 7, 37, 38, _DUP_CLOEXEC)
# CLONE_THREAD, CLONE_FS, CLONE_FILES: a thread, without descriptors or a working directory of its own.
_THREAD_FLAG, _FILES_FLAG = 0x00010000, 0x00000400
_FLAGS_OF_A_THREAD = (_THREAD_FLAG, 0x00000200, _FILES_FLAG)
_THREAD = sum(_FLAGS_OF_A_THREAD)
_UNSHARE_FILES = 2  # of close_range
_OUT_OF_BAND = 1  # MSG_OOB
_NEW_NAMESPACES = 0x7E020080  # CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET, NEWTIME
_SOCKET_TYPE = 0xF  # without SOCK_CLOEXEC and SOCK_NONBLOCK

ALLOWED = """
    read write readv writev pread64 pwrite64 preadv pwritev preadv2 pwritev2 lseek close dup dup2 dup3
    pipe pipe2 fsync fdatasync ftruncate fallocate fadvise64 readahead sync_file_range sendfile
    copy_file_range
    open openat openat2 creat access faccessat faccessat2 stat lstat fstat newfstatat statx statfs fstatfs
    getdents getdents64 getcwd chdir fchdir readlink readlinkat mkdir mkdirat rmdir unlink unlinkat rename renameat
    renameat2 link linkat symlink symlinkat umask
    mmap munmap mremap mprotect madvise msync mincore brk mlock mlock2 munlock mlockall munlockall membarrier
    get_mempolicy set_mempolicy pkey_alloc pkey_free pkey_mprotect cachestat
    poll ppoll select pselect6 epoll_create epoll_create1 epoll_ctl epoll_wait epoll_pwait epoll_pwait2
    eventfd eventfd2 timerfd_create timerfd_settime timerfd_gettime signalfd signalfd4
    recvfrom recvmsg recvmmsg shutdown getsockname getpeername getsockopt
    rt_sigaction rt_sigprocmask rt_sigreturn rt_sigpending rt_sigsuspend rt_sigtimedwait sigaltstack pause
    restart_syscall alarm getitimer setitimer
    nanosleep clock_nanosleep clock_gettime clock_getres gettimeofday time times
    futex futex_waitv set_robust_list get_robust_list set_tid_address rseq arch_prctl
    exit exit_group wait4 waitid sched_yield sched_getaffinity sched_getparam sched_getscheduler
    sched_get_priority_max sched_get_priority_min sched_rr_get_interval getcpu getpriority
    getpid gettid getppid getpgid getpgrp getsid getuid geteuid getgid getegid getgroups getresuid getresgid
    getrlimit getrusage sysinfo uname getrandom capget
"""
SIGNALS = "kill tkill tgkill"
REFUSED = """
    socket connect bind listen accept accept4 sendmsg sendmmsg
    fork vfork execve execveat ptrace process_vm_readv process_vm_writev process_madvise process_mrelease kcmp
    pidfd_open pidfd_getfd pidfd_send_signal rt_sigqueueinfo rt_tgsigqueueinfo
    unshare setns mount umount2 pivot_root chroot move_mount open_tree fsopen fsconfig fsmount fspick mount_setattr
    memfd_create memfd_secret shmget shmat shmctl shmdt semget semop semtimedop semctl msgget msgsnd msgrcv msgctl
    mq_open mq_unlink mq_timedsend mq_timedreceive mq_notify mq_getsetattr
    io_uring_setup io_uring_enter io_uring_register io_setup io_submit io_getevents io_destroy io_cancel
    bpf perf_event_open userfaultfd add_key request_key keyctl fanotify_init fanotify_mark
    name_to_handle_at open_by_handle_at mknod mknodat chown fchown lchown fchownat
    truncate chmod fchmod fchmodat fchmodat2 utime utimes utimensat futimesat
    getxattr lgetxattr fgetxattr listxattr llistxattr flistxattr
    inotify_init inotify_init1 inotify_add_watch inotify_rm_watch splice tee vmsplice
    setxattr lsetxattr fsetxattr removexattr lremovexattr fremovexattr
    setuid setgid setreuid setregid setresuid setresgid setgroups setfsuid setfsgid capset personality
    setpgid setsid setpriority ioprio_set sched_setaffinity sched_setparam sched_setscheduler sched_setattr
    mbind migrate_pages move_pages setrlimit
    init_module finit_module delete_module kexec_load kexec_file_load reboot swapon swapoff acct quotactl quotactl_fd
    settimeofday clock_settime clock_adjtime adjtimex sethostname setdomainname syslog vhangup iopl ioperm
    lookup_dcookie nfsservctl
    setsockopt flock timer_create timer_settime timer_gettime timer_getoverrun timer_delete
    landlock_create_ruleset landlock_add_rule landlock_restrict_self seccomp
"""
# Further calls of agents. They start programs, use sockets (their namespaces reach relays alone), signal their own
# processes and change their own files. Namespaces, traces, mounts and memory without a process stay refused: by
# vmsplice a pipe holds pages that its process has given up.
_SOCKETS = """
    connect bind listen accept accept4 sendto sendmsg sendmmsg socketpair splice tee
"""
_PROCESSES = """
    fork vfork execve execveat setpgid setsid setpriority prlimit64 setrlimit prctl
    kill tkill tgkill pidfd_open pidfd_send_signal rt_sigqueueinfo rt_tgsigqueueinfo
    sched_setaffinity sched_setparam sched_setscheduler sched_setattr sched_getattr
"""
_FILES = """
    truncate chmod fchmod fchmodat fchmodat2 chown fchown lchown fchownat mknod mknodat
    utime utimes utimensat futimesat flock inotify_init inotify_init1 inotify_add_watch inotify_rm_watch
    getxattr lgetxattr fgetxattr listxattr llistxattr flistxattr
"""
_TIMERS = "timer_create timer_settime timer_gettime timer_getoverrun timer_delete"
OF_AGENTS = _SOCKETS + _PROCESSES + _FILES + _TIMERS + " seccomp"
# To agents the kernel seems to have no Landlock: rules are kernel memory without a bound that anybody could measure.
_LANDLOCK = ("landlock_create_ruleset", "landlock_add_rule", "landlock_restrict_self")
# fcntl: commands below the first number work. Of the others these do; a lease (1024) would hold up everybody who opens
# the file, and F_NOTIFY (1026) signals.
_FIRST_OF_LINUX, _OF_LINUX, _LEASES = 1024, (1025, *range(1028, 1040)), (1024, 1026)
_TYPES_INTO_A_TERMINAL = 0x5412  # ioctl TIOCSTI
# SO_SNDBUF and SO_RCVBUF, both below 16. The FORCE variants, 32 and 33, need a capability.
_BUFFER_OPTIONS = (socket.SO_SNDBUF, socket.SO_RCVBUF)
_MAX_PROTOCOL = 31


class FilterUnavailableError(Exception):
    """The machine has no libseccomp, or one without this architecture's calls."""


def filter_bytes(*, signals: bool, counted: bool) -> bytes:
    """The filter of reward functions and environments, as an array of `struct sock_filter`.

    Args:
        signals: Whether kill is let through, because something else keeps a signal from reaching other processes.
        counted: Whether the supervisor can count the locks and watches of a worker.

    Raises:
        FilterUnavailableError: libseccomp is missing or refuses a rule.
    """
    return _compiled(lambda seccomp: _rules(seccomp, signals, counted))


def agent_filter_bytes() -> bytes:
    """The filter of agents, which have namespaces of their own; the same form.

    Raises:
        FilterUnavailableError: libseccomp is missing or refuses a rule.
    """
    return _compiled(_agent_rules)


def _compiled(rules: Callable[[Any], Any]) -> bytes:
    try:
        import pyseccomp as seccomp  # raises at import where the machine has no libseccomp
    except (ImportError, RuntimeError, OSError) as error:
        raise FilterUnavailableError(f"libseccomp cannot be loaded ({error})") from error
    try:
        program = rules(seccomp)
        with tempfile.TemporaryFile() as file:
            program.export_bpf(file)
            file.seek(0)
            return file.read()
    except OSError as error:
        raise FilterUnavailableError(f"libseccomp refuses the filter ({error})") from error


def _agent_rules(seccomp: Any) -> Any:
    program = seccomp.SyscallFilter(seccomp.ERRNO(errno.ENOSYS))
    refuse = seccomp.ERRNO(errno.EPERM)
    allowed = [*_known(seccomp, ALLOWED + OF_AGENTS)]
    for name in allowed:
        program.add_rule(seccomp.ALLOW, name)
    for name in _known(seccomp, REFUSED):
        if name not in (*allowed, *_LANDLOCK, "socket", "setsockopt"):
            program.add_rule(refuse, name)
    # Of TCP and UDP: the buffers of SCTP, MPTCP and others are not measured (memory_watch.py).
    common = seccomp.Arg(2, seccomp.MASKED_EQ, 0xFFFFFFFF & ~_MAX_PROTOCOL, 0)
    for family in (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6):
        program.add_rule(seccomp.ALLOW, "socket", seccomp.Arg(0, seccomp.EQ, family), common)
    _add_socket_options(seccomp, program)
    _add_tables_of_descriptors(seccomp, program, refuse)
    program.add_rule(refuse, "ioctl", seccomp.Arg(1, seccomp.MASKED_EQ, 0xFFFFFFFF, _TYPES_INTO_A_TERMINAL))
    program.add_rule(seccomp.ALLOW, "ioctl", seccomp.Arg(1, seccomp.NE, _TYPES_INTO_A_TERMINAL))
    return program


def _add_tables_of_descriptors(seccomp: Any, program: Any, refuse: Any) -> None:
    """Processes and threads, but no namespace, and no thread with descriptors of its own, which are not measured."""

    def low(place: int, mask: int, value: int) -> Any:
        return seccomp.Arg(place, seccomp.MASKED_EQ, mask, value)

    for flag in _bits(_NEW_NAMESPACES):
        program.add_rule(refuse, "clone", low(0, flag, flag))
    program.add_rule(refuse, "clone", low(0, _THREAD_FLAG | _FILES_FLAG, _THREAD_FLAG))
    for mask, value in ((_THREAD_FLAG, 0), (_THREAD_FLAG | _FILES_FLAG, _THREAD_FLAG | _FILES_FLAG)):
        program.add_rule(seccomp.ALLOW, "clone", low(0, _NEW_NAMESPACES | mask, value))
    program.add_rule(seccomp.ALLOW, "close_range", low(2, _UNSHARE_FILES, 0))
    program.add_rule(refuse, "close_range", low(2, _UNSHARE_FILES, _UNSHARE_FILES))
    program.add_rule(seccomp.ALLOW, "fcntl", low(1, 0xFFFFFFFF & ~(_FIRST_OF_LINUX - 1), 0))
    for commands, action in ((_OF_LINUX, seccomp.ALLOW), (_LEASES, refuse)):
        for command in commands:
            program.add_rule(action, "fcntl", low(1, 0xFFFFFFFF, command))


def _add_socket_options(seccomp: Any, program: Any) -> None:
    """Every option works, but for the sizes of buffers: setting one succeeds without an effect.

    The kernel looks at 32 bits of level and option, so the rules do too.
    """

    def low(place: int, mask: int, value: int) -> Any:
        return seccomp.Arg(place, seccomp.MASKED_EQ, mask, value)

    of_socket = low(1, 0xFFFFFFFF, socket.SOL_SOCKET)
    for bit in _bits(0xFFFFFFFF):
        program.add_rule(seccomp.ALLOW, "setsockopt", low(1, bit, ~socket.SOL_SOCKET & bit))
    for bit in _bits(0xFFFFFFF0):
        program.add_rule(seccomp.ALLOW, "setsockopt", of_socket, low(2, bit, bit))
    for number in range(16):
        action = seccomp.ERRNO(0) if number in _BUFFER_OPTIONS else seccomp.ALLOW
        program.add_rule(action, "setsockopt", of_socket, low(2, 0xFFFFFFFF, number))


def _bits(mask: int) -> Iterator[int]:
    return (1 << number for number in range(mask.bit_length()) if mask >> number & 1)


def _rules(seccomp: Any, signals: bool, counted: bool) -> Any:
    program = seccomp.SyscallFilter(seccomp.ERRNO(errno.ENOSYS))
    refuse = seccomp.ERRNO(errno.EPERM)
    arg, masked, equal = seccomp.Arg, seccomp.MASKED_EQ, seccomp.EQ
    allow = seccomp.ALLOW
    refused = REFUSED + ("" if signals else SIGNALS) + ("" if counted else _UNCOUNTED)
    for name in _known(seccomp, ALLOWED + (SIGNALS if signals else "")):
        if name not in refused.split():
            program.add_rule(allow, name)
    for name in _known(seccomp, refused):
        program.add_rule(refuse, name)
    # A thread, but no process and no namespace. clone3 hides its flags behind a pointer: ENOSYS makes glibc take clone.
    program.add_rule(allow, "clone", arg(0, masked, _THREAD | _NEW_NAMESPACES, _THREAD))
    for flag in _FLAGS_OF_A_THREAD:
        program.add_rule(refuse, "clone", arg(0, masked, flag, 0))
    program.add_rule(allow, "close_range", arg(2, masked, _UNSHARE_FILES, 0))
    program.add_rule(refuse, "close_range", arg(2, masked, _UNSHARE_FILES, _UNSHARE_FILES))
    program.add_rule(allow, "sendto", arg(3, masked, _OUT_OF_BAND, 0))
    program.add_rule(refuse, "sendto", arg(3, masked, _OUT_OF_BAND, _OUT_OF_BAND))
    stream = arg(1, masked, _SOCKET_TYPE, socket.SOCK_STREAM)
    program.add_rule(allow, "socketpair", arg(0, equal, socket.AF_UNIX), stream)
    for kind in (socket.SOCK_DGRAM, socket.SOCK_SEQPACKET):  # these could send to any address
        program.add_rule(refuse, "socketpair", arg(1, masked, _SOCKET_TYPE, kind))
    # By their low 32 bits: the kernel looks at no more of them.
    for name, place, allowed, forbidden in _BY_COMMAND:
        uncounted = () if counted or name != "fcntl" else _UNCOUNTED_COMMANDS
        for command in (*allowed, *forbidden):
            action = allow if command in allowed and command not in uncounted else refuse
            program.add_rule(action, name, arg(place, masked, 0xFFFFFFFF, command))
    # Its own limits may be read and lowered, those of another process not.
    program.add_rule(allow, "prlimit64", arg(0, equal, 0))
    program.add_rule(refuse, "prlimit64", arg(0, seccomp.NE, 0))
    return program


def _known(seccomp: Any, names: str) -> Iterator[str]:
    """The names that this libseccomp knows; a call younger than it is not in the filter, so ENOSYS."""
    for name in names.split():
        if seccomp.resolve_syscall(0, name) != -1:
            yield name
