"""The changes of the last versions, each packed once: a generator that is some versions behind gets them one by one.

Packed changes are small, and need none of the policies that they were made from.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence

from gspo.learner.push.policy_weights import UpdateKind, WeightUpdate
from gspo_proto.generation_pb2 import PushHeader

# Of a policy's bytes; more changes than that come near to a push of every element.
_MOST_KEPT_SHARE = 0.25


class ChainedChanges:
    """The changes of consecutive versions as one update; a generator applies them in their order.

    Attributes:
        target: The version that it brings.
        base_digest: That of the version that the receiver has.
    """

    kind: UpdateKind = "changes"

    def __init__(self, links: Sequence[WeightUpdate]) -> None:
        self._links = links
        self.target, self.base_digest = links[-1].target, links[0].base_digest

    def header(self, run: str, epoch: int, learner: str) -> PushHeader:
        """Its header, from a learner of this epoch of a run."""
        header = self._links[-1].header(run, epoch, learner)
        header.base_digest = self.base_digest
        return header

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
        self._links: deque[WeightUpdate] = deque(maxlen=max_length)
        self._num_bytes: dict[str, int] = {}
        self._packing: list[asyncio.Task[None]] = []

    def add(self, changes: WeightUpdate) -> None:
        """Take the changes that make the newest version, and begin to pack them."""
        self._links.append(changes)
        self._packing.append(asyncio.create_task(self._pack(changes)))

    def update_from(self, digest: str) -> ChainedChanges | None:
        """The changes from this version to the newest one; None if not all of them are kept."""
        for number, link in enumerate(self._links):
            if link.base_digest == digest:
                return ChainedChanges(list(self._links)[number:])
        return None

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
        """End the packing."""
        for packing in self._packing:
            packing.cancel()

    async def _pack(self, changes: WeightUpdate) -> None:
        self._num_bytes[changes.target.digest] = await changes.pack()
        most = _MOST_KEPT_SHARE * changes.target.num_bytes
        while len(self._links) > 1 and sum(map(self._bytes_of, self._links)) > most:
            self._links.popleft()
        kept = {link.target.digest for link in self._links}
        self._num_bytes = {digest: num for digest, num in self._num_bytes.items() if digest in kept}

    def _bytes_of(self, link: WeightUpdate) -> int:
        return self._num_bytes.get(link.target.digest, 0)
