"""`gspo run`: check everything, run until the end or Ctrl-C, report."""

import asyncio
import shlex
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.text import Text

from gspo.cli.monitor.screens import open_screen
from gspo.cli.monitor.view import Phases, ScreenLine, ServiceProcess, View, load_history
from gspo.cli.processes.exit_codes import InterruptedRunError, NodeLostError, RunError
from gspo.cli.processes.gpu_locks import lock_gpus
from gspo.cli.processes.longest_rollout import check_longest, longest_rollout
from gspo.cli.processes.nodes import Nodes
from gspo.cli.processes.placement import Placement, place
from gspo.cli.processes.planned_memory import memory_table, read_planned_model
from gspo.cli.processes.preflight import Preflight, check_services
from gspo.cli.processes.programs import Job, check_ports, process_names, services_of
from gspo.cli.processes.redis_server import check_redis
from gspo.cli.run.session import Interrupts, Programs, run_session
from gspo.cli.rundir.start import RunStart, decide_start, how_to_recover, is_run_dir, lock_run_dir, prepare, write_draft
from gspo.common.config.schema import Config
from gspo.common.errors import EXIT_FAILED
from gspo.common.host.machine import free_memory, visible_gpus
from gspo.common.model.memory_needs import check_fits, redis_bytes
from gspo.common.streams.entries import FAILED, word_of
from gspo.common.streams.keys import SERVICES
from gspo.common.tasks import task_group
from gspo.common.telemetry.step_time import duration
from gspo.runlog.run_log import PAGE_NAME, RunLog
from gspo.runlog.sentences.held_out import change_in_words, difference, error_of, in_words
from gspo_proto.rollout_pb2 import RUN_END_STOPPED, RunEnd

T = TypeVar("T")
# Results in the run directory, for the last lines.
_RESULTS = (
    ("report", PAGE_NAME),
    ("model", "export"),
    ("best model", "best"),
    ("TensorBoard", "tensorboard"),
    ("Weights & Biases", "wandb"),
)


def run(
    target: Path,
    *,
    resume: bool,
    plain: bool,
    console: Console,
    leave_out: int | None = None,
    programs: Programs | None = None,
    nodes: Nodes | None = None,
) -> int:
    """Run to the end; the exit code.

    Args:
        leave_out: With `resume`, a logged step whose training fails: the run continues without it.
        programs: Makes other service processes than programs.py; for tests.
        nodes: The nodes of a cluster; None starts everything on this machine.

    Raises:
        InputError: The input cannot work.
        RunError: The run could not go on.
        InterruptedRunError: The user stopped it.
    """
    start = decide_start(target, resume=resume, leave_out=leave_out)
    if start.finished:
        console.print(
            f"{start.run_dir} has finished: {start.finished}. Report: {start.run_dir / PAGE_NAME}\n"
            "To train on, raise run.total_steps in your configuration, then: gspo run CONFIG.yaml --resume",
            highlight=False,
            soft_wrap=True,
        )
        return 0
    with lock_run_dir(start.run_dir):
        console.print("checking configuration, model, prompts and reward ...", style="dim")
        services = run_services(
            start, console, plain=plain, services=services_of(start.config), programs=programs, nodes=nodes
        )
        try:
            view, is_interrupted = asyncio.run(_while_nodes_are_there(nodes, services) if nodes else services)
        except NodeLostError as error:
            if not is_run_dir(start.run_dir):
                raise
            raise NodeLostError(f"{error}. {_how_to_continue(start.run_dir, nodes)}") from error
        except RunError as error:
            raise _with_report(start.run_dir, error) from error
        how_to_continue = _how_to_continue(start.run_dir, nodes)
        if is_interrupted and (view.finished is None or _was_stopped(view)):
            raise InterruptedRunError(f"stopped at step {view.step}. {how_to_continue}")
        return _conclude(start, view, how_to_continue, console)


async def _while_nodes_are_there(nodes: Nodes, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which ends when the cluster can no longer be used.

    Raises:
        NodeLostError: It can not.
    """
    async with task_group(nodes.watch()):
        return await work


async def run_services(
    start: RunStart,
    console: Console,
    *,
    plain: bool,
    services: tuple[str, ...] = SERVICES,
    coordinator_options: tuple[str, ...] = (),
    programs: Programs | None = None,
    nodes: Nodes | None = None,
) -> tuple[View, bool]:
    """Place, check, prepare and run; returns the view at the end, and whether the user interrupted it.

    Raises:
        InputError: The input cannot work.
        RunError: The run could not go on.
        InterruptedRunError: The user stopped it before the start.
    """
    phases, interrupts = Phases(), Interrupts()
    interrupts.install()
    # Under a scheduler every process has GPUs of its own already.
    visible = visible_gpus() if nodes is None else []
    placement = place(start.config, process_names(start.config, services), visible)
    first_processes = Preflight(start.run_dir, nodes, coordinator_options)
    with lock_gpus(placement.taken(), start.run_dir, visible), first_processes as preflight:
        if start.from_device:
            console.print(start.from_device, style="dim", highlight=False, soft_wrap=True)
        warnings = await until_interrupted(
            _plan_and_check(start, services, placement, preflight, nodes, console), interrupts
        )
        notes = prepare(start)
        job = Job(
            start.config,
            start.run_dir,
            start.resume,
            services,
            coordinator_options,
            placement,
            preflight,
            nodes,
            start.leave_out,
        )
        processes = {name: ServiceProcess(name, time.time()) for name in job.names}
        view = View(job.config, job.run_dir, processes, phases)
        if job.resume:
            load_history(view)
        screen = interrupts.screen = open_screen(console, plain=plain)
        try:
            for line in [ScreenLine(warning, "warning") for warning in warnings] + [ScreenLine(note) for note in notes]:
                screen.say(line)
            await run_session(job, view, screen, interrupts, programs)
        finally:
            screen.show(view)
            screen.close()
    return view, interrupts.requested.is_set()


async def _plan_and_check(
    start: RunStart,
    services: tuple[str, ...],
    placement: Placement,
    preflight: Preflight,
    nodes: Nodes | None,
    console: Console,
) -> list[str]:
    """Show the plan, and check everything before anything starts; returns the warnings."""

    async def check() -> list[str]:
        return await check_all(start.config, services, write_draft(start), placement, preflight)

    async def plan() -> list[str]:
        return await show_plan(start.config, services, placement, console)

    if nodes:
        console.print(await nodes.table(), highlight=False, soft_wrap=True)
        return await check()
    # On GPUs the model was counted for the defaults. On a CPU, services that have passed their checks import their
    # libraries while it is counted.
    first, then = (plan, check) if placement.gpus else (check, plan)
    return [*await first(), *await then()]


async def show_plan(config: Config, services: tuple[str, ...], placement: Placement, console: Console) -> list[str]:
    """Print the processes with their GPUs and planned memory; returns the warnings of a plan that may not fit.

    Raises:
        InputError: The longest rollout does not fit.
    """
    model = await asyncio.to_thread(read_planned_model, config)
    if model is None:
        if placement.gpus:
            console.print(placement.table(), highlight=False)
        return []
    console.print(memory_table(config, placement, process_names(config, services), model), highlight=False)
    if line := longest_rollout(config, placement, model).line():
        console.print(line, highlight=False)
    return check_longest(config, placement, model)


async def check_all(
    config: Config, services: tuple[str, ...], config_file: Path, placement: Placement, preflight: Preflight
) -> list[str]:
    """Check ports, Redis, memory and every service before anything starts; returns the warnings."""
    check_ports(config)
    if config.services.redis_url:
        warning = await check_redis(config.services.redis_url, config)
    else:
        warning = check_fits(config, redis_bytes(config), free_memory(), "the memory of the run's Redis")
    return [*filter(None, [warning]), *await check_services(services, config_file, placement, preflight)]


async def until_interrupted(work: Coroutine[Any, Any, T], interrupts: Interrupts) -> T:
    """The result of `work`, which Ctrl-C cancels.

    Raises:
        InterruptedRunError: The user pressed Ctrl-C.
    """

    async def interrupt() -> None:
        await interrupts.requested.wait()
        raise InterruptedRunError("stopped before anything was started")

    async with task_group(interrupt()):
        return await work


def _was_stopped(view: View) -> bool:
    return view.finished is not None and view.finished.end == RUN_END_STOPPED


def _how_to_continue(run_dir: Path, nodes: Nodes | None) -> str:
    return f"Continue it:\n  gspo run --resume {shlex.quote(str(run_dir))}{' --cluster ray' if nodes else ''}"


def _with_report(run_dir: Path, error: RunError) -> RunError:
    """The error with how to go on, which is in the report too, where a service's own error ended a run."""
    if error.failure is None or not RunLog(run_dir).has_trained():
        return error
    from gspo.view.picture.page import write_report

    text = f"{error}\n{how_to_recover(run_dir, error.failure.step)}"
    write_report(run_dir, finished={"end": FAILED, "reason": text})
    return type(error)(text, error.failure)


def _conclude(start: RunStart, view: View, how_to_continue: str, console: Console) -> int:
    """Write the report and print the summary; returns the exit code."""
    from gspo.view.picture.page import write_report  # here: most commands make no page

    view.phases.enter("report")
    end = view.finished
    finished = {"end": word_of(RunEnd, end.end), "reason": end.reason} if end else {}
    advice = ""
    if finished.get("end") == FAILED:
        advice = how_to_recover(start.run_dir, RunLog(start.run_dir).untrained_step())
        finished["reason"] += f"\n{advice}"
    summary = write_report(start.run_dir, wall_s=view.phases.wall_s, finished=finished)
    view.phases.enter("")
    print_summary(summary, start.run_dir, view, console)
    if _was_stopped(view):
        advice = how_to_continue
    if advice:
        console.print(advice, highlight=False, soft_wrap=True)
    return EXIT_FAILED if finished.get("end") == FAILED else 0


def _held_out_line(before: dict[str, float], after: dict[str, float]) -> str:
    """Means of the sampled answers before and after, with standard errors; empty where one of them is missing."""
    if (change := difference(before, after)) is None:
        return ""
    first, last = (in_words(figures["sampled_mean"], error_of(figures, "sampled_mean")) for figures in (before, after))
    words = change_in_words(*change)
    return f"{first} -> {last}{f' ({words})' if words else ''}"


def print_summary(summary: dict[str, Any], run_dir: Path, view: View, console: Console) -> None:
    """Print the held-out reward, the counts, and the paths of the results, which are never wrapped."""
    lines: list[tuple[str, str]] = []
    for file, figures in summary.get("held_out", {}).items():
        if text := _held_out_line(figures["before"], figures["after"] or {}):
            lines.append((f"held-out reward{f', {file}' if file else ''}", text))
    if best := summary.get("best"):
        lines.append(("best version", best["line"]))
    lines.append(("steps, policy version", f"{summary['steps']}, {summary['policy_version']}"))
    lines.append(("groups", ", ".join(f"{count} {name}" for name, count in summary["groups"].items())))
    if unscored := summary.get("rollouts", {}).get("skipped_failed"):
        lines.append(("answers without a score", f"{unscored}, left out of training: the report says why"))
    times = (f"{name.replace('_', ' ')} {duration(s)}" for name, s in view.phases.wall_s.items())
    lines.append(("time", ", ".join(times)))
    lines.append(("run directory", str(run_dir)))
    lines += [(label, str(run_dir / name)) for label, name in _RESULTS if (run_dir / name).exists()]
    width = max(len(label) for label, _ in lines) + 2
    for label, text in lines:
        style = "bold" if label.startswith("held-out reward") else ""
        console.print(Text.assemble(label.ljust(width), (text, style)), soft_wrap=True)
