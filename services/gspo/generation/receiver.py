"""Takes pushed weights: fence, staging, digest, and only then the load. One push at a time.

The tensors of the learner's first rank come with the push; those of its other ranks are pulled from them meanwhile.
A version that another generator of this host has taken is loaded without them.

A push that is late, broken or refused changes nothing. A load that has begun ends, even if the call is cancelled. On
shared GPUs the learner also puts the engine to sleep here, between two pushes, and a push wakes it.
`servicer.py` has the calls.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator
from contextlib import aclosing, contextmanager, suppress
from dataclasses import asdict, astuple, dataclass
from typing import Any, TypeVar

import grpc
import structlog

from gspo.common.config.schema import TlsConfig
from gspo.common.network.grpc_server import open_channel, token_metadata
from gspo.common.service.app import Service
from gspo.common.streams.gpu_shift import GpuShift
from gspo.common.telemetry import metrics
from gspo.common.weights.changes import Packed
from gspo.common.weights.time_limit import TimeLimit
from gspo.generation.engine.api import EngineBrokenError, EngineLike
from gspo.generation.engine.staging import LOOK_S, PolicyCopies, PolicyPlace, StagingError
from gspo_proto.generation_pb2 import PushHeader, PushResult, SleepRequest, TensorFrame, WeightFrame
from gspo_proto.learner_pb2 import PullRequest
from gspo_proto.learner_pb2_grpc import SharesStub

log = structlog.get_logger()
T = TypeVar("T")
# Bytes a second of the first load into the engine; a quarter of it (the margin) is far below any device's.
_FIRST_LOAD_BYTES_S = 4e8


class PushRefusedError(Exception):
    """A push that must not be applied; by the status the learner knows whether to push every element instead."""

    def __init__(self, status: grpc.StatusCode, reason: str) -> None:
        super().__init__(reason)
        self.status = status


@dataclass(frozen=True)
class Fence:
    """The learner whose pushes this generator accepts. A learner of a higher epoch replaces it."""

    epoch: int = 0
    learner: str = ""

    def admits(self, header: PushHeader | SleepRequest) -> bool:
        """Whether a call is of the accepted learner, or of one with a higher epoch."""
        return header.epoch > self.epoch or (header.epoch, header.learner) == (self.epoch, self.learner)


async def pulled_frames(address: str, header: PushHeader, tls: TlsConfig, token: str) -> AsyncGenerator[WeightFrame]:
    """The frames of the tensors that another rank of the learner owns, without a limit of time."""
    request = PullRequest(version=header.version)
    if header.HasField("base_version"):
        request.base_version = header.base_version
    async with open_channel(address, tls) as channel:
        async for frame in SharesStub(channel).Pull(request, metadata=token_metadata(token)):
            yield frame


class Receiver:
    """Takes one push after another.

    Args:
        on_loaded: Called when the engine serves other weights.

    Attributes:
        digest: The digest of the weights that serve.
        fence: The accepted learner.
        num_frames: Frames of weights that came, of all pushes.
        pull: Pulls the frames of another rank: pulled_frames.
        broken: Resolves with the reason once the engine cannot serve any more.
    """

    def __init__(
        self, service: Service, engine: EngineLike, copies: PolicyCopies, on_loaded: Callable[[], None]
    ) -> None:
        self._service, self._engine, self._copies, self._on_loaded = service, engine, copies, on_loaded
        self._config = service.config.generation
        self.fence = Fence()
        self._shift = GpuShift(service.redis, service.keys) if service.config.placement == "shared" else None
        self._load_limit = TimeLimit(self._config.push_timeout_s, _FIRST_LOAD_BYTES_S)
        self._lock = asyncio.Lock()
        self._staging: asyncio.Timeout | None = None
        self._waits_for_frames, self.num_frames, self._pulled_bytes = False, 0, 0
        self.pull = pulled_frames
        self.digest = copies.serving_digest()
        self.broken: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    @property
    def is_working(self) -> bool:
        """Whether it checks or loads weights, and does not wait for the learner to send them."""
        return self._lock.locked() and not self._waits_for_frames

    async def receive(
        self, frames: AsyncIterator[WeightFrame], admit: Callable[[bool], Awaitable[None]], limit_s: float | None
    ) -> PushResult:
        """Take one version.

        Args:
            admit: Awaited when the header is admitted and this push has the lock, with whether frames are to come.
            limit_s: Time until the call's deadline, by which everything must be staged; None where it has none.

        Raises:
            PushRefusedError: The push is not for this generator, is late or without a deadline, or is not what its
                header says. Or it comes from a replaced learner, or in the learner's shift.
            StagingError: A frame does not fit this model.
            LoadFailedError: The weights did not load; the old ones are back.
            EngineBrokenError: There is no engine any more.
        """
        if limit_s is None:
            raise _precondition("a push needs a deadline: set a timeout on the call")
        began = time.monotonic()
        header = await _header(frames)
        self._check_model(header)
        self._check_fence(header)
        async with self._lock:
            self._check_fence(header)
            await self._check_shift()
            if header.base_digest and header.base_digest != self.digest:
                raise _precondition(
                    f"the changes are to {header.base_digest[:12]} and {self.digest[:12]} is here; push every element"
                )
            try:
                await self._stage(header, frames, admit, began + limit_s)
                if header.version == self._engine.version == 0:
                    await asyncio.to_thread(self._check_start)
                return await _uncancelled(self._switch(header, time.monotonic() - began))
            finally:
                self._copies.abandon()

    async def sleep(self, request: SleepRequest) -> None:
        """Put the engine to sleep, after a push that is being taken; weights then wait for the generators' shift.

        Raises:
            PushRefusedError: The learner was replaced, or is of another run. Or this engine has no sleep mode.
            EngineBrokenError: There is no engine any more.
        """
        self._check_run(request)
        if self._shift is None:
            raise _precondition(
                "this generator has GPUs of its own (placement: split), and its engine no sleep mode: learner and "
                "generators need the same placement"
            )
        self._check_fence(request)
        async with self._lock:
            self._check_fence(request)
            await _uncancelled(self._sleep())

    async def _sleep(self) -> None:
        with self._ending_if_broken():
            await self._engine.sleep(on_update=self._config.on_update, timeout_s=self._config.push_timeout_s)
        log.info("engine_asleep", serving=self._engine.version)

    async def _stage(
        self,
        header: PushHeader,
        frames: AsyncIterator[WeightFrame],
        admit: Callable[[bool], Awaitable[None]],
        deadline_s: float,
    ) -> None:
        """Stage the version: from the frames, unless this host has it or another generator here takes it now."""
        try:
            async with asyncio.timeout(deadline_s - time.monotonic()) as self._staging:
                place = await _uncancelled(asyncio.to_thread(self._copies.find, header.digest))
                await admit(place is PolicyPlace.NOWHERE)
                if place is PolicyPlace.NOWHERE:
                    await self._take(header, frames)
                elif place is PolicyPlace.ELSEWHERE:
                    await self._await_other(header)
            self._check_fence(header)
        except TimeoutError as error:
            self._check_fence(header)
            raise PushRefusedError(
                grpc.StatusCode.DEADLINE_EXCEEDED,
                f"version {header.version} was not here by the deadline of the call; nothing was loaded",
            ) from error
        finally:
            self._staging = None

    async def _take(self, header: PushHeader, frames: AsyncIterator[WeightFrame]) -> None:
        """Stage the frames, and offer the policy to the other generators of this host."""
        await self._write_all(header, frames)
        digest = await _uncancelled(asyncio.to_thread(self._copies.staged_digest))
        self._check_fence(header)
        if digest != header.digest:
            raise PushRefusedError(
                grpc.StatusCode.DATA_LOSS,
                f"version {header.version} has digest {header.digest[:12]} and {digest[:12]} came, with "
                f"{len(self._copies.staged.fingerprints)} of {header.num_tensors} tensors; nothing was loaded",
            )
        await _uncancelled(asyncio.to_thread(self._copies.finish))

    async def _await_other(self, header: PushHeader) -> None:
        """Wait for the version while another generator of this host takes it.

        Raises:
            PushRefusedError: The other one has not ended its push. The next one is to this generator itself, at once.
        """
        place = PolicyPlace.ELSEWHERE
        while place is PolicyPlace.ELSEWHERE:
            await asyncio.sleep(LOOK_S)
            place = await _uncancelled(asyncio.to_thread(self._copies.find, header.digest))
        if place is PolicyPlace.NOWHERE:
            raise PushRefusedError(
                grpc.StatusCode.ABORTED,
                f"another generator of this host began to take version {header.version} and has not ended it; nothing "
                "was loaded",
            )

    def _check_start(self) -> None:
        """Compare the original model as the learner has it with this generator's: its rollouts count as version 0's."""
        if name := self._copies.differing_tensor():
            raise _mismatch(
                f"{name} has other values in this generator than in the learner: they read different models. Give "
                "both the same files under model.path"
            )

    async def _write_all(self, header: PushHeader, frames: AsyncIterator[WeightFrame]) -> None:
        """Stage the frames of the call, and meanwhile those of the learner's other ranks."""
        self._waits_for_frames, self._pulled_bytes = True, 0
        pulls: list[asyncio.Task[None]] = []
        try:
            await _uncancelled(asyncio.to_thread(self._copies.begin, changes=bool(header.base_digest)))
            pulls += [asyncio.create_task(self._pull_share(address, header)) for address in header.sources]
            async for frame in frames:
                await self._write_frame(frame)
            await asyncio.gather(*pulls)
        except StagingError:
            # With frames still on their way, the sender would see "Internal error" instead of the refusal.
            async for _ in frames:
                continue
            raise
        finally:
            for pull in pulls:
                pull.cancel()
            if pulls:
                await _uncancelled(asyncio.wait(pulls))
            self._waits_for_frames = False

    async def _pull_share(self, address: str, header: PushHeader) -> None:
        """Stage the frames of one rank.

        Raises:
            PushRefusedError: The rank is gone, or has newer versions alone.
        """
        tls, token = self._service.config.services.tls, self._service.options.token
        try:
            async with aclosing(self.pull(address, header, tls, token)) as frames:
                async for frame in frames:
                    self._pulled_bytes += frame.ByteSize()
                    await self._write_frame(frame)
        except grpc.aio.AioRpcError as error:
            is_gone = error.code() is grpc.StatusCode.NOT_FOUND
            raise PushRefusedError(
                grpc.StatusCode.NOT_FOUND if is_gone else grpc.StatusCode.UNAVAILABLE,
                f"a rank of the learner at {address} did not send its share of version {header.version} "
                f"({error.code().name}: {error.details()}); nothing was loaded",
            ) from error

    async def _write_frame(self, frame: WeightFrame) -> None:
        self.num_frames += 1
        await _uncancelled(asyncio.to_thread(self._write, frame.tensors))

    def _write(self, tensors: Iterable[TensorFrame]) -> None:
        for run in tensors:
            if run.HasField("changes"):
                packed = Packed(run.changes.num_listed, run.changes.packed)
                self._copies.change(run.name, run.offset, run.num_elements, packed)
            else:
                self._copies.write(run.name, run.offset, run.data)

    async def _switch(self, header: PushHeader, staged_s: float) -> PushResult:
        with self._service.activity.doing("loading weights", f"version {header.version}"):
            limit_s = self._load_limit.seconds(header.num_bytes)
            with self._ending_if_broken():
                if self._engine.is_asleep:
                    times = await self._engine.wake(header.version, self._copies, timeout_s=limit_s)
                else:
                    times = await self._engine.load(
                        header.version, self._copies, on_update=self._config.on_update, timeout_s=limit_s
                    )
        self._load_limit.record(header.num_bytes, times.load_s)
        self.digest = header.digest
        metrics.GENERATOR_VERSION.set(header.version)
        metrics.PUSH_PAUSE_SECONDS.observe(sum(astuple(times)))
        checksum = await self._checksum(header)
        self._on_loaded()
        log.info("version_loaded", version=header.version, digest=header.digest[:12], stage_s=round(staged_s, 4))
        return PushResult(
            version=header.version,
            digest=header.digest,
            stage_s=staged_s,
            pulled_bytes=self._pulled_bytes,
            checksum=checksum,
            **asdict(times),
        )

    async def _checksum(self, header: PushHeader) -> str:
        """That of the loaded weights, if this version is one of those that are compared."""
        every = self._config.checksums_every
        if not every or header.version % every:
            return ""
        with self._ending_if_broken():
            return await self._engine.checksum(self._load_limit.seconds(header.num_bytes))

    @contextmanager
    def _ending_if_broken(self) -> Iterator[None]:
        try:
            yield
        except EngineBrokenError as error:
            if not self.broken.done():
                self.broken.set_result(str(error))
            raise

    async def _check_shift(self) -> None:
        """Refuse weights while the learner has the GPUs: an engine that wakes would take its memory."""
        shift = await self._shift.read() if self._shift else None
        if shift and shift.side == "learning":
            raise _precondition(f"the learner has the GPUs ({shift.purpose}); weights come after its shift")

    def _check_fence(self, header: PushHeader | SleepRequest) -> None:
        """Accept a learner of a higher epoch from its first call on, and end an older learner's push."""
        if not self.fence.admits(header):
            raise PushRefusedError(
                grpc.StatusCode.PERMISSION_DENIED,
                f"this generator accepts learner {self.fence.learner} of epoch {self.fence.epoch}; this call is of "
                f"learner {header.learner} of epoch {header.epoch}",
            )
        if header.epoch > self.fence.epoch:
            self.fence = Fence(header.epoch, header.learner)
            if self._staging and not self._staging.expired():  # a late push ends anyway
                self._staging.reschedule(asyncio.get_running_loop().time())

    def _check_model(self, header: PushHeader) -> None:
        self._check_run(header)
        num_bytes = self._copies.num_bytes
        if header.dtype != self._config.dtype:
            raise _mismatch(f"this generator serves {self._config.dtype}, not {header.dtype}")
        # Fewer are no mismatch: a folder may hold tensors that the architecture ignores. The engine refuses the others.
        if header.num_tensors > len(self._copies.places) or header.num_bytes > num_bytes:
            raise _mismatch(
                f"the push has {header.num_tensors} tensors of {header.num_bytes} bytes, and the model folder of this "
                f"generator {len(self._copies.places)} of {num_bytes}: sender and receiver hold different models"
            )

    def _check_run(self, header: PushHeader | SleepRequest) -> None:
        if header.run != (run := self._service.config.name):
            raise _precondition(f"this generator is of run {run}, not {header.run}")


def _precondition(reason: str) -> PushRefusedError:
    return PushRefusedError(grpc.StatusCode.FAILED_PRECONDITION, reason)


def _mismatch(reason: str) -> PushRefusedError:
    """A refusal for good: every push of this sender would be refused."""
    return PushRefusedError(grpc.StatusCode.INVALID_ARGUMENT, reason)


async def _header(frames: AsyncIterator[WeightFrame]) -> PushHeader:
    first = await anext(aiter(frames), None)
    if first is None or not first.HasField("header"):
        raise _precondition("a push begins with its header")
    return first.header


async def _uncancelled(work: Coroutine[Any, Any, T]) -> T:
    """Work on the staged copy. A cancelled caller waits for the end: no other push may touch the copy before.

    Two cancellations may come, since our deadline and gRPC's are the same moment.
    """
    task = asyncio.create_task(work)
    try:
        return await asyncio.shield(task)
    finally:
        while not task.done():
            with suppress(asyncio.CancelledError):  # the first one is raised by the shield
                await asyncio.wait({task})
