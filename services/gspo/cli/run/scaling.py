"""Changes the number of a service's processes while a run is running: the request of `gspo scale`, and its answer.

`gspo run` answers, on one machine or a cluster. A new process starts like one that is started again. One too many gets
SIGTERM: it finishes what it has, or leaves it to the others when its time is over.
"""

import asyncio
import json
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from redis.asyncio import Redis

from gspo.cli.monitor.view import ScreenLine, ServiceProcess, View
from gspo.cli.processes.child import Program
from gspo.cli.processes.gpu_locks import lock_gpus
from gspo.cli.processes.placement import Placement
from gspo.cli.processes.programs import Job
from gspo.cli.processes.supervisor import ProcessSupervisor
from gspo.cli.rundir.open_run import connect_once, open_run
from gspo.cli.rundir.start import is_run_dir_locked, write_supervisor_facts
from gspo.common.config.schema import Config
from gspo.common.errors import InputError
from gspo.common.host.machine import GIB, free_memory, gpus_of_engine
from gspo.common.streams.keys import GATEWAY, GENERATION, REWARD, Keys
from gspo.common.tasks import task_group

SCALABLE = (GENERATION, REWARD, GATEWAY)
_MOST = 4096
_POLL_S, _REPLY_S, _KEPT_S = 0.5, 8, 60


def scale(run_dir: Path | None, words: str) -> str:
    """Ask a run for another number of processes; returns its answer.

    Args:
        words: Such as "generation=6".

    Raises:
        InputError: The run refuses it, or does not run.
    """
    service, _, number = words.partition("=")
    if not number.isdigit():
        raise InputError(words, "is not SERVICE=NUMBER", "For example: gspo scale generation=6")
    run = open_run(run_dir)
    if run.redis_url is None or not is_run_dir_locked(run.run_dir):
        raise InputError(str(run.run_dir), "does not run", "Set the number of replicas in its configuration instead")
    return asyncio.run(_ask(run.redis_url, run.config, service, int(number)))


async def _ask(url: str, config: Config, service: str, number: int) -> str:
    keys = Keys(config.name)
    request = json.dumps({"service": service, "number": number, "reply": keys.key(f"scale:{uuid.uuid4().hex}")})
    async with connect_once(url, config) as redis:
        await redis.rpush(keys.scale, request)
        entry = await redis.blpop([json.loads(request)["reply"]], timeout=_REPLY_S)
        if entry is None:
            await redis.lrem(keys.scale, 0, request)
            raise InputError(
                "gspo run", f"has not answered for {_REPLY_S} s", "It may be ending; look at `gspo status`"
            )
    reply = json.loads(entry[1])
    if "refusal" in reply:
        raise InputError(*reply["refusal"])
    return str(reply["line"])


def check_memory(config: Config, num_added: int) -> None:
    """Refuse new generators without GPUs whose KV caches do not fit, as a start does.

    Args:
        config: With all generators, also those.

    Raises:
        InputError: This machine has too little free memory.
    """
    each, free, number = config.generation.kv_cache_gb, free_memory() / GIB, config.generation.replicas
    if each * num_added > free:
        raise InputError(
            f"{GENERATION}={number}",
            f"{num_added} more take {each * num_added:.1f} GiB of memory for their KV caches "
            f"(generation.kv_cache_gb: {each:g}), and {free:.1f} GiB are free",
            f"Set at most {GENERATION}={number - num_added + int(free / each)}",
        )


class Scaling:
    """Answers requests of `gspo scale` for one session.

    Args:
        programs: Makes the programs of a job.
        say: Called with every line for the screen.
    """

    def __init__(
        self,
        job: Job,
        view: View,
        supervisor: ProcessSupervisor,
        redis: Redis,
        redis_url: str,
        programs: Callable[[Job], list[Program]],
        say: Callable[[ScreenLine], None],
    ) -> None:
        self._job, self._view, self._supervisor = job, view, supervisor
        self._redis, self._redis_url, self._programs, self._say = redis, redis_url, programs, say
        self._keys = Keys(job.config.name)
        self._locks: dict[str, ExitStack] = {}

    async def follow(self) -> None:
        """Answer requests without end."""
        await self._redis.delete(self._keys.scale)  # those of an earlier session
        self._write_counts()
        async with task_group() as ends:
            while True:
                while request := await self._redis.lpop(self._keys.scale):
                    await self._answer(ends, **json.loads(cast(bytes, request)))
                await asyncio.sleep(_POLL_S)

    async def _answer(self, ends: asyncio.TaskGroup, service: str, number: int, reply: str) -> None:
        answer: dict[str, Any]
        try:
            answer = {"line": await self._scaled(ends, service, number)}
            self._say(ScreenLine(answer["line"]))
        except InputError as error:
            answer = {"refusal": [error.where, error.rule, error.fix]}
        await self._redis.rpush(reply, json.dumps(answer))
        await self._redis.expire(reply, _KEPT_S)

    async def _scaled(self, ends: asyncio.TaskGroup, service: str, number: int) -> str:
        """Start or end processes; returns a line about it.

        Raises:
            InputError: It cannot be done.
        """
        self._check(service, number)
        before = self._job.names
        config = self._job.config.with_keys(**{service: {"replicas": number}})
        job = replace(self._job, config=config)
        added = [name for name in job.names if name not in before]
        dropped = [name for name in before if name not in job.names]
        if still := [name for name in added if name in self._supervisor.children]:
            raise InputError(
                f"{service}={number}", f"{', '.join(still)} has not ended yet", "Try again in some seconds"
            )
        if added:
            job = await self._with_places(job, service, added)
        self._job = job
        self._write_counts()
        self._start([program for program in self._programs(job) if program.name in added])
        if dropped:
            ends.create_task(self._end(dropped))
        what = f"starting {', '.join(added)}" if added else f"{', '.join(dropped)} end when their work is done or saved"
        kept = len([name for name in before if name.startswith(f"{service}-")])
        return f"{service}: {kept} -> {number}" + (f"; {what}" if added or dropped else "")

    def _check(self, service: str, number: int) -> None:
        known = [name for name in SCALABLE if name in self._job.services]
        if service not in known:
            raise InputError(service, "has no number of processes in this run", f"Choose of {', '.join(known)}")
        if not 1 <= number <= _MOST:
            raise InputError(f"{service}={number}", f"is not between 1 and {_MOST}", "A run needs one of each service")
        if service == GENERATION and self._job.config.placement == "shared":
            raise InputError(
                f"{service}={number}",
                "generators share the learner's GPUs (placement: shared), all of which have one",
                "Change learner.ranks and generation.replicas, and resume the run",
            )

    async def _with_places(self, job: Job, service: str, added: Sequence[str]) -> Job:
        """The job with places for new processes.

        Raises:
            InputError: There are too few.
        """
        if job.nodes:
            await job.nodes.add(added)
            return job
        placement = job.placement
        if service != GENERATION:
            return job
        if not placement.gpus:
            check_memory(job.config, len(added))
            return job
        each = gpus_of_engine(job.config.generation.engine)
        if each * len(added) > len(placement.free):
            free = f"{len(placement.free)} ({', '.join(gpu.name for gpu in placement.free) or 'none'})"
            raise InputError(
                f"{service}={job.config.generation.replicas}",
                f"{len(added)} more need {each * len(added)} GPUs, and free are {free}",
                f"Set at most {service}={job.config.generation.replicas - len(added) + len(placement.free) // each}",
            )
        gpus = dict(placement.gpus)
        for at, name in enumerate(added):
            gpus[name] = placement.free[at * each : (at + 1) * each]
            lock = ExitStack()
            lock.enter_context(lock_gpus(gpus[name], job.run_dir, gpus[name]))
            self._locks[name] = lock
        return replace(job, placement=Placement(gpus, placement.free[each * len(added) :], placement.in_shifts))

    def _start(self, programs: Sequence[Program]) -> None:
        for program in programs:
            self._view.processes[program.name] = ServiceProcess(program.name, time.time())
        # As after a death: the run is in its middle.
        self._supervisor.start([replace(it, command=it.command + it.restart_options) for it in programs])

    async def _end(self, names: Sequence[str]) -> None:
        await self._supervisor.retire(names, self._job.config.run.drain_timeout_s)
        for name in names:
            self._view.processes.pop(name, None)
            if lock := self._locks.pop(name, None):
                lock.close()
        if self._job.nodes:
            await self._job.nodes.remove(names)
        placement = self._job.placement
        gpus = {name: them for name, them in placement.gpus.items() if name not in names}
        back = tuple(gpu for name in names for gpu in placement.gpus.get(name, ()) if gpu not in placement.free)
        self._job = replace(self._job, placement=Placement(gpus, placement.free + back, placement.in_shifts))
        self._say(ScreenLine(f"{', '.join(names)} ended"))

    def _write_counts(self) -> None:
        counts = Counter(name.rpartition("-")[0] for name in self._job.names)
        write_supervisor_facts(self._job.run_dir, self._redis_url, **counts)
