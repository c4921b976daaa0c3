"""What a push sends of a policy: every element, or what changed since another version, in frames of bounded size.

Frames are made in threads while earlier ones are on their way; those of changes are kept, so that several generators
cost one packing. Neighbours: weights.py has the policy, publisher.py sends, the generator's receiver.py takes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from gspo_proto.generation_pb2 import WeightFrame
from services.common.weights_changes import pack_changes
from services.learner.weights import Policy

# Far below gRPC's limit for a message. Larger ones are slower (4 MiB: a third of the rate): each copy of one is memory
# that the allocator takes from the system anew.
FRAME_BYTES = 2**20
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
        self._made: dict[int, asyncio.Future[WeightFrame]] = {}

    async def __aiter__(self) -> AsyncIterator[WeightFrame]:
        for number in range(len(self._runs)):
            for ahead in range(number, min(number + _AHEAD, len(self._runs))):
                if ahead not in self._made:
                    self._made[ahead] = asyncio.ensure_future(asyncio.to_thread(self._make, *self._runs[ahead]))
            # Another push may wait for the same frame when this one is cancelled.
            frame = await asyncio.shield(self._made[number])
            if self._base is None:
                self._made.pop(number, None)
            if frame.tensor.data or frame.tensor.changes.num_listed:
                yield frame

    def _make(self, name: str, run: slice) -> WeightFrame:
        new = self._policy.bits[name].reshape(-1)[run]
        # Filled in place: a message that is put into another is copied.
        frame = WeightFrame()
        tensor = frame.tensor
        tensor.name, tensor.offset, tensor.num_elements = name, run.start, len(new)
        if self._base is not None:
            packed = pack_changes(new, self._base.bits[name].reshape(-1)[run])
            if len(packed.data) < new.nbytes:
                tensor.changes.num_listed, tensor.changes.packed = packed
                return frame
        tensor.data = new.tobytes()
        return frame
