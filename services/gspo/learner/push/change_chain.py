"""The changes of the last versions, each packed once: a generator that is some versions behind gets them one by one.

Packed changes are small, and need none of the policies that they were made from.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence

from gspo.learner.push.policy_weights import UpdateKind, WeightUpdate

# Of a policy's bytes; more changes than that come near to a push of every element.
_MOST_KEPT_SHARE = 0.25


class ChainedChanges:
    """The changes of consecutive versions as one update; a generator applies them in their order.

    Attributes:
        target: The version that it brings.
        base: The version that the receiver has.
    """

    kind: UpdateKind = "changes"

    def __init__(self, links: Sequence[WeightUpdate]) -> None:
        self._links = links
        self.target, self.base = links[-1].target, links[0].base

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
        # By version.
        self._num_bytes: dict[int, int] = {}
        self._packing: list[asyncio.Task[None]] = []

    def add(self, changes: WeightUpdate) -> None:
        """Take the changes that make the newest version, and begin to pack them."""
        self._links.append(changes)
        self._packing.append(asyncio.create_task(self._pack(changes)))

    def update_from(self, digest: str) -> ChainedChanges | None:
        """The changes from this version to the newest one; None if not all of them are kept."""
        for number, link in enumerate(self._links):
            if link.base and link.base.digest == digest:
                return ChainedChanges(list(self._links)[number:])
        return None

    def between(self, base_version: int, version: int) -> ChainedChanges | None:
        """The changes from one version to a later one, by their numbers; None if not all of them are kept."""
        links = [link for link in self._links if base_version < link.target.version <= version]
        if not links or links[-1].target.version != version:
            return None
        base = links[0].base
        return ChainedChanges(links) if base and base.version == base_version else None

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

    async def _pack(self, changes: WeightUpdate) -> None:
        self._num_bytes[changes.target.version] = await changes.pack()
        most = _MOST_KEPT_SHARE * changes.own_bytes
        while len(self._links) > 1 and sum(map(self._bytes_of, self._links)) > most:
            self._links.popleft()
        kept = {link.target.version for link in self._links}
        self._num_bytes = {version: num for version, num in self._num_bytes.items() if version in kept}

    def _bytes_of(self, link: WeightUpdate) -> int:
        return self._num_bytes.get(link.target.version, 0)
