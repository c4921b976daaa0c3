"""The Slurm job that this process is the batch script of: its nodes, and the commands of Slurm that the run needs."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gspo.common.errors import InputError

_SBATCH = "Submit it: sbatch deploy/slurm/gspo.sbatch CONFIG.yaml"
_PROGRAMS = ("srun", "scontrol", "squeue")
# Variables of sbatch that would limit each step, which takes all that the job has on its nodes.
_LIMITS = ("SLURM_CPUS_PER_TASK", "SLURM_TRES_PER_TASK", "SLURM_NTASKS_PER_NODE", "SLURM_MEM_PER_CPU")
_COMMAND_S = 60.0


@dataclass(frozen=True)
class Allocation:
    """The nodes of a Slurm job.

    Attributes:
        job: Its id.
        nodes: Their names; the first is the batch node, where this process is.
        num_requeues: How often Slurm has started the job again.
    """

    job: str
    nodes: tuple[str, ...]
    num_requeues: int = 0

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Allocation:
        """Read the variables that Slurm sets for a batch script.

        Raises:
            InputError: A batch script of Slurm did not start this process, or Slurm's programs are not on PATH.
        """
        for name in _PROGRAMS:
            if not shutil.which(name):
                raise InputError("--slurm", f"needs Slurm, and there is no {name} on PATH", _SBATCH)
        for name in ("SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURMD_NODENAME"):
            if name not in environment:
                raise InputError("--slurm", f"needs the batch script of a Slurm job, and {name} is not set", _SBATCH)
        listed = _ask("scontrol", "show", "hostnames", environment["SLURM_JOB_NODELIST"]).split()
        batch_node = environment["SLURMD_NODENAME"]
        others = (node for node in listed if node != batch_node)
        return cls(environment["SLURM_JOB_ID"], (batch_node, *others), int(environment.get("SLURM_RESTART_COUNT", 0)))


def remove_limits() -> None:
    """Remove the variables by which steps of this process would get less than the job's share of their nodes."""
    for name in _LIMITS:
        os.environ.pop(name, None)


def step(
    nodes: Sequence[str], *, tasks_a_node: int = 1, name: str = "gspo", ends_together: bool = True
) -> tuple[str, ...]:
    """The words that start a command as a step of this job, on these nodes; needs Slurm 20.11 or later.

    The tasks share all CPUs, memory and GPUs of the job on their nodes, also with other steps.

    Args:
        ends_together: The failure of a task ends the others.
    """
    return (
        *("srun", "--overlap", "--mem=0", "--cpu-bind=none", "--mpi=none", "--input=none", "--export=ALL"),
        f"--kill-on-bad-exit={int(ends_together)}",
        *(f"--job-name={name}", f"--nodes={len(nodes)}", f"--nodelist={','.join(nodes)}"),
        *(f"--ntasks={len(nodes) * tasks_a_node}", f"--ntasks-per-node={tasks_a_node}"),
    )


def nodes_of(job: str) -> list[str]:
    """The nodes that a running job has now; empty if it does not run, or Slurm does not answer."""
    try:
        listed = _ask("squeue", "--noheader", f"--jobs={job}", "--states=RUNNING", "--format=%N")
        # Without a list, scontrol would expand that of this process's own job.
        return _ask("scontrol", "show", "hostnames", listed).split() if listed else []
    except (OSError, subprocess.SubprocessError):
        return []


def _ask(*words: str) -> str:
    """The reply of a command of Slurm."""
    return subprocess.run(words, capture_output=True, text=True, timeout=_COMMAND_S, check=True).stdout.strip()


def requeue(job: str) -> str:
    """Ask Slurm to start a job again; returns why it refuses, or an empty text."""
    try:
        done = subprocess.run(
            ["scontrol", "requeue", job], capture_output=True, text=True, timeout=_COMMAND_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return done.stderr.strip() if done.returncode else ""
