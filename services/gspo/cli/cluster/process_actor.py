"""The actor of a bundle: it starts processes of the run on its node as subprocesses, and ends them.

The supervisor counts the deaths. A guard on the node ends all processes of a dead actor (processes/guard.py).
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, BinaryIO

from gspo.cli.processes.guard import kill_processes_of, start_guard
from gspo.common.host.machine import VISIBLE
from gspo.common.host.module_command import POLICIES_VARIABLE, SUPERVISOR_VARIABLE
from gspo.common.network.credentials import ADDRESS_VARIABLE

# Of the driver's variables, those that say where it is and not how to work; and the one that Ray sets for its workers.
_OF_NODE = ("CUDA_", "RAY_", "SLURM", "SBATCH", "PYTHON")
_THREADS = "OMP_NUM_THREADS"


class ProcessActor:
    """Processes of one run on one node, by name.

    Args:
        driver: The environment of the command, for variables that the node does not set itself.
    """

    def __init__(self, driver: Mapping[str, str]) -> None:
        import ray

        self._node_id = str(ray.get_runtime_context().get_node_id())
        # An id of its own: on the driver's node, the driver's guard and this one have other processes.
        own_id = uuid.uuid4().hex
        # A generator that starts again in this bundle has its last policy.
        self._policies = os.memfd_create("gspo-policies")
        self._own_variables = {ADDRESS_VARIABLE: ray.util.get_node_ip_address(), SUPERVISOR_VARIABLE: own_id}
        self._environment = node_environment(os.environ, driver)
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        # Ray kills an actor with its children, and not what these have started, such as an engine's own processes.
        self._guard = start_guard(own_id, as_orphan=True)
        self._guard.wait()

    def facts(self) -> dict[str, Any]:
        """node_id, the version of gspo, gpus (names of those of the bundle), and a port that is free here now."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            port = int(probe.getsockname()[1])
        gpus = [name for name in os.environ.get(VISIBLE, "").split(",") if name]
        return {"node_id": self._node_id, "version": version("gspo"), "gpus": gpus, "port": port}

    def policies(self) -> str:
        """The file in memory for the policies of its generators, which it outlives."""
        return f"/proc/{os.getpid()}/fd/{self._policies}"

    def share_policies(self, path: str) -> bool:
        """Have another actor's file in common, before anything is started; whether it can be opened."""
        try:
            other = os.open(path, os.O_RDWR)
        except OSError:
            return False
        os.close(self._policies)
        self._policies = other
        return True

    def start(self, name: str, command: Sequence[str], variables: Mapping[str, str], log: str) -> int:
        """Start a process, with its output appended to a log on the shared disk; returns its id."""
        with Path(log).open("ab") as output:
            process = self._processes[name] = self._started(command, variables, output)
        self._note(str(process.pid))
        return process.pid

    def wait(self, name: str) -> int:
        """Wait for the end of a process; returns the exit code, negative for a signal."""
        return self._processes[name].wait()

    def signal(self, name: str, number: int, with_children: bool) -> None:
        """Signal a process, unless it has ended."""
        process = self._processes.get(name)
        if process is not None and process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                (os.killpg if with_children else os.kill)(process.pid, signal.Signals(number))

    def end_rest(self, name: str) -> None:
        """Kill the children that an ended process has left."""
        if process := self._processes.get(name):
            kill_processes_of("", (process.pid,))
            self._note(f"-{process.pid}")

    def check(self, command: Sequence[str], variables: Mapping[str, str], timeout_s: float) -> tuple[int | None, str]:
        """Run a command to its end; returns the exit code, None if that was not in time, and its output."""
        process = self._started(command, variables, subprocess.PIPE)
        try:
            output, _ = process.communicate(timeout=timeout_s)
            return process.returncode, output.decode(errors="replace")
        except subprocess.TimeoutExpired:
            return None, ""
        finally:
            kill_processes_of("", (process.pid,))
            process.wait()

    def _started(
        self, command: Sequence[str], variables: Mapping[str, str], output: int | BinaryIO
    ) -> subprocess.Popen[bytes]:
        """The process of a command under the Python of this node, which may be at another path than the driver's."""
        return subprocess.Popen(
            [sys.executable, *command[1:]],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**self._environment, **variables, **self._own_variables, POLICIES_VARIABLE: self.policies()},
            start_new_session=True,
        )

    def _note(self, session: str) -> None:
        if self._guard.stdin:
            self._guard.stdin.write(f"{session}\n")


def node_environment(node: Mapping[str, str], driver: Mapping[str, str]) -> dict[str, str]:
    """The environment of a process on a node: the node's own, then variables that only the driver has.

    Ray's variables are not passed on, so that user code gets no token of the cluster. Ray sets the number of threads
    for its workers; a process has the driver's, or none.
    """
    own = {name: value for name, value in node.items() if not name.startswith("RAY_") and name != _THREADS}
    others = {name: value for name, value in driver.items() if not name.startswith(_OF_NODE)}
    return {**others, **own, **({_THREADS: driver[_THREADS]} if _THREADS in driver else {})}
