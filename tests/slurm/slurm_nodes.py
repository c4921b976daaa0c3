"""A real Slurm of several nodes on this machine: slurmctld, and a slurmd in Linux namespaces for each node.

A node has a network, processes, a host name, /tmp and /dev/shm of its own, and shares the rest of the disk. `lose` cuts
its cable before it kills everything there, as when a machine loses power.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.support.cluster.ray_cluster import until

CONTROLLER = "login"
# Namespaces are the machine's: a second cluster beside this one has others.
_OWN = os.getpid() % 250
_COMMAND_S = 60.0
# Slurm gives a node up after 20 s of silence; by default after 300.
_CONFIGURATION = """
ClusterName=gspo
SlurmctldHost={controller}({address})
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdTimeout=20
ReturnToService=2
SlurmdParameters=config_overrides
MpiDefault=none
SchedulerParameters=sched_interval=2,requeue_delay=1
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class SlurmNodes:
    """The nodes, and a controller, which is the login node too; use it as a context.

    Args:
        folder: On the shared disk, for files of Slurm.
    """

    def __init__(self, folder: Path, nodes: Sequence[str], cpus: int) -> None:
        self._folder, self._nodes, self._cpus = folder, nodes, cpus
        self._addresses = {name: f"10.215.{_OWN}.{number}" for number, name in enumerate((CONTROLLER, *nodes), 1)}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._stack = ExitStack()

    def __enter__(self) -> SlurmNodes:
        with ExitStack() as stack:
            self._stack = stack
            self._write_configuration()
            self._start_munge()
            for name in self._addresses:
                _call("ip", "netns", "add", _namespace(name))
                stack.callback(_call, "ip", "netns", "del", _namespace(name))
                self._ip(name, "link set lo up")
            self._ip(CONTROLLER, "link add bridge type bridge")
            self._ip(CONTROLLER, f"addr add {self._addresses[CONTROLLER]}/24 dev bridge")
            self._ip(CONTROLLER, "link set bridge up")
            self._start(CONTROLLER, "slurmctld", "-D", "-f", str(self._file))
            for node in self._nodes:
                self._ip(CONTROLLER, f"link add {node} type veth peer name cable netns {_namespace(node)}")
                self._ip(CONTROLLER, f"link set {node} master bridge up")
                self._ip(node, f"addr add {self._addresses[node]}/24 dev cable")
                self.start(node)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_error: object) -> None:
        self._stack.close()

    @property
    def _file(self) -> Path:
        return self._folder / "slurm.conf"

    def _write_configuration(self) -> None:
        text = _CONFIGURATION.format(controller=CONTROLLER, address=self._addresses[CONTROLLER], folder=self._folder)
        for node in self._nodes:
            text += f"NodeName={node} NodeAddr={self._addresses[node]} CPUs={self._cpus} State=UNKNOWN\n"
            (self._folder / f"spool-{node}").mkdir()
        self._file.write_text(text)
        (self._folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n")
        (self._folder / "state").mkdir()
        lines = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in self._addresses.items())]
        (self._folder / "hosts").write_text("\n".join(lines) + "\n")

    def _start_munge(self) -> None:
        folder = self._folder / "munge"
        folder.mkdir(mode=0o711)
        (folder / "key-file").write_bytes(os.urandom(128))
        (folder / "key-file").chmod(0o400)
        files = [f"--{name}={folder / name}" for name in ("key-file", "socket", "pid-file", "log-file", "seed-file")]
        self._popen("munged", ["munged", "--foreground", "--force", *files])
        until((folder / "socket").exists, "munged")

    def _popen(self, name: str, words: Sequence[str]) -> subprocess.Popen[bytes]:
        with (self._folder / f"{name}.output").open("ab") as output:
            process = subprocess.Popen(
                words, env=self._environment, stdout=output, stderr=output, stdin=subprocess.DEVNULL
            )
        self._stack.callback(_end, process)
        return process

    @property
    def _environment(self) -> dict[str, str]:
        return {**os.environ, "SLURM_CONF": str(self._file)}

    def _ip(self, name: str, words: str) -> None:
        _call("ip", "-n", _namespace(name), *words.split())

    def _inside(self, name: str, *words: str) -> list[str]:
        """A command in a machine's network, with its host name and the cluster's names."""
        script = 'mount --bind "$0" /etc/hosts && hostname "$1" && shift && exec "$@"'
        # Unlike `ip netns exec`, nsenter keeps /sys, where slurmd looks for cgroups.
        spaces = ["nsenter", f"--net=/run/netns/{_namespace(name)}", "unshare", "--mount", "--uts"]
        return [*spaces, "sh", "-c", script, str(self._folder / "hosts"), name, *words]

    def _start(self, name: str, *words: str) -> None:
        self._processes[name] = self._popen(name, self._inside(name, *words))

    def start(self, node: str) -> None:
        """Start a node, or start it again, and wait until Slurm has it."""
        self._ip(node, "link set cable up")
        # As the first process of a namespace, the shell takes all others with it, and reaps those without a parent.
        script = 'mount -t tmpfs tmpfs /tmp && mount -t tmpfs tmpfs /dev/shm && slurmd -D -N "$0" -f "$1" & wait'
        namespace = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
        self._start(node, *namespace, "sh", "-c", script, node, str(self._file))
        until(lambda: self.login("sinfo", "-h", "-n", node, "-o", "%T") == "idle", f"node {node}")

    def lose(self, node: str) -> None:
        """Cut a node's cable, then kill everything on it."""
        self._ip(node, "link set cable down")
        self._processes[node].kill()
        self._processes[node].wait(_COMMAND_S)

    def login(self, *words: str) -> str:
        """The output of a command on the login node."""
        return _call(*self._inside(CONTROLLER, *words), env=self._environment)


def _namespace(name: str) -> str:
    return f"gspo-slurm-{_OWN}-{name}"


def _call(*words: str, **more: Any) -> str:
    done = subprocess.run(words, capture_output=True, text=True, timeout=_COMMAND_S, check=False, **more)
    assert done.returncode == 0, f"{' '.join(words)}: {done.stdout}{done.stderr}"
    return str(done.stdout).strip()


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(10)
