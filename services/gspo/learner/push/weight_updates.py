"""Weight updates for generators: every element of a version, or the changes since an earlier one, in frames.

The changes of each version are packed once for all generators. A generator that is some versions behind gets those of
the last versions one by one. Packed changes are small, and need none of the policies that they were made from.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from itertools import dropwhile, islice
from typing import Literal

from gspo.common.weights.changes import Bits, pack_changes
from gspo.learner.push.policy_weights import PolicyFacts, PolicyWeights
from gspo_proto.generation_pb2 import Changes, PushHeader, TensorFrame, WeightFrame

UpdateKind = Literal["full", "changes"]
# Far below gRPC's limit for a message. Larger ones are slower (4 MiB: a third of the rate): each copy of one is memory
# that the allocator takes from the system anew.
FRAME_BYTES = 2**20
# Runs of elements that are packed at a time, each in a thread.
PACKING_THREADS = 4
# Of a policy's bytes; more changes than that come near to a push of every element.
_MOST_KEPT_SHARE = 0.25


class WholePolicy:
    """A version with every element; its frames are made as they are sent.

    Attributes:
        target: The version that it brings.
        base: The receiver needs none.
    """

    kind: UpdateKind = "full"
    base = None

    def __init__(self, policy: PolicyWeights, frame_bytes: int = FRAME_BYTES) -> None:
        self.target = policy.facts
        self._policy, self._frame_bytes = policy, frame_bytes

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for name, run in _runs(self._policy, self._frame_bytes):
            # To copy so little takes less time than to hand it to a thread.
            yield _serialized([_whole(name, run, self._policy.bits[name].reshape(-1)[run])])


class PackedChanges:
    """The changes from a version to the next, packed in threads once for all generators.

    Iterating gives the frames, as often as it is done; the first ones come while others are packed.

    Attributes:
        target: The version that it brings.
        base: The version that the receiver has.
        own_bytes: Size of the tensors that this rank owns.

    Args:
        frame_bytes: Most bytes of weights in one run of elements; a frame ends with the run that fills it.
    """

    def __init__(self, policy: PolicyWeights, base: PolicyWeights, frame_bytes: int = FRAME_BYTES) -> None:
        self.target, self.base = policy.facts, base.facts
        self.own_bytes = sum(bits.nbytes for bits in policy.bits.values())
        # Until the packing begins, which lets them go at its end.
        self._versions: tuple[PolicyWeights, PolicyWeights] | None = (policy, base)
        self._frame_bytes = frame_bytes
        self._frames: list[bytes] = []
        self._packing: asyncio.Task[None]
        self._grown = asyncio.Event()

    async def pack(self) -> int:
        """Pack all changes, and let both policies go: only the frames are kept, whose bytes it returns."""
        await self._begin_packing()
        return sum(map(len, self._frames))

    async def __aiter__(self) -> AsyncIterator[bytes]:
        packing, number = self._begin_packing(), 0
        while number < len(self._frames) or not packing.done():
            if number == len(self._frames):
                self._grown.clear()
                await self._grown.wait()
                continue
            yield self._frames[number]
            number += 1
        packing.result()  # raises its failure

    def _begin_packing(self) -> asyncio.Task[None]:
        """The packing: the first that needs it begins it, and the end of a push does not end it."""
        if self._versions is not None:
            self._packing, self._versions = asyncio.create_task(self._pack(*self._versions)), None
            self._packing.add_done_callback(self._end_packing)
        return self._packing

    def _end_packing(self, packing: asyncio.Task[None]) -> None:
        self._grown.set()
        if not packing.cancelled():
            packing.exception()  # raised where the packing is awaited, if it is

    async def _pack(self, policy: PolicyWeights, base: PolicyWeights) -> None:
        runs, waiting = _runs(policy, self._frame_bytes), deque[asyncio.Task[TensorFrame | None]]()
        filled: list[TensorFrame] = []
        while True:
            for run in islice(runs, PACKING_THREADS - len(waiting)):
                waiting.append(asyncio.create_task(asyncio.to_thread(_packed_run, policy, base, *run)))
            if not waiting:
                break
            packed = await waiting.popleft()
            filled += [packed] if packed else []
            if sum(len(tensor.data) + len(tensor.changes.packed) for tensor in filled) >= self._frame_bytes:
                self._add(filled)
        self._add(filled)

    def _add(self, filled: list[TensorFrame]) -> None:
        """Write a frame, and wake the pushes that wait for it."""
        if filled:
            self._frames.append(_serialized(filled))
            filled.clear()
            self._grown.set()


class ChainedChanges:
    """The changes of consecutive versions as one update; a generator applies them in their order.

    Attributes:
        target: The version that it brings.
        base: The version that the receiver has; without links the same one.
    """

    kind: UpdateKind = "changes"

    def __init__(self, target: PolicyFacts, base: PolicyFacts, links: Sequence[PackedChanges] = ()) -> None:
        self.target, self.base, self._links = target, base, links

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for link in self._links:
            async for frame in link:
                yield frame


class ChangeChain:
    """Keeps the changes that made the newest version and those before it, as long as they are few.

    Args:
        max_length: Most versions whose changes are kept.
    """

    def __init__(self, max_length: int) -> None:
        self._links: deque[PackedChanges] = deque(maxlen=max_length)
        # By version.
        self._num_bytes: dict[int, int] = {}
        self._packing: list[asyncio.Task[None]] = []

    def add(self, policy: PolicyWeights, base: PolicyWeights) -> None:
        """Begin to pack the changes that make the newest version."""
        changes = PackedChanges(policy, base)
        self._links.append(changes)
        self._packing.append(asyncio.create_task(self._pack(changes)))

    def update_from(self, digest: str) -> ChainedChanges | None:
        """The changes from this version to the newest one; None if not all of them are kept."""
        links = list(dropwhile(lambda link: link.base.digest != digest, self._links))
        return ChainedChanges(links[-1].target, links[0].base, links) if links else None

    def between(self, base_version: int, version: int) -> ChainedChanges | None:
        """The changes from one version to a later one, by their numbers; None if not all of them are kept."""
        links = [link for link in self._links if base_version < link.target.version <= version]
        if not links or links[-1].target.version != version or links[0].base.version != base_version:
            return None
        return ChainedChanges(links[-1].target, links[0].base, links)

    def forget_packed(self) -> None:
        """Forget the packing that is over.

        Raises:
            Exception: As it was raised by the packing.
        """
        over = [packing for packing in self._packing if packing.done()]
        self._packing = [packing for packing in self._packing if not packing.done()]
        for packing in over:
            packing.result()

    async def wait_until_packed(self) -> None:
        """Wait until no changes refer to a policy any more; a failure of the packing is left to `forget_packed`."""
        if self._packing:
            await asyncio.wait(self._packing)

    def close(self) -> None:
        for packing in self._packing:
            packing.cancel()

    async def _pack(self, changes: PackedChanges) -> None:
        self._num_bytes[changes.target.version] = await changes.pack()
        most = _MOST_KEPT_SHARE * changes.own_bytes
        while len(self._links) > 1 and sum(self._num_bytes.get(link.target.version, 0) for link in self._links) > most:
            self._links.popleft()
        kept = {link.target.version for link in self._links}
        self._num_bytes = {version: num for version, num in self._num_bytes.items() if version in kept}


def push_header(target: PolicyFacts, base: PolicyFacts | None, *, run: str, epoch: int, learner: str) -> PushHeader:
    """The header of a push of a version, or of changes to a base, from a learner of this epoch of a run."""
    return PushHeader(
        run=run,
        epoch=epoch,
        learner=learner,
        version=target.version,
        digest=target.digest,
        base_digest=base.digest if base else "",
        base_version=base.version if base else None,
        dtype=target.dtype,
        num_tensors=target.num_tensors,
        num_bytes=target.num_bytes,
        sources=target.sources,
    )


def _runs(policy: PolicyWeights, num_bytes: int) -> Iterator[tuple[str, slice]]:
    """Tensor and place of each run of elements of at most so many bytes."""
    for name, bits in policy.bits.items():
        length = num_bytes // bits.itemsize
        yield from ((name, slice(start, start + length)) for start in range(0, bits.size, length))


def _packed_run(policy: PolicyWeights, base: PolicyWeights, name: str, run: slice) -> TensorFrame | None:
    """The changes in a run, or all of it if that is less; None without a change."""
    new = policy.bits[name].reshape(-1)[run]
    packed = pack_changes(new, base.bits[name].reshape(-1)[run])
    if not packed.num_listed:
        return None
    if len(packed.data) >= new.nbytes:
        return _whole(name, run, new)
    changes = Changes(num_listed=packed.num_listed, packed=packed.data)
    return TensorFrame(name=name, offset=run.start, num_elements=len(new), changes=changes)


def _whole(name: str, run: slice, elements: Bits) -> TensorFrame:
    return TensorFrame(name=name, offset=run.start, num_elements=len(elements), data=elements.tobytes())


def _serialized(tensors: list[TensorFrame]) -> bytes:
    return WeightFrame(tensors=tensors).SerializeToString()
