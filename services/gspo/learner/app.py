"""The life of the learner process: take the run directory, recover, train, end.

Rank 0 lives it; the others follow.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from gspo.common.config.schema import Config
from gspo.common.model.folder import model_folder
from gspo.common.network.grpc_server import GrpcServer
from gspo.common.network.http_server import HttpServer
from gspo.common.service.app import Service
from gspo.common.service.health import HealthProbes
from gspo.common.service.tasks import end_tasks
from gspo.common.streams.events import Events
from gspo.common.streams.instances import Instance, Registration
from gspo.common.streams.keys import LEARNER
from gspo.common.telemetry import metrics
from gspo.learner.loop import Learner
from gspo.learner.recovery import recover
from gspo.learner.servicer import SERVICE_NAME, LearnerGrpcServicer
from gspo.learner.storage.disk_space import DiskSpace
from gspo.learner.storage.run_directory import RunDir
from gspo.learner.telemetry.trackers import Trackers
from gspo.learner.training.trainer_api import StartTrainer
from gspo_proto import learner_pb2_grpc


async def live(service: Service, start: StartTrainer) -> None:
    """Hold the run directory, and train until the run is finished or the service is stopped.

    Args:
        start: orders.RankZero, or one that simulates.
    """
    options = service.options
    http = HttpServer(HealthProbes(service), options.host, options.http_port, service.config.services)
    instance = Instance(LEARNER, options.name, http=http.address, pid=os.getpid())
    registration = Registration(service.redis, service.keys, instance, service.activity, dict)
    running = {asyncio.create_task(http.run())}
    thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="trainer")
    try:
        disk = DiskSpace(service.activity, service.stopping.is_set)
        with await asyncio.to_thread(_open, options.run_dir, disk) as run_dir:
            metrics.DISK_FREE.set_function(lambda: shutil.disk_usage(options.run_dir).free)
            metrics.DISK_SIZE.set_function(lambda: shutil.disk_usage(options.run_dir).total)
            # Before the model and the replay, which take a while: whoever looks sees what this process is doing.
            beating = asyncio.create_task(registration.run())
            running.add(beating)
            learner = await _recovered(service, run_dir, thread, start, disk)
            await _serve(service, learner, registration, beating)
            await learner.trainer.release_ranks()
    finally:
        await end_tasks(running)
        thread.shutdown(cancel_futures=True)


def _open(path: Path, disk: DiskSpace) -> RunDir:
    return disk.retry_until_written("the run directory's lock and epoch", path, lambda: RunDir(path, disk))


async def run_follower(service: Service, follow: Callable[[Config, Path, Path], None]) -> None:
    """Train as rank 0 orders, until it says that this is the end: it alone answers signals and talks to others."""
    try:
        model = model_folder(service.config.model)
        await asyncio.to_thread(follow, service.config, model, service.options.run_dir)
    finally:
        await service.redis.aclose()


async def _recovered(
    service: Service, run_dir: RunDir, thread: ThreadPoolExecutor, start: StartTrainer, disk: DiskSpace
) -> Learner:
    model = model_folder(service.config.model)
    loop = asyncio.get_running_loop()
    recovering = loop.run_in_executor(thread, recover, service.config, model, run_dir, service.activity, start)
    return Learner(service, run_dir, await recovering, thread, disk)


async def _serve(service: Service, learner: Learner, registration: Registration, beating: asyncio.Task[None]) -> None:
    options = service.options
    position = await Events(service.redis, service.keys, options.service).newest()
    grpc_server = GrpcServer(
        lambda server: learner_pb2_grpc.add_LearnerServicer_to_server(
            LearnerGrpcServicer(learner.progress, learner.checkpoint_now), server
        ),
        (SERVICE_NAME,),
        host=options.host,
        port=options.grpc_port,
        token=options.token,
        tls=service.config.services.tls,
    )
    await grpc_server.start()
    await registration.open(grpc_server.address, learner.facts)
    trackers = Trackers(service.config.tracking, options.run_dir)
    try:
        await service.run(
            learner.run(),
            {
                "heartbeat": _outcome(beating),
                "intake": learner.batches.intake.run(),
                "publisher": learner.versions.publisher.run(),
                "events": learner.watch_events(position),
                "trackers": trackers.run(),
                "stop": _stop_on_request(service, learner),
                "ranks": learner.trainer.send_rank_heartbeats(service.config.learner.rank_timeout_s),
            },
        )
    finally:
        await asyncio.gather(grpc_server.stop(grace_s=1.0), trackers.finish())


async def _outcome(task: asyncio.Task[None]) -> None:
    await task


async def _stop_on_request(service: Service, learner: Learner) -> None:
    await service.stopping.wait()
    learner.stop("the learner was asked to end")
