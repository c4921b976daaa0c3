"""One session of a run under a supervisor: start Redis and the services, watch them, end everything.

Waits for: the run's Finished event, a program that cannot be kept alive, Ctrl-C, the deadline of the start.
"""

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TypeAlias

import httpx
from redis.asyncio import Redis
from redis.exceptions import RedisError

from gspo.cli.monitor.page_call import page_line
from gspo.cli.monitor.screens import LiveScreen, PlainScreen
from gspo.cli.monitor.view import Kind, ScreenLine, ServiceProcess, View
from gspo.cli.monitor.watcher import Watcher, watch_disk_space
from gspo.cli.processes.child import Program
from gspo.cli.processes.exit_codes import RunError
from gspo.cli.processes.programs import Job, service_programs
from gspo.cli.processes.redis_server import REDIS, start_redis
from gspo.cli.processes.supervisor import ProcessSupervisor
from gspo.cli.run.scaling import Scaling
from gspo.cli.rundir.open_run import api_client, api_url
from gspo.cli.rundir.start import SERVICES_DIR
from gspo.common.config.schema import Config
from gspo.common.errors import EXIT_INTERRUPTED
from gspo.common.streams.gpu_engines import GpuEngines
from gspo.common.streams.keys import COORDINATOR, GENERATION, LEARNER, Keys
from gspo.common.streams.redis_client import REDIS_PATIENCE_S
from gspo.common.tasks import run_until_cancelled, task_group

Screen: TypeAlias = PlainScreen | LiveScreen
# Makes the service processes of a job that uses the Redis at an address.
Programs: TypeAlias = Callable[[Job, str], list[Program]]
REFRESH_S = 0.25
# Services end by themselves on Finished; vLLM's processes, on a busy machine, take up to twenty seconds of it.
SELF_END_S = 25.0
# Between SIGTERM and SIGKILL: of services that are ready, and where some are still starting.
DRAIN_S, STARTING_END_S = 25.0, 4.0
_STOP_CALL_S = 10.0


class Interrupts:
    """Ctrl-C and SIGTERM: the first asks the run to stop, the second ends everything at once."""

    def __init__(self) -> None:
        self.requested = asyncio.Event()
        self.reason = ""
        self.supervisor: ProcessSupervisor | None = None
        self.screen: Screen | None = None

    def install(self) -> None:
        """Take the signals of this process."""
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal, number)

    def _on_signal(self, number: signal.Signals) -> None:
        if not self.requested.is_set():
            self.reason = "Ctrl-C" if number == signal.SIGINT else number.name
            self.requested.set()
            return
        if self.screen:
            self.screen.close()
        if self.supervisor:
            self.supervisor.kill()
        os._exit(EXIT_INTERRUPTED)


async def run_session(
    job: Job, view: View, screen: Screen, interrupts: Interrupts, programs: Programs | None = None
) -> None:
    """Run the job's services until the run has finished or the user stops it, then end everything.

    The result is in the view: `finished`, or None if the user stopped the run before it could finish.

    Args:
        programs: Makes other service processes than programs.py; for tests.

    Raises:
        RunError: A program could not be kept alive, or the services did not become ready in time.
        InputError: The name of the run is in use in the user's Redis.
    """
    view.phases.enter("start")
    services = job.config.services
    async with ProcessSupervisor(
        job.run_dir / SERVICES_DIR,
        services.max_restarts,
        lambda text: screen.say(ScreenLine(text, "warning")),
        job.preflight.supervisor_id,
    ) as supervisor:
        interrupts.supervisor = supervisor
        redis, redis_url = await start_redis(job.config, job.run_dir, supervisor, is_new_run=not job.resume)
        try:
            watcher = Watcher(redis, view, screen.say)
            await watcher.forget_last_session()
            job = replace(job, policies=supervisor.policies)

            def make_programs(job: Job) -> list[Program]:
                return _reporting_ends((programs or service_programs)(job, redis_url), job.config, redis)

            scaling = Scaling(job, view, supervisor, redis, redis_url, make_programs, screen.say)
            supervisor.start(make_programs(job))
            job.preflight.end()  # processes that are not part of this run
            await _until_over(job, view, screen, interrupts, supervisor, watcher, scaling)
        except RedisError as error:
            raise RunError(f"Redis did not answer for {REDIS_PATIENCE_S} s ({error})") from error
        finally:
            view.phases.enter("stop")
            # A starting service has nothing to drain, and would notice SIGTERM only after seconds of loading.
            idle = {p.name for p in view.processes.values() if p.service == GENERATION and not p.is_called}
            is_starting = any(process.name not in idle for process in view.waiting_to_start)
            terminate_s = STARTING_END_S if is_starting else DRAIN_S
            await supervisor.end(SELF_END_S if view.finished else 0.0, terminate_s=terminate_s, last=REDIS, idle=idle)
            await redis.aclose()


def _reporting_ends(programs: list[Program], config: Config, redis: Redis) -> list[Program]:
    """The programs; the ends of generators on shared GPUs are noted, because the learner waits for them."""
    if config.placement != "shared":
        return programs
    engines = GpuEngines(redis, Keys(config.name))
    return [replace(program, ended=partial(engines.forget_process, program.name)) for program in programs]


async def _until_over(
    job: Job,
    view: View,
    screen: Screen,
    interrupts: Interrupts,
    supervisor: ProcessSupervisor,
    watcher: Watcher,
    scaling: Scaling,
) -> None:
    """Return when the run has finished or was stopped; raise the error of anything that ends it otherwise."""
    over = asyncio.Event()

    async def follow() -> None:
        await watcher.follow()
        over.set()

    async def stop() -> None:
        await _stop_on_request(job, view, screen, interrupts)
        over.set()

    async def refresh() -> None:
        while True:
            screen.show(view)
            await asyncio.sleep(REFRESH_S)

    async def start_in_time() -> None:
        try:
            await watcher.until_started(job.config.run.start_timeout_s)
        except TimeoutError as error:
            raise RunError(f"{error}. The logs are in {job.run_dir / SERVICES_DIR}") from error

    async def watch_disk() -> None:
        await watch_disk_space(job.run_dir, screen.say)

    async def say_page() -> None:
        # Before it is ready it gives no link.
        while not (known := [p.instance for p in _coordinators(view) if p.instance and p.ready]):
            await asyncio.sleep(REFRESH_S)
        # A link that lets a browser in belongs on a terminal, not into a file.
        line = await asyncio.to_thread(page_line, known[0], job.config, may_show_secret=sys.stdout.isatty())
        if line:
            screen.say(ScreenLine(line))

    works = (follow, stop, refresh, start_in_time, watch_disk, say_page, watcher.poll, supervisor.watch, scaling.follow)
    async with task_group(*(run_until_cancelled(work.__name__, work) for work in works)):
        await over.wait()


def _coordinators(view: View) -> list[ServiceProcess]:
    return [process for process in view.processes.values() if process.service == COORDINATOR]


async def _stop_on_request(job: Job, view: View, screen: Screen, interrupts: Interrupts) -> None:
    """After the first Ctrl-C: ask the coordinator to stop, and wait as long as the run may take to drain."""

    def say(text: str, kind: Kind = "note") -> None:
        screen.say(ScreenLine(text, kind))

    await interrupts.requested.wait()
    timeout_s = job.config.run.drain_timeout_s
    coordinator = next((p.instance for p in _coordinators(view) if p.instance), None)
    learner = next((p for p in view.processes.values() if p.service == LEARNER), None)
    if coordinator is None or learner is None or not learner.ready:
        say("stopping: this session has trained nothing yet")
        return
    say(f"stopping: up to {timeout_s:g} s for the current step and a checkpoint; Ctrl-C again ends at once")
    try:
        async with api_client(job.config, timeout_s=_STOP_CALL_S) as client:
            url = api_url(coordinator.http, job.config)
            (await client.post(f"{url}/v1/stop", json={"reason": interrupts.reason})).raise_for_status()
    except httpx.HTTPError as error:
        say(f"the coordinator did not accept the stop ({type(error).__name__}: {error}); ending now", "warning")
        return
    await asyncio.sleep(timeout_s)
    say(f"the checkpoint took longer than run.drain_timeout_s ({timeout_s:g} s); ending now", "warning")
