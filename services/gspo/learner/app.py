"""The learner service: takes the run directory, recovers the run, trains until it ends.

Rank 0 runs as an app; the other ranks follow it.
"""

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc

from gspo.common.config.schema import Config
from gspo.common.model.files import model_folder, read_model_files
from gspo.common.network.grpc_server import GrpcApi
from gspo.common.service.app import App, Service, run_app
from gspo.common.streams.events import Events
from gspo.common.telemetry import metrics
from gspo.learner.loop import Learner
from gspo.learner.push.copy_memory import copies_beside_training
from gspo.learner.push.shifts import LearnerShifts, ShiftStoppedError
from gspo.learner.recovery import compare_with_files, recover
from gspo.learner.run_end import RunEndCondition
from gspo.learner.shares.share_server import ShareServer
from gspo.learner.storage.durable_files import DiskSpace
from gspo.learner.storage.run_directory import RunDir
from gspo.learner.trackers import Trackers
from gspo.learner.training.trainer_api import StartTrainer
from gspo_proto import learner_pb2_grpc
from gspo_proto.learner_pb2 import (
    CheckpointReply,
    CheckpointRequest,
    ProgressReply,
    ProgressRequest,
    ResultsReply,
    ResultsRequest,
)

Context = grpc.aio.ServicerContext[Any, Any]


async def run_learner(service: Service, start_trainer: StartTrainer) -> None:
    """Train until the run is finished or the service is stopped.

    Args:
        start_trainer: rank_control.RankZero, or one that simulates.
    """
    startup = _Startup(service, start_trainer)
    await run_app(service, startup.open, claim=startup.claim)


async def run_follower(service: Service, follow: Callable[[Config, Path, Path, ShareServer], None]) -> None:
    """Train as rank 0 commands until it ends this rank, and serve this rank's share of each version to generators.

    Rank 0 alone answers signals and talks to other services.
    """
    server = ShareServer(service)
    try:
        await server.start()
        model = model_folder(service.config.model)
        await asyncio.to_thread(follow, service.config, model, service.options.run_dir, server)
    finally:
        await server.stop()
        await service.close()


class _Startup:
    """The run directory first, which only one learner may have, then the model and the replay of the log."""

    def __init__(self, service: Service, start_trainer: StartTrainer) -> None:
        self._service, self._start_trainer = service, start_trainer
        self._disk = DiskSpace(service.activity, service.stopping.is_set)

    @asynccontextmanager
    async def claim(self) -> AsyncIterator[None]:
        path, disk = self._service.options.run_dir, self._disk
        opening = asyncio.to_thread(
            disk.retry_until_written, "the run directory's lock and epoch", path, lambda: RunDir(path, disk)
        )
        with await opening as self._run_dir:
            metrics.DISK_FREE.set_function(lambda: shutil.disk_usage(path).free)
            metrics.DISK_SIZE.set_function(lambda: shutil.disk_usage(path).total)
            yield

    @asynccontextmanager
    async def open(self, service: Service) -> AsyncIterator[App]:
        config, run_dir, leave_out = service.config, self._run_dir, service.options.leave_out
        if leave_out is not None:
            await asyncio.to_thread(run_dir.leave_out, leave_out)
        if not RunEndCondition(config.run).reason(run_dir.last_step, run_dir.trained_s):
            await asyncio.to_thread(run_dir.reopen_unused)
        executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="trainer")
        try:
            model = model_folder(config.model)
            files = read_model_files(model, allow_pickle=config.model.allow_pickle)
            beside = copies_beside_training(config, files, service.options.host)
            shifts = LearnerShifts(service, run_dir.epoch, executor)
            try:
                await shifts.begin("loading the model")
            except ShiftStoppedError:
                raise asyncio.CancelledError from None
            recovered = await asyncio.get_running_loop().run_in_executor(
                executor, recover, config, model, run_dir, service.activity, self._start_trainer
            )
            shifts.trainer = recovered.trainer
            notices = recovered.notices + compare_with_files(model, files, recovered.weights)
            recovered = replace(recovered, notices=notices)
            learner = Learner(service, run_dir, recovered, executor, self._disk, shifts, beside)
            # With it goes the last reference to the first policy, once there is a newer one.
            del recovered
            position = await Events(service.redis, service.keys, service.options.name).newest()
            trackers = Trackers(config.tracking, run_dir.path)
            try:
                yield _app(service, learner, trackers, position, shifts)
            finally:
                await learner.checkpoints.close()
                await trackers.finish()
            await learner.trainer.release_ranks()
        finally:
            await asyncio.to_thread(executor.shutdown, cancel_futures=True)


def _app(service: Service, learner: Learner, trackers: Trackers, position: bytes, shifts: LearnerShifts) -> App:
    async def stop_on_request() -> None:
        await service.stopping.wait()
        learner.stop("the learner was asked to end")

    return App(
        learner.run,
        background={
            "intake": learner.intake.run,
            "publisher": learner.publisher.run,
            "events": lambda: learner.watch_events(position),
            "trackers": trackers.run,
            "tokens": learner.tokens.run,
            "stop": stop_on_request,
            "shift": shifts.keep,
            "ranks": lambda: learner.trainer.send_rank_heartbeats(service.config.learner.rank_timeout_s),
        },
        grpc=GrpcApi(
            "gspo.Learner",
            lambda server: learner_pb2_grpc.add_LearnerServicer_to_server(LearnerGrpcServicer(learner), server),
        ),
        facts=learner.facts,
        sets_ready=True,
    )


class LearnerGrpcServicer(learner_pb2_grpc.LearnerServicer):
    """Serves gspo.Learner: its progress, a checkpoint on request, and the results of groups."""

    def __init__(self, learner: Learner) -> None:
        self._learner = learner

    async def Progress(self, _request: ProgressRequest, _context: Context) -> ProgressReply:
        """Version, settled groups, counts."""
        return self._learner.progress()

    async def Checkpoint(self, _request: CheckpointRequest, _context: Context) -> CheckpointReply:
        """A checkpoint after the current step."""
        return await self._learner.checkpoint_now()

    async def Results(self, request: ResultsRequest, _context: Context) -> ResultsReply:
        """The results of settled groups from a place on."""
        return self._learner.results(request.first)
