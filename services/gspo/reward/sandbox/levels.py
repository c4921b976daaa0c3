"""The strongest level of confinement that this machine supports, found by a probe that tries to get out of each."""

import hashlib
import os
import platform
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from gspo.common.errors import InputError
from gspo.reward.sandbox import syscalls
from gspo.reward.sandbox.calls import CallError, CallLimits, Code
from gspo.reward.sandbox.execution import Sandbox
from gspo.reward.sandbox.inside import confine
from gspo.reward.sandbox.launch import LEVEL_NAMES, ConfinementLevel, LevelName

_PROBE_LIMITS = CallLimits(timeout_s=20.0, memory_mb=2048)
# The level must make each attempt fail.
_PROBE = """
import os, socket

def attempts(task):
    yield "read a file outside", lambda: open(task["file"]).read()
    yield "write a file outside", lambda: open(task["file"], "a").write("x")
    yield "open a socket", lambda: socket.socket().close()
    yield "make a process", lambda: os.fork() or os._exit(0)
    yield "signal the service", lambda: os.kill(task["pid"], 0)
    yield "signal its supervisor", lambda: os.kill(os.getppid(), 0)

def reset(task):
    escapes = []
    for name, attempt in attempts(task):
        try:
            attempt()
            escapes.append(name)
        except OSError:
            pass
    spaces = {name: os.readlink("/proc/self/ns/" + name) for name in ("user", "mnt", "pid", "net", "ipc")}
    return {"escapes": escapes, "spaces": spaces}

def step(state, action):
    raise NotImplementedError
"""
_FIX_SECCOMP = "Install libseccomp (Debian: apt-get install libseccomp2)"
_FIX_BUBBLEWRAP = "Install bubblewrap (Debian: apt-get install bubblewrap)"
_FIX_NAMESPACES = (
    "Let this user make namespaces (sysctl kernel.unprivileged_userns_clone=1 and user.max_user_namespaces above 0, on "
    "Ubuntu kernel.apparmor_restrict_unprivileged_userns=0). Give a container the security option "
    "seccomp=unconfined and, as root, the capability SYS_ADMIN"
)
_FIX_LANDLOCK = (
    "Run Linux 5.13 or later with Landlock among its security modules (kernel parameter lsm=); in a container take "
    "Docker 23 or later, or give it the security option seccomp=unconfined"
)


class _LevelUnavailableError(Exception):
    pass


async def find_level(minimum: LevelName) -> ConfinementLevel:
    """The strongest level that holds on this machine.

    Raises:
        InputError: It is below `minimum`; the message names the missing parts and the fix.
    """
    lacks: list[str] = []
    level = ConfinementLevel("rlimits", parts=("rlimits", "a process for each session"))
    for name in ("bubblewrap", "landlock"):
        try:
            level = await try_level(name)
            break
        except _LevelUnavailableError as lack:
            lacks.append(f"{name}: {lack}")
    if LEVEL_NAMES.index(level.name) < LEVEL_NAMES.index(minimum):
        reached = f"is {minimum}, and this machine reaches {level.name}: {'; '.join(lacks)}"
        raise InputError("reward.sandbox_minimum", reached, f"Or accept {level.name} by naming it here")
    return replace(level, lacks=tuple(lacks))


async def find_agent_level(minimum: LevelName) -> ConfinementLevel:
    """The strongest level for agents and MCP servers, with their filter: bubblewrap, else rlimits.

    Landlock alone is none: it does not keep them from addresses.

    Raises:
        InputError: It is below `minimum`; the message names the missing parts and the fix.
    """
    level = await find_level("rlimits")
    if level.name == "bubblewrap":
        try:
            return ConfinementLevel("bubblewrap", syscalls.agent_filter_bytes(), level.parts)
        except syscalls.FilterUnavailableError as error:
            level = ConfinementLevel("rlimits", lacks=(str(error),))
    if LEVEL_NAMES.index(minimum) > LEVEL_NAMES.index("rlimits"):
        reached = f"is {minimum}, and this machine reaches rlimits for agents and MCP servers: {'; '.join(level.lacks)}"
        raise InputError("reward.sandbox_minimum", reached, "Or accept rlimits by naming it here")
    return ConfinementLevel("rlimits", parts=("rlimits",), lacks=level.lacks)


async def try_level(name: LevelName) -> ConfinementLevel:
    """A level, if it holds here.

    Raises:
        _LevelUnavailableError: It does not; the message names the missing part and the fix.
    """
    try:
        abi = confine.landlock_abi()
        # Without Landlock workers are hidden from their supervisor too.
        program = syscalls.filter_bytes(signals=abi >= confine.SIGNAL_SCOPE_ABI, counted=abi > 0)
    except syscalls.FilterUnavailableError as error:
        raise _LevelUnavailableError(f"{error}. {_FIX_SECCOMP}") from error
    if name == "bubblewrap" and shutil.which("bwrap") is None:
        raise _LevelUnavailableError(f"there is no bwrap on the PATH. {_FIX_BUBBLEWRAP}")
    if name == "landlock" and confine.landlock_abi() == 0:
        raise _LevelUnavailableError(
            f"the kernel ({platform.release()}) has no Landlock, or it is refused. {_FIX_LANDLOCK}"
        )
    level = ConfinementLevel(name, program)
    try:
        outcome, report = await _probe(level)
    except CallError as error:
        fix = _FIX_NAMESPACES if name == "bubblewrap" else _FIX_LANDLOCK
        raise _LevelUnavailableError(f"a trial failed ({error}). {fix}") from error
    if outcome["escapes"]:
        raise _LevelUnavailableError(f"in a trial user code could {', '.join(outcome['escapes'])}")
    spaces = outcome["spaces"].items()
    own = [space for space, link in spaces if link != os.readlink(f"/proc/self/ns/{space}")]  # noqa: PTH115
    parts = [f"namespaces {' '.join(own)}"] if own else []
    parts += [f"Landlock {report['landlock']}"] if report["landlock"] else []
    parts += ["seccomp", "rlimits", *(["a user of its own"] if report["own_user"] else [])]
    return replace(level, parts=tuple(parts))


async def _probe(level: ConfinementLevel) -> tuple[dict[str, Any], dict[str, Any]]:
    """The result of _PROBE at a level, and the report of its supervisor."""
    code = Code("probe", _PROBE, hashlib.sha256(_PROBE.encode()).hexdigest(), "probe.py", kind="environment")
    sandbox = Sandbox(code, _PROBE_LIMITS, level)
    with tempfile.NamedTemporaryFile(prefix="gspo-probe-") as outside:
        Path(outside.name).chmod(0o666)  # every user of the machine could read and write it
        try:
            await sandbox.load()
            task = {"file": outside.name, "pid": os.getpid()}
            answer = await sandbox.call({"function": "reset", "arguments": {"task": task}})
            return answer.values, sandbox.supervisor_report
        finally:
            await sandbox.close()
