"""The frames of a push: every element of a policy, or its changes since another version.

Changes are packed in threads while earlier frames are sent, and kept, so that several generators cost one packing.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from gspo.common.weights.changes import Bits, pack_changes
from gspo.learner.push.policy_weights import PolicyWeights
from gspo_proto.generation_pb2 import WeightFrame

# Far below gRPC's limit for a message. Larger ones are slower (4 MiB: a third of the rate): each copy of one is memory
# that the allocator takes from the system anew.
FRAME_BYTES = 2**20
# WeightFrames that are packed before they are asked for.
_AHEAD = 4


class WeightFrames:
    """The frames of one push, in order; they may be iterated several times.

    Args:
        base: The version that the receiver has; None if it needs every element.
        frame_bytes: Most bytes of weights in one frame.
    """

    def __init__(
        self, policy: PolicyWeights, base: PolicyWeights | None = None, frame_bytes: int = FRAME_BYTES
    ) -> None:
        self._policy, self._base = policy, base
        self._runs = [
            (name, slice(start, start + frame_bytes // bits.itemsize))
            for name, bits in policy.bits.items()
            for start in range(0, bits.size, frame_bytes // bits.itemsize)
        ]
        self._packed: dict[int, asyncio.Future[WeightFrame | None]] = {}

    async def __aiter__(self) -> AsyncIterator[WeightFrame]:
        if self._base is None:
            for name, run in self._runs:
                # To copy so little takes less time than to hand it to a thread.
                yield _whole(name, run, self._policy.bits[name].reshape(-1)[run])
            return
        for number in range(len(self._runs)):
            for ahead in range(number, min(number + _AHEAD, len(self._runs))):
                if ahead not in self._packed:
                    packing = asyncio.to_thread(self._pack, self._base, *self._runs[ahead])
                    self._packed[ahead] = asyncio.ensure_future(packing)
                    self._packed[ahead].add_done_callback(_ignore_result)
            # Another push may wait for the same frame when this one is cancelled.
            frame = await asyncio.shield(self._packed[number])
            if frame is not None:
                yield frame

    def _pack(self, base: PolicyWeights, name: str, run: slice) -> WeightFrame | None:
        """The changes in a run, or all of it if that is less; None without a change."""
        new = self._policy.bits[name].reshape(-1)[run]
        packed = pack_changes(new, base.bits[name].reshape(-1)[run])
        if not packed.num_listed:
            return None
        if len(packed.data) >= new.nbytes:
            return _whole(name, run, new)
        frame = _frame(name, run, new)
        frame.tensor.changes.num_listed, frame.tensor.changes.packed = packed
        return frame


def _ignore_result(packed: asyncio.Future[WeightFrame | None]) -> None:
    """A failure is raised where its frame is awaited; frames ahead of it may never be awaited."""
    if not packed.cancelled():
        packed.exception()


def _whole(name: str, run: slice, elements: Bits) -> WeightFrame:
    frame = _frame(name, run, elements)
    frame.tensor.data = elements.tobytes()
    return frame


def _frame(name: str, run: slice, elements: Bits) -> WeightFrame:
    """A frame without its elements: they are put into it in place, because a message put into another is copied."""
    frame = WeightFrame()
    frame.tensor.name, frame.tensor.offset, frame.tensor.num_elements = name, run.start, len(elements)
    return frame
