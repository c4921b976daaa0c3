"""A real Slurm on this machine: slurmctld, and a slurmd for each node, which is a set of Linux namespaces.

A node has its own network, processes, host name and mounts, and shares the disk with the others. Killing its first
process kills it as a whole; its cable is cut before, so that the others see silence, as when a machine loses power.
All paths are in a scratch folder, all addresses in namespaces, so several clusters run side by side.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from tests.compose.project import until

CONTROLLER = "login"
# Namespaces are the machine's: a second cluster beside this one has others.
_OWN = os.getpid() % 250
_START_S, _COMMAND_S = 60.0, 60.0
_PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged", "ip", "unshare", "nsenter", "sshd", "ssh", "ssh-keygen")
# Seconds of silence until Slurm gives a node up; 300 by default.
NODE_TIMEOUT_S = 20
_CGROUPS = "CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n"
_CONFIGURATION = """
ClusterName=gspo
SlurmctldHost={controller}({address})
SlurmUser=root
AuthType=auth/munge
CryptoType=crypto/munge
AuthInfo=socket={folder}/munge/socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdTimeout={timeout_s}
SlurmctldTimeout=60
InactiveLimit=0
KillWait=20
ReturnToService=2
SlurmdParameters=config_overrides
MpiDefault=none
SchedulerParameters=sched_interval=2,requeue_delay=1
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO
"""


def call(
    words: Sequence[str], *, timeout_s: float = _COMMAND_S, check: bool = True
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    done = subprocess.run(words, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert not check or done.returncode == 0, f"{' '.join(words)}: {done.stdout}{done.stderr}"
    return done


class Cluster:
    """A controller, which is the login node too, and nodes; use it as a context.

    Args:
        folder: Scratch folder, which becomes the cluster's shared disk.
        cpus: CPUs that Slurm believes each node to have.
    """

    def __init__(self, folder: Path, nodes: Sequence[str], cpus: int) -> None:
        self.folder, self.nodes = folder, tuple(nodes)
        self._cpus = cpus
        self._addresses = {name: f"10.215.{_OWN}.{number}" for number, name in enumerate((CONTROLLER, *nodes), 1)}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Cluster:
        with ExitStack() as stack:
            self._stack = stack
            self._write_files()
            self._start_munge()
            self._make_network()
            self.start(CONTROLLER, "slurmctld", "-D", "-f", str(self._configuration))
            for node in self.nodes:
                self.start_node(node)
            self.await_idle()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_error: object) -> None:
        self._stack.close()

    @property
    def local_disk(self) -> Path:
        """A folder that is another disk on each node."""
        return self.folder / "local"

    @property
    def _configuration(self) -> Path:
        return self.folder / "slurm.conf"

    def _write_files(self) -> None:
        text = _CONFIGURATION.format(
            controller=CONTROLLER,
            address=self._addresses[CONTROLLER],
            folder=self.folder,
            timeout_s=NODE_TIMEOUT_S,
        )
        for node in self.nodes:
            text += f"NodeName={node} NodeAddr={self._addresses[node]} CPUs={self._cpus} State=UNKNOWN\n"
            (self.folder / f"spool-{node}").mkdir()
        self._configuration.write_text(text)
        (self.folder / "cgroup.conf").write_text(_CGROUPS)
        (self.folder / "state").mkdir()
        self.local_disk.mkdir()
        lines = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in self._addresses.items())]
        (self.folder / "hosts").write_text("\n".join(lines) + "\n")

    def _start_munge(self) -> None:
        folder = self.folder / "munge"
        folder.mkdir(mode=0o711)
        key = folder / "key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        files = {"key": "key-file", "socket": "socket", "pid": "pid-file", "log": "log-file", "seed": "seed-file"}
        words = ["munged", "--foreground", "--force", *(f"--{name}={folder / file}" for file, name in files.items())]
        with (folder / "output").open("wb") as output:
            process = subprocess.Popen(words, stdout=output, stderr=output)
        self._stack.callback(_end, process)
        until("munged", lambda: (folder / "socket").exists() or None, _START_S)

    def _make_network(self) -> None:
        """A bridge at the controller, with a cable to each node."""
        for name in self._addresses:
            call(["ip", "netns", "add", self._namespace(name)])
            self._stack.callback(call, ["ip", "netns", "del", self._namespace(name)])
            self._ip(name, "link set lo up")
        self._ip(CONTROLLER, "link add bridge type bridge")
        self._ip(CONTROLLER, f"addr add {self._addresses[CONTROLLER]}/24 dev bridge")
        self._ip(CONTROLLER, "link set bridge up")
        for node in self.nodes:
            self._ip(CONTROLLER, f"link add {node} type veth peer name cable netns {self._namespace(node)}")
            self._ip(CONTROLLER, f"link set {node} master bridge up")
            self._ip(node, f"addr add {self._addresses[node]}/24 dev cable")
            self._ip(node, "link set cable up")

    def _namespace(self, name: str) -> str:
        return f"gspo-slurm-{_OWN}-{name}"

    def _ip(self, name: str, words: str) -> None:
        call(["ip", "-n", self._namespace(name), *words.split()])

    def _inside(self, name: str, *words: str) -> list[str]:
        """A command in a machine's network, with its host name and the cluster's names."""
        script = 'mount --bind "$0" /etc/hosts && hostname "$1" && shift && exec "$@"'
        # Unlike `ip netns exec`, nsenter keeps /sys, where slurmd looks for cgroups.
        spaces = ["nsenter", f"--net=/run/netns/{self._namespace(name)}", "unshare", "--mount", "--uts"]
        return [*spaces, "sh", "-c", script, str(self.folder / "hosts"), name, *words]

    def _environment(self) -> dict[str, str]:
        without = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SBATCH"))}
        return {**without, "SLURM_CONF": str(self._configuration)}

    def start(self, name: str, *words: str, **variables: str) -> subprocess.Popen[bytes]:
        """Start a program on a machine, outside of Slurm; its output is appended to NAME.output, its end is here."""
        with (self.folder / f"{name}.output").open("ab") as output:
            process = subprocess.Popen(
                self._inside(name, *words),
                env=self._environment() | variables,
                stdout=output,
                stderr=output,
                stdin=subprocess.DEVNULL,
            )
        self._stack.callback(_end, process)
        return process

    def start_node(self, node: str) -> None:
        """Start a node, or start it again after `kill_node`."""
        self._ip(node, "link set cable up")
        # As the first process of a namespace, the shell takes all others with it, and reaps those without a parent.
        script = 'mount -t tmpfs tmpfs "$2" && slurmd -D -N "$0" -f "$1" & wait'
        namespace = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
        self._processes[node] = self.start(
            node, *namespace, "sh", "-c", script, node, str(self._configuration), str(self.local_disk)
        )

    def kill_node(self, node: str) -> None:
        """Cut a node's cable, then kill everything on it."""
        self._ip(node, "link set cable down")
        process = self._processes[node]
        process.send_signal(signal.SIGKILL)
        process.wait(_COMMAND_S)

    def await_idle(self) -> None:
        """Wait until every node answers Slurm."""

        def states() -> bool | None:
            done = self.login("sinfo", "-h", "-N", "-o", "%N %T", check=False)
            lines = done.stdout.split("\n")
            return True if all(f"{node} idle" in lines for node in self.nodes) else None

        until("idle nodes", states, _START_S)

    def login(self, *words: str, check: bool = True, timeout_s: float = _COMMAND_S) -> subprocess.CompletedProcess[str]:
        """Run a command on the login node."""
        done = subprocess.run(
            self._inside(CONTROLLER, *words),
            env=self._environment(),
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        assert not check or done.returncode == 0, f"{' '.join(words)}: {done.stdout}{done.stderr}"
        return done


def missing_programs() -> list[str]:
    """Needed programs that are not installed."""
    return [name for name in _PROGRAMS if not shutil.which(name)]


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)
