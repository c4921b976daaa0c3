"""`gspo run --slurm`: a run over the nodes of a Slurm job, from the job's batch script.

Redis, coordinator and reward run here, on the batch node, under the same supervisor as without Slurm; every generator
and the learner's ranks are steps of the job. A session that Slurm ends before the run has ended requeues the job.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType

from rich.console import Console

from gspo.cli.cluster.layout import LEARNER_PROCESS, Layout, lay_out
from gspo.cli.processes.child import Program
from gspo.cli.processes.exit_codes import InterruptedRunError, NodeLostError, RunError
from gspo.cli.processes.preflight import PreflightProcess
from gspo.cli.processes.redis_server import write_secret
from gspo.cli.run.training import run
from gspo.cli.rundir.start import SERVICES_DIR, config_file_of, decide_start
from gspo.cli.slurm.allocation import Allocation, nodes_of, remove_limits, requeue, step
from gspo.cli.slurm.batch_watch import watching
from gspo.cli.slurm.survey import survey
from gspo.cli.slurm.task import LAYOUT_NAME
from gspo.common.config.loading import CONFIG_NAME, parse_config, read_config, write_config
from gspo.common.config.schema import Config
from gspo.common.host.module_command import module_command
from gspo.common.network.credentials import EVERY_INTERFACE
from gspo.runlog.run_log import RunLog

_PROBE_S = 30.0
_TOKEN_NAME, _PASSWORD_NAME = "token", "redis_password"


class SlurmNodes:
    """The nodes of the job, as the supervisor needs them.

    Args:
        folder: The job's folder in the run directory, with the layout.
    """

    def __init__(self, layout: Layout, folder: Path) -> None:
        self._layout, self._folder = layout, folder
        self._lost: set[str] = set()

    async def table(self) -> str:
        """A line for each process on each of its nodes."""
        return self._layout.table()

    def placed(self, program: Program) -> Program:
        """A program of the engines as a step; any other as it is."""
        if program.name not in self._layout.nodes:
            return program
        tasks_a_node = self._layout.ranks_a_node if program.name == LEARNER_PROCESS else 1
        words = step(self._layout.nodes[program.name], tasks_a_node=tasks_a_node, name=program.name)
        command = (*words, *self._task(program.name), *program.command)
        return replace(program, command=command, loss=partial(self.loss, program.name))

    async def check(self, process: str, command: tuple[str, ...]) -> tuple[int, str] | None:
        """The check of a process, as one task on its first node."""
        if process not in self._layout.nodes:
            return None
        words = (*step(self._layout.nodes[process][:1], name="check"), *self._task(process), *command)
        checked = await PreflightProcess.start(process, words, os.environ)
        try:
            return await checked.verdict()
        finally:
            checked.end()

    def _task(self, process: str) -> tuple[str, ...]:
        return (*module_command("gspo.cli.slurm.task"), str(self._folder), process)

    async def loss(self, process: str) -> str:
        """The lost node of a process; empty if all its nodes take steps.

        Raises:
            NodeLostError: The learner cannot start again, or no generator is left.
        """
        for node in self._layout.nodes[process]:
            if await asyncio.to_thread(_takes_steps, node):
                continue
            self._lost.add(process)
            reason = f"node {node} is lost"
            if process == LEARNER_PROCESS or self._lost.issuperset(self._layout.nodes.keys() - {LEARNER_PROCESS}):
                raise NodeLostError(f"{reason}, and the run cannot go on without {process}")
            return reason
        return ""


def _takes_steps(node: str) -> bool:
    """Whether Slurm can start something on this node now."""
    try:
        command = [*step([node], name="probe"), "true"]
        return subprocess.run(command, capture_output=True, timeout=_PROBE_S, check=False).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def run_on_slurm(target: Path, *, resume: bool, console: Console, leave_out: int | None = None) -> int:
    """Run over all nodes of this job; returns the exit code.

    Args:
        resume: Continue the run; a requeued job continues what it has begun in any case.
        leave_out: As for `run`.

    Raises:
        InputError: A batch script did not start this process, a node is not fit, or the input cannot work.
        RunError: The run could not go on, or the job could not be requeued.
        InterruptedRunError: The user stopped it, or its time was over before it had trained a step.
    """
    allocation = Allocation.from_environment(os.environ)
    remove_limits()
    target = config_file_of(target)
    run_dir = read_config(target / CONFIG_NAME if target.is_dir() else target).run_dir
    resumes = resume or (allocation.num_requeues > 0 and RunLog(run_dir).has_trained())
    start = decide_start(target, resume=resumes, leave_out=leave_out)
    if start.finished:
        return run(target, resume=resumes, leave_out=leave_out, plain=True, console=console)
    if start.from_device:
        console.print(start.from_device, highlight=False, soft_wrap=True)
    folder = _job_folder(start.config, allocation)
    file = _write_job_config(start.config, folder)
    layout = lay_out(start.config, survey(allocation.nodes, folder))
    layout.write(folder / LAYOUT_NAME)
    before = _last_step(start.run_dir)
    with watching(allocation.job, allocation.nodes), _time_limit() as is_over:
        try:
            nodes = SlurmNodes(layout, folder)
            return run(file, resume=resumes, leave_out=leave_out, plain=True, console=console, nodes=nodes)
        except NodeLostError as loss:
            if not nodes_of(allocation.job):  # a cancelled job loses its steps too
                raise
            reason = str(loss)
        except InterruptedRunError:
            step_now = _last_step(start.run_dir)
            if not is_over.is_set() or step_now == before:
                raise
            reason = f"the job's time is over at step {step_now}"
    return _requeue(allocation.job, reason, console)


def _requeue(job: str, reason: str, console: Console) -> int:
    """Let Slurm start the job again; returns the exit code."""
    console.print(f"{reason}\nrequeueing job {job}, which will continue the run", soft_wrap=True)
    if refusal := requeue(job):
        raise RunError(f"job {job} could not be requeued ({refusal}). Submit it again, with --resume")
    return 0


def _job_folder(config: Config, allocation: Allocation) -> Path:
    """The folder of this job in the run directory, where no other job writes."""
    folder = config.run_dir / SERVICES_DIR / f"slurm-{allocation.job}"
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)
    return folder


def _write_job_config(config: Config, folder: Path) -> Path:
    """The configuration of this job: on every interface, with a token and a Redis password of its own.

    A requeued job keeps its secrets. Credentials that the user has set stay.
    """
    services = config.services.model_dump(mode="json") | {"host": EVERY_INTERFACE[0]}
    for key, name in (("token_file", _TOKEN_NAME), ("redis_password_file", _PASSWORD_NAME)):
        if services[key] is None or Path(services[key]).parent.name.startswith("slurm-"):
            path = folder / name
            if not path.exists():
                write_secret(path, secrets.token_hex(32).encode())
            services[key] = str(path)
    keys = config.model_dump(mode="json") | {"services": services}
    file = folder / CONFIG_NAME
    write_config(parse_config(keys, folder), file)
    return file


@contextlib.contextmanager
def _time_limit() -> Iterator[threading.Event]:
    """While the block lasts, SIGUSR1, by which the job announces its time limit, stops the run as SIGTERM does.

    Before the run takes SIGTERM, and after it, SIGUSR1 has no effect.
    """
    received = threading.Event()

    def stop(_number: int, _frame: FrameType | None) -> None:
        if not received.is_set() and signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            received.set()
            os.kill(os.getpid(), signal.SIGTERM)

    before = signal.signal(signal.SIGUSR1, stop)
    try:
        yield received
    finally:
        signal.signal(signal.SIGUSR1, before)


def _last_step(run_dir: Path) -> int:
    return max(RunLog(run_dir).step_files(), default=0)
