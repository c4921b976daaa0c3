"""What a push sends of a policy: every element, or what changed since another version, in frames of bounded size.

Frames are made in threads while earlier ones are on their way; those of changes are kept, so that several generators
cost one packing. Neighbours: weights.py has the policy, publisher.py sends, the generator's receiver.py takes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from gspo_proto.generation_pb2 import TensorFrame
from services.common.weights_changes import pack_changes
from services.learner.weights import Policy

# Far below gRPC's limit for a message, and large enough that its cost per message does not count.
FRAME_BYTES = 4 * 2**20
# Frames that are made before they are asked for.
_AHEAD = 4


class Frames:
    """The frames of one push, in order; iterate as often as wanted.

    Args:
        base: What the receiver holds; None where it needs every element.
    """

    def __init__(self, policy: Policy, base: Policy | None = None) -> None:
        self._policy, self._base = policy, base
        self._runs = [
            (name, slice(start, start + FRAME_BYTES // bits.itemsize))
            for name, bits in policy.bits.items()
            for start in range(0, bits.size, FRAME_BYTES // bits.itemsize)
        ]
        self._made: dict[int, asyncio.Future[TensorFrame]] = {}

    async def __aiter__(self) -> AsyncIterator[TensorFrame]:
        for number in range(len(self._runs)):
            for ahead in range(number, min(number + _AHEAD, len(self._runs))):
                if ahead not in self._made:
                    self._made[ahead] = asyncio.ensure_future(asyncio.to_thread(self._make, *self._runs[ahead]))
            # Another push may wait for the same frame when this one is cancelled.
            frame = await asyncio.shield(self._made[number])
            if self._base is None:
                self._made.pop(number, None)
            if frame.data or frame.changes.num_listed:
                yield frame

    def _make(self, name: str, run: slice) -> TensorFrame:
        new = self._policy.bits[name].reshape(-1)[run]
        frame = TensorFrame(name=name, offset=run.start, num_elements=len(new))
        if self._base is not None:
            packed = pack_changes(new, self._base.bits[name].reshape(-1)[run])
            if len(packed.data) < new.nbytes:
                frame.changes.num_listed, frame.changes.packed = packed
                return frame
        frame.data = new.tobytes()
        return frame
