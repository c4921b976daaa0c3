"""Keeps the registry in Redis and one replica's copy on disk alike: what one lacks is written there from the other.

Of one name the higher revision decides, and of each of its versions the later state, so that a removed version stays
removed. What cannot be read is left where it is, with one log line, and put right where the other side is readable.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from typing import Any

import structlog
from redis.asyncio import Redis

from gspo.common.streams.keys import AUDIT_KEPT, RegistryKeys
from gspo.reward.registry.disk import DiskCopy
from gspo.reward.registry.records import Name, UnreadableError, parse_name, read_name
from gspo.reward.registry.scripts import JUMP, RESTORE

log = structlog.get_logger()


class RegistrySync:
    """One replica's copy beside Redis.

    Attributes:
        unreadable: Name -> why what Redis has of it cannot be read.
        removed: Names with a version that was removed from them, as of the last look.
    """

    def __init__(self, redis: Redis, disk: DiskCopy) -> None:
        self._redis, self._keys, self._disk = redis, RegistryKeys(), disk
        self.unreadable: dict[str, str] = {}
        self.removed: set[tuple[str, str]] = set()
        # What was alike at the last look: changes counted by Redis, and the stamp of the copy on disk.
        self._seen = (-1, -1)
        self._syncing, self._wrote = asyncio.Lock(), False
        self._restore, self._jump = redis.register_script(RESTORE), redis.register_script(JUMP)

    @property
    def num_changes(self) -> int:
        """Changes that Redis had counted at the last look."""
        return self._seen[0]

    async def sync(self, *, whole: bool = False) -> None:
        """Make both alike, where either has changed since the last time, or in any case."""
        if not whole and await self._now() == self._seen:
            return
        async with self._syncing:
            stamp = self._disk.stamp()
            await self._put_back()
            changes = int(await self._redis.get(self._keys.changes) or 0)
            await self._copy()
            # What another process writes meanwhile changes one of the two again.
            self._seen = (changes, self._disk.stamp() if self._wrote else stamp)

    async def record(self, name: str, audit_line: str, changes: int) -> Name:
        """Write a change that Redis has made to disk; the name as it is then.

        Args:
            changes: Redis's count of changes, this one included.
        """
        await asyncio.to_thread(self._disk.append_audit, audit_line)
        (changed,) = await self.read_names([name])
        alike = self._seen == (changes - 1, self._disk.stamp())
        await self._write_name(changed)
        if alike:  # this change alone lies between then and now
            self._seen = (changes, self._disk.stamp())
        return changed

    async def read_names(self, names: Iterable[str]) -> list[Name]:
        """Those of the names that are in Redis and can be read."""
        names = list(names)
        async with self._redis.pipeline(transaction=False) as pipe:
            for name in names:
                pipe.hgetall(self._keys.name(name))
            found = await pipe.execute()
        readable = []
        for name, fields in zip(names, found, strict=True):
            try:
                if fields:
                    readable.append(read_name(name, fields))
                self.unreadable.pop(name, None)
            except UnreadableError as error:
                self._note(name, error)
        return readable

    def _note(self, name: str, error: UnreadableError) -> None:
        if name not in self.unreadable:
            log.error("registry_unreadable", name=name, reason=str(error))
        self.unreadable[name] = str(error)

    async def _now(self) -> tuple[int, int]:
        return int(await self._redis.get(self._keys.changes) or 0), self._disk.stamp()

    async def _put_back(self) -> None:
        """Write to Redis what the copy on disk has and Redis lacks: it was wiped, or is another run's."""
        kept = await asyncio.to_thread(self._read_copy)
        there = {one.name: one for one in await self.read_names(one.name for one in kept)}
        lacking = [one for one in kept if one.name not in there or there[one.name].lacks(one)]
        for one in lacking:
            await self.put_back(one)
        if lacking:
            await self._jump(keys=[self._keys.changes], args=[time.time_ns() // 1_000_000])
            log.info("registry_restored", names=[one.name for one in lacking], detail="from the copy on disk")
        if kept and not await self._redis.exists(self._keys.audit):
            lines = await asyncio.to_thread(self._disk.read_audit, AUDIT_KEPT)
            if lines:
                await self._redis.rpush(self._keys.audit, *lines)

    def _read_copy(self) -> list[Name]:
        found = []
        for name, text in self._disk.read_names().items():
            try:
                found.append(parse_name(name, text))
            except UnreadableError as error:
                log.error("registry_unreadable", name=name, reason=str(error), detail="the copy on disk")
        return found

    async def put_back(self, kept: Name) -> None:
        """Write to Redis what a copy knows of a name, as far as it is newer."""
        for version in kept.versions:
            text = await asyncio.to_thread(self._disk.read_content, version)
            if text is not None:
                await self._redis.hsetnx(self._keys.content, version, text)
        states = {**kept.versions, **kept.removed}
        pairs = [part for v, origin in states.items() for part in (f"v:{v}", origin.model_dump_json())]
        await self._restore(
            keys=[self._keys.name(kept.name), self._keys.names],
            args=[kept.name, kept.revision, kept.kind, kept.active, int(kept.retired), *pairs],
        )

    async def _copy(self) -> None:
        """Write to disk what Redis has and the copy lacks, and drop there what was removed."""
        found: Any = await self._redis.smembers(self._keys.names)
        self._wrote = False
        names = await self.read_names(sorted(one.decode() for one in found))
        for kept in names:
            for version in kept.versions:
                if not await asyncio.to_thread(self._disk.has_content, version):
                    text: Any = await self._redis.hget(self._keys.content, version)
                    if text is not None:
                        await asyncio.to_thread(self._disk.write_content, version, text.decode(errors="replace"))
            await self._write_name(kept)
        self.removed = {(kept.name, version) for kept in names for version in kept.removed}
        present = {version for kept in names for version in kept.versions}
        for version in {version for _, version in self.removed} - present:
            await asyncio.to_thread(self._disk.remove_content, version)

    async def _write_name(self, kept: Name) -> None:
        """Keep a name on disk, unless a newer state of it is there."""
        text = await asyncio.to_thread(self._disk.read_name, kept.name)
        try:
            there = parse_name(kept.name, text) if text else None
        except UnreadableError:
            there = None
        if there is None or (there != kept and not kept.lacks(there)):
            await asyncio.to_thread(self._disk.write_name, kept.name, kept.model_dump_json())
            self._wrote = True
