"""The learner's shifts on GPUs that it shares with the generators (`placement: shared`); nothing where it has its own.

A shift begins when every generator sleeps, and brings the states of training to the GPUs. It ends when they are in
host memory again; the next push then wakes each generator.
produces: the shift in Redis, Sleep calls, which generation/servicer.py answers.
waits for: generators that go to sleep, start an engine or are silent, up to run.start_timeout_s.
"""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import asdict
from typing import Any

import grpc
import structlog

from gspo.common.errors import InputError
from gspo.common.network.grpc_server import open_channel, token_metadata
from gspo.common.service.app import Service
from gspo.common.streams.gpu_engines import GpuEngine, GpuEngines
from gspo.common.streams.gpu_shift import GpuShift, Shift, new_shift
from gspo.common.streams.instances import Instance, list_instances
from gspo.common.streams.keys import GENERATION, HEARTBEAT_S, INSTANCE_TTL_S
from gspo.learner.training.trainer_api import TrainerApi
from gspo_proto.generation_pb2 import SleepRequest
from gspo_proto.generation_pb2_grpc import GenerationStub

log = structlog.get_logger()
_POLL_S = 0.1
# A generator that loads weights answers only after that, and is asked again. One that has died is forgotten meanwhile.
_ASK_S = 5.0
# After a stop. The rest of run.drain_timeout_s is for the step and the checkpoint.
_STOPPED_S = 10.0


class ShiftStoppedError(Exception):
    """The run was asked to stop, and some generators keep the GPUs."""


class LearnerShifts:
    """The shifts of one learner. One task begins and ends them.

    Attributes:
        trainer: Has the states that move; None until it is started, on the GPUs.
        asleep: The uids of generators that sleep; the publisher removes those that it wakes.
        is_stopped: Whether the run was asked to stop, or this process.

    Args:
        epoch: This learner's.
        executor: The one thread in which the trainer works.
    """

    def __init__(self, service: Service, epoch: int, executor: Executor | None = None) -> None:
        self._service, self._epoch, self._executor = service, epoch, executor
        self.are_needed = service.config.placement == "shared"
        self.trainer: TrainerApi | None = None
        self.asleep: set[str] = set()
        self.is_stopped: Callable[[], bool] = service.stopping.is_set
        self._gpu_shift = GpuShift(service.redis, service.keys)
        self._engines = GpuEngines(service.redis, service.keys)
        self._present: Shift | None = None
        # Whether Redis has had a shift of this run, and when it was last found to have none.
        self._was_written, self._wiped_s = service.options.resume, float("-inf")
        # Of two writes at once, the older shift could come last.
        self._writing = asyncio.Lock()

    @property
    def has_gpus(self) -> bool:
        """Whether a shift of the learner has begun, so that no generator may wake."""
        return self._present is not None and self._present.side == "learning"

    def describe(self) -> dict[str, Any]:
        """Whose shift it is, for the heartbeat; empty without shared GPUs."""
        return asdict(self._present) if self._present else {}

    async def begin(self, purpose: str) -> float:
        """Take the GPUs, unless the learner has them or has its own; returns the seconds that it took.

        Args:
            purpose: Shown to everyone who waits, such as "step 5".

        Raises:
            TimeoutError: Some generators did not go to sleep; names them.
            ShiftStoppedError: They did not, and the run was asked to stop; the generators have the GPUs.
            InputError: Another learner has taken over the run.
        """
        if not self.are_needed or self.has_gpus:
            return 0.0
        began = time.monotonic()
        # From here on no push begins, and no generator begins to start its engine.
        self._present = new_shift(self._epoch, "learning", purpose)
        await self._write_present()
        try:
            with self._service.activity.waiting("generators"):
                await self._put_to_sleep()
        except ShiftStoppedError:
            await self._give_to_generators()
            raise
        if self.trainer is not None:
            with self._service.activity.doing("moving states", "to the GPUs"):
                await self._call(self.trainer.move_to_device)
        seconds = time.monotonic() - began
        log.info("gpus_taken", purpose=purpose, num_asleep=len(self.asleep), seconds=round(seconds, 3))
        return seconds

    async def end(self) -> float:
        """Hand the GPUs back, if the learner has them and others need them; returns the seconds that it took."""
        if not self.has_gpus or self.trainer is None:
            return 0.0
        began = time.monotonic()
        with self._service.activity.doing("moving states", "to host memory"):
            await self._call(self.trainer.move_to_host)
        await self._give_to_generators()
        seconds = time.monotonic() - began
        log.info("gpus_handed_over", seconds=round(seconds, 3))
        return seconds

    async def keep(self) -> None:
        """Write the shift again and again, so that it outlives a wipe of Redis; until cancelled."""
        while self.are_needed:
            await self._write_present()
            await asyncio.sleep(HEARTBEAT_S)

    async def _give_to_generators(self) -> None:
        shift = new_shift(self._epoch, "generation")
        async with self._writing:
            await self._write(shift)
            self._present = shift

    async def _write_present(self) -> None:
        async with self._writing:
            if self._present is not None:
                await self._write(self._present)

    async def _write(self, shift: Shift) -> None:
        written = await self._gpu_shift.write(shift)
        if written == "first" and self._was_written:
            self._wiped_s = time.monotonic()
        self._was_written = True
        if written == "refused":
            raise InputError(
                "name",
                f"another learner has taken over the run {self._service.config.name!r} and its GPUs",
                "Give each run a name of its own, or leave the run to the other learner",
            )

    async def _put_to_sleep(self) -> None:
        """Ask every generator, and wait for each that has an engine or starts one."""
        limit_s, stopped_s = self._service.config.run.start_timeout_s, None
        began_s, is_late = time.monotonic(), False
        self.asleep.clear()
        while missing := await self._missing(is_late=is_late):
            detail, now_s = "; ".join(missing), time.monotonic()
            if is_late:
                raise TimeoutError(
                    f"these generators share the learner's GPUs and do not sleep after {limit_s:g} s "
                    f"(run.start_timeout_s): {detail}"
                )
            if self.is_stopped():
                stopped_s = stopped_s or now_s
                # Without a trainer there is nothing to save.
                if self.trainer is None or now_s - stopped_s >= _STOPPED_S:
                    raise ShiftStoppedError(detail)
            is_late = now_s - began_s >= limit_s
            self._service.activity.set("waiting", "generators", f"to sleep: {detail}")
            await asyncio.sleep(_POLL_S)

    async def _missing(self, *, is_late: bool) -> list[str]:
        """Ask the generators that are not known to sleep; those that may use the GPUs, each with a reason.

        Args:
            is_late: Whether to give up silent generators that no supervisor watches.
        """
        generators = await list_instances(self._service.redis, self._service.keys, GENERATION)
        engines = await self._engines.read()
        # Last, so that a wipe since the first of these lines is noticed.
        await self._write_present()
        awake = [generator for generator in generators if generator.uid not in self.asleep]
        problems = await asyncio.gather(*(self._ask(generator) for generator in awake if generator.grpc))
        in_start = [f"{it.name} starts its engine" for it in awake if not it.grpc and it.uid in engines]
        known = self.asleep.union(generator.uid for generator in generators)
        silent = {uid: engine for uid, engine in engines.items() if uid not in known}
        if is_late:
            await self._give_up(silent)
        unseen = [
            f"{engine.name} on {engine.host} is silent, and may still have its memory" for engine in silent.values()
        ]
        if (since_wipe_s := time.monotonic() - self._wiped_s) < INSTANCE_TTL_S:
            unseen.append(
                f"Redis was wiped, and generators register again within {INSTANCE_TTL_S - since_wipe_s:.0f} s"
            )
        return [*filter(None, problems), *in_start, *unseen]

    async def _give_up(self, silent: dict[str, GpuEngine]) -> None:
        """Forget engines that no supervisor watches: an ended process looks like one that stands still."""
        for uid in [uid for uid, engine in silent.items() if not engine.is_supervised]:
            engine = silent.pop(uid)
            log.warning("engine_given_up", generator=engine.name, host=engine.host, reason="silent for too long")
            await self._engines.forget(uid)

    async def _ask(self, generator: Instance) -> str:
        """Have one generator sleep; why it does not, if so."""
        request = SleepRequest(run=self._service.config.name, epoch=self._epoch, learner=self._service.uid)
        metadata = token_metadata(self._service.options.token)
        try:
            async with open_channel(generator.grpc, self._service.config.services.tls) as channel:
                await GenerationStub(channel).Sleep(request, timeout=_ASK_S, metadata=metadata)
        except grpc.aio.AioRpcError as error:
            return f"{generator.name} ({generator.grpc}): {error.code().name}: {error.details()}"
        self.asleep.add(generator.uid)
        return ""

    async def _call(self, function: Callable[[], None]) -> None:
        await asyncio.get_running_loop().run_in_executor(self._executor, function)
