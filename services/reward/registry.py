"""The registered reward functions: names, their versions, which one is active; in Redis for all replicas.

Every change is one script in Redis, with its audit line, so that no two changes overwrite each other. Each replica
keeps a copy on disk (registry_disk.py), written before a change is answered, and puts back what Redis has lost: of
one name the higher revision decides, and versions are only ever added. It runs nothing. Neighbours: registered.py
has the types, registry_scripts.py the changes, library.py loads what is kept, door/ changes it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import structlog
from redis.asyncio import Redis

from services.common.errors import nearest
from services.common.keys import AUDIT_KEPT, RegistryKeys
from services.reward.registered import AuditLine, ConflictError, Content, Name, NotRegisteredError, Origin, read_name
from services.reward.registry_disk import Disk
from services.reward.registry_scripts import JUMP, MOVE, RESTORE, SUBMIT
from services.reward.submission import Submission

# A replica learns what another has changed within this; scoring asks Redis itself and is not late.
SYNC_S = 1.0
RETIRED = "{name} was retired, and no version of it is asked for. Activate one, or pin one in the configuration"
log = structlog.get_logger()


class Registry:
    """One replica's view of the registry.

    Args:
        folder: This replica's copy.
        replica: Name of this process, written into the audit.
    """

    def __init__(self, redis: Redis, folder: Path, *, replica: str) -> None:
        self._redis, self._keys, self._replica = redis, RegistryKeys(), replica
        self._disk = Disk(folder)
        self._contents: dict[str, Content] = {}
        # What runs pin is asked for with every batch, and never moves.
        self._pinned: dict[tuple[str, str], str] = {}
        # What was alike at the last look: changes counted by Redis, and the stamp of the copy on disk.
        self._seen = (-1, -1)
        self._syncing, self._wrote = asyncio.Lock(), False
        self._submit, self._move = redis.register_script(SUBMIT), redis.register_script(MOVE)
        self._restore, self._jump = redis.register_script(RESTORE), redis.register_script(JUMP)

    async def run(self) -> None:
        """Keep Redis and the copy on disk alike until cancelled."""
        while True:
            await self.sync()
            await asyncio.sleep(SYNC_S)

    async def submit(self, submission: Submission, content: Content, *, who: str) -> tuple[Name, bool]:
        """Keep a version under its name; the name as it is then, and whether the version is new to it.

        Raises:
            ConflictError: The name holds functions of another kind.
        """
        await self.sync()
        keys, now = self._keys, time.time()
        line = self._line(who, "submit", submission.name, content.version)
        origin = Origin(by=who, unix_s=now).model_dump_json()
        await asyncio.to_thread(self._disk.write_content, content.version, content.model_dump_json())
        status, value, changes = await self._submit(
            keys=[keys.name(submission.name), keys.names, keys.content, keys.audit, keys.changes],
            args=[
                *(submission.name, content.version, content.model_dump_json(), origin, content.kind),
                *(int(submission.activate), line.model_dump_json(), AUDIT_KEPT),
            ],
        )
        if status == b"kind":
            raise ConflictError(
                f"{submission.name} holds functions of kind {value.decode()}, and this one is of kind {content.kind}. "
                "Give it another name"
            )
        return await self._record(line, changes), bool(value)

    async def activate(self, name: str, version: str, *, who: str, if_active: str | None = None) -> tuple[Name, str]:
        """Make a version the active one; the name as it is then, and what was active before.

        Args:
            version: Whole, or its beginning.
            if_active: Only while this version is active; empty means while none is.

        Raises:
            NotRegisteredError: There is no such name or version.
            ConflictError: Another version than `if_active` is active.
        """
        found = await self.name(name)
        whole = found.find(version)
        expected = "*" if if_active is None else if_active and found.find(if_active)
        return await self._change("activate", name, whole, expected, who)

    async def retire(self, name: str, *, who: str) -> tuple[Name, str]:
        """Leave a name without an active version; its versions stay for those who name one.

        Raises:
            NotRegisteredError: There is no such name.
        """
        await self.name(name)
        return await self._change("retire", name, "", "*", who)

    async def _change(
        self, action: Literal["activate", "retire"], name: str, version: str, expected: str, who: str
    ) -> tuple[Name, str]:
        keys = self._keys
        line = self._line(who, action, name, version)
        status, was, changes = await self._move(
            keys=[keys.name(name), keys.audit, keys.changes],
            args=[version, expected, line.model_dump_json(), AUDIT_KEPT],
        )
        if status == b"missing":
            raise NotRegisteredError(f"there is no {name} with version {version[:12]}")
        if status == b"other":
            held = f"version {was.decode()[:12]}" if was else "no version"
            raise ConflictError(f"{held} of {name} is active, and not {expected[:12] or 'none'}. Look and try again")
        return await self._record(line.model_copy(update={"was": was.decode()}), changes), was.decode()

    async def names(self) -> list[Name]:
        """Every name, by name."""
        await self.sync()
        found: Any = await self._redis.smembers(self._keys.names)
        return await self._read_names(sorted(one.decode() for one in found))

    async def name(self, name: str) -> Name:
        """One name.

        Raises:
            NotRegisteredError: Nothing is registered under it.
        """
        await self.sync()
        if found := await self._read_names([name]):
            return found[0]
        known: Any = await self._redis.smembers(self._keys.names)
        hint = nearest(name, (one.decode() for one in known)) if known else "Nothing is registered yet."
        raise NotRegisteredError(f"there is no reward function '{name}'. {hint}")

    async def resolve(self, name: str, version: str = "") -> Content:
        """The content that scores for `name`: its active version, or the given one (whole, or its beginning).

        Raises:
            NotRegisteredError: There is no such name or version, or the name is retired and no version is given.
        """
        if (name, version) not in self._pinned:
            whole = await self._resolve(name, version)
            if not version:
                return await self.content(whole)
            self._pinned[name, version] = whole
        return await self.content(self._pinned[name, version])

    async def _resolve(self, name: str, version: str) -> str:
        if not version and (active := await self._active(name)):
            return active
        found = await self.name(name)
        if version:
            return found.find(version)
        if not found.active:
            raise NotRegisteredError(RETIRED.format(name=name))
        return found.active

    async def _active(self, name: str) -> str:
        """The active version by Redis alone; empty where it may not know."""
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.get(self._keys.changes)
            pipe.hget(self._keys.name(name), "active")
            changes, active = await pipe.execute()
        known = int(changes or 0) >= self._seen[0]
        return active.decode() if active and known else ""

    async def content(self, version: str) -> Content:
        """What a version is.

        Raises:
            NotRegisteredError: Nobody has it.
        """
        if version not in self._contents:
            text = await asyncio.to_thread(self._disk.read_content, version)
            if text is None:
                found: Any = await self._redis.hget(self._keys.content, version)
                if found is None:
                    raise NotRegisteredError(f"there is no version {version[:12]}")
                text = found.decode()
            self._contents[version] = Content.model_validate_json(text)
        return self._contents[version]

    async def audit(self, name: str | None, limit: int) -> list[AuditLine]:
        """The newest changes, the newest first; of one name where given."""
        found: Any = await self._redis.lrange(self._keys.audit, -AUDIT_KEPT, -1)
        lines = (AuditLine.model_validate_json(line) for line in reversed(found))
        return [line for line in lines if name in (None, line.name)][:limit]

    async def sync(self) -> None:
        """Make Redis and the copy on disk alike, where either has changed since the last time."""
        if await self._now() == self._seen:
            return
        async with self._syncing:
            stamp = self._disk.stamp()
            await self._put_back()
            changes = int(await self._redis.get(self._keys.changes) or 0)
            await self._copy()
            # What another process writes meanwhile changes one of the two again.
            self._seen = (changes, self._disk.stamp() if self._wrote else stamp)

    async def _now(self) -> tuple[int, int]:
        return int(await self._redis.get(self._keys.changes) or 0), self._disk.stamp()

    async def _put_back(self) -> None:
        """Write to Redis what the copy on disk has and Redis lacks: it was wiped, or is another run's."""
        texts = await asyncio.to_thread(self._disk.read_names)
        kept = [Name.model_validate_json(text) for text in texts]
        there = {one.name: one for one in await self._read_names(one.name for one in kept)}
        lacking = [one for one in kept if one.name not in there or there[one.name].lacks(one)]
        for one in lacking:
            await self._put_back_name(one)
        if lacking:
            await self._jump(keys=[self._keys.changes], args=[time.time_ns() // 1_000_000])
            log.info("registry_restored", names=[one.name for one in lacking], detail="from the copy on disk")
        if kept and not await self._redis.exists(self._keys.audit):
            lines = await asyncio.to_thread(self._disk.read_audit, AUDIT_KEPT)
            if lines:
                await self._redis.rpush(self._keys.audit, *lines)

    async def _put_back_name(self, kept: Name) -> None:
        for version in kept.versions:
            text = await asyncio.to_thread(self._disk.read_content, version)
            if text is not None:
                await self._redis.hsetnx(self._keys.content, version, text)
        pairs = [part for v, origin in kept.versions.items() for part in (f"v:{v}", origin.model_dump_json())]
        await self._restore(
            keys=[self._keys.name(kept.name), self._keys.names],
            args=[kept.name, kept.revision, kept.kind, kept.active, int(kept.retired), *pairs],
        )

    async def _copy(self) -> None:
        """Write to disk what Redis has and the copy lacks."""
        names: Any = await self._redis.smembers(self._keys.names)
        self._wrote = False
        for kept in await self._read_names(sorted(one.decode() for one in names)):
            for version in kept.versions:
                if not await asyncio.to_thread(self._disk.has_content, version):
                    text: Any = await self._redis.hget(self._keys.content, version)
                    if text is not None:
                        await asyncio.to_thread(self._disk.write_content, version, text.decode())
            await self._write_name(kept)

    async def _write_name(self, kept: Name) -> None:
        """Keep a name on disk, unless a newer state of it is there."""
        text = await asyncio.to_thread(self._disk.read_name, kept.name)
        there = Name.model_validate_json(text) if text else None
        if there is None or (there != kept and not kept.lacks(there)):
            await asyncio.to_thread(self._disk.write_name, kept.name, kept.model_dump_json())
            self._wrote = True

    async def _read_names(self, names: Iterable[str]) -> list[Name]:
        names = list(names)
        async with self._redis.pipeline(transaction=False) as pipe:
            for name in names:
                pipe.hgetall(self._keys.name(name))
            found = await pipe.execute()
        return [read_name(name, fields) for name, fields in zip(names, found, strict=True) if fields]

    def _line(self, who: str, action: Literal["submit", "activate", "retire"], name: str, version: str) -> AuditLine:
        return AuditLine(unix_s=time.time(), who=who, action=action, name=name, version=version, replica=self._replica)

    async def _record(self, line: AuditLine, changes: int) -> Name:
        """The change and who made it, on disk before it is answered; the name as it is then."""
        log.info("reward_registry", **line.model_dump())
        await asyncio.to_thread(self._disk.append_audit, line.model_dump_json())
        (changed,) = await self._read_names([line.name])
        alike = self._seen == (changes - 1, self._disk.stamp())
        await self._write_name(changed)
        if alike:  # this change alone lies between then and now
            self._seen = (changes, self._disk.stamp())
        return changed


class RegistryCopy:
    """What a copy on disk holds, without a Redis: to look up what a run that has not started will find."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._disk = folder, Disk(folder)

    async def resolve(self, name: str, version: str = "") -> Content:
        """As `Registry.resolve`.

        Raises:
            NotRegisteredError: There is no such name or version here.
        """
        names = [Name.model_validate_json(text) for text in self._disk.read_names()]
        found = next((one for one in names if one.name == name), None)
        if found is None:
            hint = nearest(name, (one.name for one in names)) if names else "Nothing is registered there."
            raise NotRegisteredError(f"there is no reward function '{name}' in {self._folder}. {hint}")
        whole = found.find(version) if version else found.active
        text = self._disk.read_content(whole) if whole else None
        if text is None:
            raise NotRegisteredError(RETIRED.format(name=name) if not whole else f"there is no version {whole[:12]}")
        return Content.model_validate_json(text)
