"""The registered reward functions: names, their versions, which one is active; in Redis for all replicas.

Every change is one script in Redis, with its audit line, so that no two changes overwrite each other. Each replica
keeps a copy on disk, written before a change is answered. It runs nothing.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import structlog
from redis.asyncio import Redis

from gspo.common.config.reward import RegistryQuotas
from gspo.common.errors import nearest
from gspo.common.streams.keys import AUDIT_KEPT, RegistryKeys
from gspo.reward.registry.disk import DiskCopy
from gspo.reward.registry.quotas import check_quotas
from gspo.reward.registry.records import (
    RETIRED,
    Action,
    AuditLine,
    ConflictError,
    Content,
    Name,
    NotRegisteredError,
    Origin,
    UnreadableError,
    read_audit,
    read_content,
)
from gspo.reward.registry.scripts import MOVE, REMOVE, SUBMIT
from gspo.reward.registry.submission import Submission
from gspo.reward.registry.sync import RegistrySync

# A replica learns what another has changed within this; scoring asks Redis itself and is not late.
SYNC_S = 1.0
log = structlog.get_logger()


class Registry:
    """One replica's view of the registry.

    Args:
        folder: This replica's copy.
        replica: Name of this process, written into the audit.
        quotas: How much there may be.
    """

    def __init__(self, redis: Redis, folder: Path, *, replica: str, quotas: RegistryQuotas | None = None) -> None:
        self._redis, self._keys, self._replica = redis, RegistryKeys(), replica
        self._quotas = quotas or RegistryQuotas()
        self._disk = DiskCopy(folder)
        self.copy = RegistrySync(redis, self._disk)
        self._contents: dict[str, Content] = {}
        # What runs pin is asked for with every batch, and never moves.
        self._pinned: dict[tuple[str, str], str] = {}
        self._adding = asyncio.Lock()
        self._submit, self._move = redis.register_script(SUBMIT), redis.register_script(MOVE)
        self._remove = redis.register_script(REMOVE)

    async def run(self) -> None:
        """Keep Redis and the copy on disk alike until cancelled."""
        while True:
            await self.copy.sync()
            self._forget_removed()
            await asyncio.sleep(SYNC_S)

    async def check_quotas(self, submission: Submission) -> None:
        """Refuse a submission that there is no room for, before it is loaded and tested.

        Raises:
            QuotaError: It is new to its name, and beyond a quota.
        """
        num_bytes = len(submission.model_dump_json())
        names = await self.names()
        if not any(one.name == submission.name and submission.version in one.versions for one in names):
            check_quotas(self._quotas, names, submission.name, num_bytes)

    async def submit(self, submission: Submission, content: Content, *, who: str) -> tuple[Name, bool]:
        """Keep a version under its name; the name as it is then, and whether the version is new to it.

        Raises:
            ConflictError: The name holds functions of another kind, or there is no room.
        """
        line = self._line(who, "submit", submission.name, content.version)
        async with self._adding:  # one at a time is counted
            await self.check_quotas(submission)
            status, value, changes = await self._add(submission, content, line)
        if status == b"kind":
            raise ConflictError(
                f"{submission.name} holds functions of kind {value.decode()}, and this one is of kind {content.kind}. "
                "Give it another name"
            )
        return await self._record(line, changes), bool(value)

    async def _add(self, submission: Submission, content: Content, line: AuditLine) -> Any:
        keys, text = self._keys, content.model_dump_json()
        origin = Origin(by=line.who, unix_s=line.unix_s, num_bytes=len(submission.model_dump_json()))
        replace = await self._is_unreadable(content.version)
        await asyncio.to_thread(self._disk.write_content, content.version, text, replace=replace)
        return await self._submit(
            keys=[keys.name(submission.name), keys.names, keys.content, keys.audit, keys.changes],
            args=[
                *(submission.name, content.version, text, origin.model_dump_json(), content.kind),
                *(int(submission.activate), line.model_dump_json(), AUDIT_KEPT, int(replace)),
            ],
        )

    async def _is_unreadable(self, version: str) -> bool:
        try:
            await self.content(version)
        except UnreadableError:
            return True
        except NotRegisteredError:
            return False
        return False

    async def activate(self, name: str, version: str, *, who: str, if_active: str | None = None) -> tuple[Name, str]:
        """Make a version the active one; the name as it is then, and what was active before.

        Args:
            version: Whole, or its beginning.
            if_active: Only while this version is active; empty means while none is.

        Raises:
            NotRegisteredError: There is no such name or version, or it cannot be read.
            ConflictError: Another version than `if_active` is active.
        """
        found = await self.name(name)
        whole = found.find(version)
        await self.content(whole)
        expected = "*" if if_active is None else if_active and found.find(if_active)
        return await self._change(self._line(who, "activate", name, whole), expected)

    async def retire(self, name: str, *, who: str) -> tuple[Name, str]:
        """Leave a name without an active version; its versions stay for those who name one.

        Raises:
            NotRegisteredError: There is no such name.
        """
        await self.name(name)
        return await self._change(self._line(who, "retire", name, ""), "*")

    async def _change(self, line: AuditLine, expected: str) -> tuple[Name, str]:
        keys, version = self._keys, line.version
        status, was, changes = await self._move(
            keys=[keys.name(line.name), keys.audit, keys.changes],
            args=[version, expected, line.model_dump_json(), AUDIT_KEPT],
        )
        if status == b"missing":
            raise NotRegisteredError(f"there is no {line.name} with version {version[:12]}")
        if status == b"other":
            held = f"version {was.decode()[:12]}" if was else "no version"
            raise ConflictError(
                f"{held} of {line.name} is active, and not {expected[:12] or 'none'}. Look and try again"
            )
        return await self._record(line.model_copy(update={"was": was.decode()}), changes), was.decode()

    async def remove(self, name: str, version: str, *, who: str) -> str:
        """Remove a version from a name, and its content with the last name that has it; the whole version.

        Raises:
            NotRegisteredError: There is no such name or version.
            ConflictError: It is the active one, or a run asks for it.
        """
        whole = (await self.name(name)).find(version)
        if any(pinned == whole for (asked, _), pinned in self._pinned.items() if asked == name):
            raise ConflictError(f"version {whole[:12]} of {name} is asked for by its number. End that run first")
        keys, line = self._keys, self._line(who, "remove", name, whole)
        origin = Origin(by=who, unix_s=line.unix_s, removed=True)
        status, changes = await self._remove(
            keys=[keys.name(name), keys.names, keys.content, keys.audit, keys.changes, keys.usage(name, whole)],
            args=[whole, origin.model_dump_json(), line.model_dump_json(), AUDIT_KEPT, keys.name("")],
        )
        if status == b"missing":
            raise NotRegisteredError(f"there is no {name} with version {whole[:12]}")
        if status == b"active":
            raise ConflictError(f"version {whole[:12]} of {name} is active. Activate another, or retire the name first")
        await self._record(line, changes)
        await self.copy.sync(whole=True)
        self._forget_removed()
        return whole

    async def names(self) -> list[Name]:
        """Every name that can be read, by name."""
        await self.copy.sync()
        found: Any = await self._redis.smembers(self._keys.names)
        names = await self.copy.read_names(sorted(one.decode() for one in found))
        return [one for one in names if one.versions]

    async def name(self, name: str) -> Name:
        """One name.

        Raises:
            NotRegisteredError: Nothing is registered under it, or it cannot be read.
        """
        await self.copy.sync()
        found = await self.copy.read_names([name])
        if found and found[0].versions:
            return found[0]
        if reason := self.copy.unreadable.get(name):
            raise UnreadableError(reason)
        known: Any = await self._redis.smembers(self._keys.names)
        hint = nearest(name, (one.decode() for one in known)) if known else "Nothing is registered yet."
        raise NotRegisteredError(f"there is no reward function '{name}'. {hint}")

    async def resolve(self, name: str, version: str = "") -> Content:
        """The content that scores for `name`: its active version, or the given one (whole, or its beginning).

        Raises:
            NotRegisteredError: There is no such name or version, it cannot be read, or the name is retired and no
                version is given.
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
        known = int(changes or 0) >= self.copy.num_changes
        return active.decode() if active and known else ""

    async def content(self, version: str) -> Content:
        """What a version is: by the copy on disk, else by Redis.

        Raises:
            NotRegisteredError: Nobody has it, or what they have cannot be read.
        """
        if version not in self._contents:
            self._contents[version] = await self._read_content(version)
        return self._contents[version]

    async def _read_content(self, version: str) -> Content:
        text, unreadable = await asyncio.to_thread(self._disk.read_content, version), None
        if text is not None:
            try:
                return read_content(version, text)
            except UnreadableError as error:
                unreadable = error
        found: Any = await self._redis.hget(self._keys.content, version)
        if found is not None:
            return read_content(version, found.decode(errors="replace"))
        raise unreadable or NotRegisteredError(f"there is no version {version[:12]}")

    async def audit(self, name: str | None, limit: int) -> list[AuditLine]:
        """The newest changes, the newest first; of one name where given."""
        found: Any = await self._redis.lrange(self._keys.audit, -AUDIT_KEPT, -1)
        lines = read_audit(reversed(found))
        return [line for line in lines if name in (None, line.name)][:limit]

    def _forget_removed(self) -> None:
        """Drop from memory what was removed here or by another replica."""
        removed = self.copy.removed
        self._pinned = {asked: kept for asked, kept in self._pinned.items() if (asked[0], kept) not in removed}
        for _, version in removed:
            self._contents.pop(version, None)

    def _line(self, who: str, action: Action, name: str, version: str) -> AuditLine:
        return AuditLine(unix_s=time.time(), who=who, action=action, name=name, version=version, replica=self._replica)

    async def _record(self, line: AuditLine, changes: int) -> Name:
        """The change and who made it, on disk before it is answered; the name as it is then."""
        log.info("reward_registry", **line.model_dump())
        return await self.copy.record(line.name, line.model_dump_json(), changes)
