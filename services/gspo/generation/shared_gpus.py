"""A generator on GPUs that it shares with the learner: it starts its engine in the generators' shift alone.

produces: the record of its engine, as long as that may hold memory of the GPUs.
waits for: the generators' shift, unblocked by the learner (learner/push/shifts.py).
"""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import structlog

from gspo.common.service.app import Service
from gspo.common.streams.gpu_engines import GpuEngine, GpuEngines
from gspo.common.streams.gpu_shift import GpuShift
from gspo.common.streams.instances import list_instances
from gspo.common.streams.keys import HEARTBEAT_S, LEARNER

_POLL_S = 0.2
log = structlog.get_logger()


@asynccontextmanager
async def gpus_of(service: Service) -> AsyncIterator[None]:
    """A block in which this generator may have an engine; on shared GPUs it begins in the generators' shift.

    Raises:
        TimeoutError: No learner has been there for run.start_timeout_s.
        CancelledError: The service was asked to end.
    """
    if service.config.placement != "shared":
        yield
        return
    engines, engine = GpuEngines(service.redis, service.keys), GpuEngine.of_this_process(service.options.name)
    await _wait_for_shift(service, engines, engine)
    keeping = asyncio.create_task(_keep(service, engines, engine), name="record of the engine")
    try:
        yield
    finally:
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
        await engines.forget(service.uid)


async def _keep(service: Service, engines: GpuEngines, engine: GpuEngine) -> None:
    """Write the record again and again, so that it outlives a wipe of Redis; until cancelled."""
    while True:
        await asyncio.sleep(HEARTBEAT_S)
        await engines.keep(service.uid, engine)


async def _wait_for_shift(service: Service, engines: GpuEngines, engine: GpuEngine) -> None:
    """Wait until the engine may start, as long as a learner is there.

    Meanwhile the heartbeat continues, so the generator does not count as dead.
    """
    shift, limit_s = GpuShift(service.redis, service.keys), service.config.run.start_timeout_s
    seen_s = looked_s = time.monotonic()
    if not await engines.may_start(service.uid, engine):
        log.info("gpus_awaited", detail="the learner has the GPUs; the engine starts in the generators' shift")
    while not await engines.may_start(service.uid, engine):
        if service.stopping.is_set():
            raise asyncio.CancelledError
        if time.monotonic() - looked_s > 1.0:
            looked_s = time.monotonic()
            seen_s = looked_s if await list_instances(service.redis, service.keys, LEARNER) else seen_s
        if time.monotonic() - seen_s > limit_s:
            raise TimeoutError(
                f"no learner has handed over the GPUs (placement: shared), and none has been there for {limit_s:g} s "
                "(run.start_timeout_s)"
            )
        service.activity.set("waiting", "gpus", await _present_use(shift))
        await asyncio.sleep(_POLL_S)


async def _present_use(shift: GpuShift) -> str:
    present = await shift.read()
    return f"the learner has them ({present.purpose})" if present else "the learner to come"
