"""The registered reward functions: names, their versions, which one is active; in Redis for all replicas.

Each change is one compare-and-set in Redis with its audit line, so no two changes overwrite each other. Each replica
keeps a copy on disk, written before a change is answered. It runs no function.
"""

import asyncio
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from redis.asyncio import Redis

from gspo.common.config.reward import RegistryQuotas
from gspo.common.errors import nearest
from gspo.reward.registry.records import (
    Action,
    AuditLine,
    ConflictError,
    Content,
    NotRegisteredError,
    Origin,
    RegisteredName,
    Submission,
    UnreadableError,
    read_content,
)
from gspo.reward.registry.sync import AUDIT, AUDIT_KEPT, CONTENTS, Change, DiskCopy, RegistrySync
from gspo.reward.registry.usage import usage_key

# A replica learns within this of another's change and of a wiped Redis, even without a call.
SYNC_S = 1.0
_MIB = 2**20


class Registry:
    """One replica's view of the registry.

    Args:
        folder: This replica's copy.
        replica: Name of this process, written into the audit.
        quotas: Bounds on the number of versions and their bytes.
    """

    def __init__(self, redis: Redis, folder: Path, *, replica: str, quotas: RegistryQuotas | None = None) -> None:
        self._redis, self._replica = redis, replica
        self._quotas = quotas or RegistryQuotas()
        self._disk = DiskCopy(folder)
        self.copy = RegistrySync(redis, self._disk)
        self._contents: dict[str, Content] = {}
        # Runs ask with every batch for the versions that they pin, and these never change.
        self._pinned: dict[tuple[str, str], str] = {}

    async def run(self) -> None:
        """Keep Redis and the copy on disk alike until cancelled."""
        while True:
            await self.copy.refresh()
            self._forget_removed()
            await asyncio.sleep(SYNC_S)

    async def check_quotas(self, submission: Submission) -> None:
        """Refuse a submission beyond a quota, before it is loaded and tested.

        Raises:
            ConflictError: It is new to its name, and beyond a quota; the message has the present usage and the fix.
        """
        await self.copy.refresh()
        self._check_quotas(self.copy.names, submission)

    def _check_quotas(self, names: Mapping[str, RegisteredName], submission: Submission) -> None:
        name, more_mb = submission.name, len(submission.model_dump_json()) / _MIB
        own = [names[name]] if name in names else []
        if own and submission.version in own[0].versions:
            return
        for which, counted, versions_key, mb_key in (
            (f"'{name}'", own, "versions_per_name", "name_mb"),
            ("the registry", names.values(), "versions", "total_mb"),
        ):
            origins = [origin for known in counted for origin in known.versions.values()]
            used_mb = sum(origin.num_bytes for origin in origins) / _MIB
            max_versions, max_mb = getattr(self._quotas, versions_key), getattr(self._quotas, mb_key)
            if len(origins) >= max_versions:
                key, usage = versions_key, f"{which} has {len(origins)} versions"
            elif used_mb + more_mb > max_mb:
                key, usage = mb_key, f"{which} has {used_mb:.1f} MiB, this version has {more_mb:.1f}"
            else:
                continue
            raise ConflictError(
                f"{usage}, and reward.quotas.{key} is {getattr(self._quotas, key)}. Remove versions that are not "
                "needed (`gspo reward remove NAME VERSION`, or DELETE /v1/rewards/NAME/versions/VERSION), or raise "
                f"reward.quotas.{key}"
            )

    async def submit(self, submission: Submission, content: Content, *, who: str) -> tuple[RegisteredName, bool]:
        """Keep a version under its name.

        Returns:
            The name after it, and whether the version is new to it.

        Raises:
            ConflictError: The name holds functions of another kind, or the registry is full.
            UnreadableError: The name cannot be read.
        """
        name, version = submission.name, content.version
        line, text = self._line(who, "submit", name, version), content.model_dump_json()
        (known, _), is_new = await self.readable(version), True

        def rule(names: Mapping[str, RegisteredName]) -> Change:
            nonlocal is_new
            if name in self.copy.unreadable:
                raise UnreadableError(self.copy.unreadable[name])
            self._check_quotas(names, submission)
            before = names.get(name) or RegisteredName.empty(name, content.kind)
            is_new = version not in before.versions
            origin = Origin(by=who, unix_s=line.unix_s, num_bytes=len(submission.model_dump_json()))
            after = before.with_version(version, content.kind, origin, activate=submission.activate)
            # The first content of a version stays, with its test cases.
            is_kept = known is not None and any(version in other.versions for other in names.values())
            return Change(after, line, {} if is_kept else {version: text})

        return (await self.copy.change(rule)).name, is_new

    async def activate(self, name: str, version: str, *, who: str, if_active: str | None = None) -> Change:
        """Make a version the active one.

        Args:
            version: Whole, or its beginning.
            if_active: Only while this version is active; empty means while none is.

        Raises:
            NotRegisteredError: There is no such name or version, or it cannot be read.
            ConflictError: Another version than `if_active` is active.
        """
        await self.content((await self.name(name)).find(version))

        def rule(names: Mapping[str, RegisteredName]) -> Change:
            before = self._known(names, name)
            whole = before.find(version)
            after = before.activated(whole, if_active and before.find(if_active))
            return Change(after, self._line(who, "activate", name, whole, was=before.active))

        return await self.copy.change(rule)

    async def retire(self, name: str, *, who: str) -> Change:
        """Leave a name without an active version; its versions stay for calls that name one.

        Raises:
            NotRegisteredError: There is no such name.
        """

        def rule(names: Mapping[str, RegisteredName]) -> Change:
            before = self._known(names, name)
            return Change(before.without_active(), self._line(who, "retire", name, "", was=before.active))

        return await self.copy.change(rule)

    async def remove(self, name: str, version: str, *, who: str) -> str:
        """Remove a version from a name, and its content with the last name that has it; the whole version.

        Raises:
            NotRegisteredError: There is no such name or version.
            ConflictError: It is the active one, or a run asks for it.
        """

        def rule(names: Mapping[str, RegisteredName]) -> Change:
            before = self._known(names, name)
            whole = before.find(version)
            if any(pinned == whole for (asked, _), pinned in self._pinned.items() if asked == name):
                raise ConflictError(f"version {whole[:12]} of {name} is asked for by its number. End that run first")
            line = self._line(who, "remove", name, whole)
            after = before.without_version(whole, Origin(by=who, unix_s=line.unix_s, removed=True))
            is_kept = any(whole in known.versions for known in names.values() if known.name != name)
            return Change(after, line, {} if is_kept else {whole: ""})

        whole = (await self.copy.change(rule)).line.version
        await self._redis.delete(usage_key(name, whole))
        self._forget_removed()
        return whole

    async def names(self) -> list[RegisteredName]:
        """Every name that can be read, by name."""
        await self.copy.refresh()
        return [name for _, name in sorted(self.copy.names.items()) if name.versions]

    async def name(self, name: str) -> RegisteredName:
        """One name.

        Raises:
            NotRegisteredError: There is none, or it cannot be read.
        """
        await self.copy.refresh()
        return self._known(self.copy.names, name)

    def _known(self, names: Mapping[str, RegisteredName], name: str) -> RegisteredName:
        if name in names and names[name].versions:
            return names[name]
        if reason := self.copy.unreadable.get(name):
            raise UnreadableError(reason)
        hint = nearest(name, names) if names else "Nothing is registered yet."
        raise NotRegisteredError(f"there is no reward function '{name}'. {hint}")

    async def resolve(self, name: str, version: str = "") -> Content:
        """The content that scores for `name`: of its active version, or of `version` (whole, or its beginning).

        Raises:
            NotRegisteredError: There is no such name or version, it cannot be read, or the name is retired and
                `version` is empty.
        """
        whole = self._pinned.get((name, version)) or (await self.name(name)).find(version)
        if version:
            self._pinned[name, version] = whole
        return await self.content(whole)

    async def content(self, version: str) -> Content:
        """The content of a version: by the copy on disk, else by Redis.

        Raises:
            NotRegisteredError: Neither has it, or theirs cannot be read.
        """
        if version not in self._contents:
            self._contents[version] = await self._read_content(version)
        return self._contents[version]

    async def readable(self, version: str) -> tuple[Content | None, str]:
        """The content of a version, or None and the reason why it cannot be read."""
        try:
            return await self.content(version), ""
        except NotRegisteredError as error:
            return None, str(error)

    async def _read_content(self, version: str) -> Content:
        text, unreadable = await asyncio.to_thread(self._disk.read_content, version), None
        if text is not None:
            try:
                return read_content(version, text)
            except UnreadableError as error:
                unreadable = error
        stored: Any = await self._redis.hget(CONTENTS, version)
        if stored is not None:
            return read_content(version, stored.decode(errors="replace"))
        raise unreadable or NotRegisteredError(f"there is no version {version[:12]}")

    async def audit(self, name: str, limit: int) -> list[AuditLine]:
        """The newest changes of one name, the newest first."""
        stored: Any = await self._redis.lrange(AUDIT, -AUDIT_KEPT, -1)
        lines = []
        for text in reversed(stored):
            with suppress(ValidationError):
                lines.append(AuditLine.model_validate_json(text))
        return [line for line in lines if line.name == name][:limit]

    def _forget_removed(self) -> None:
        """Drop removed versions from memory, also those that another replica removed."""
        removed = self.copy.removed
        self._pinned = {asked: whole for asked, whole in self._pinned.items() if (asked[0], whole) not in removed}
        for _, version in removed:
            self._contents.pop(version, None)

    def _line(self, who: str, action: Action, name: str, version: str, was: str = "") -> AuditLine:
        return AuditLine(
            unix_s=time.time(), who=who, action=action, name=name, version=version, was=was, replica=self._replica
        )


class OfflineRegistry:
    """The copy in one folder, as a run that has not started will find it."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._disk = folder, DiskCopy(folder)

    async def resolve(self, name: str, version: str = "") -> Content:
        """As `Registry.resolve`.

        Raises:
            NotRegisteredError: The copy has no such name or version, or it cannot be read.
        """
        names = self._disk.read_names()
        if name not in names:
            hint = nearest(name, names) if names else "Nothing is registered there."
            raise NotRegisteredError(f"there is no reward function '{name}' in {self._folder}. {hint}")
        whole = names[name].find(version)
        if (text := self._disk.read_content(whole)) is None:
            raise NotRegisteredError(f"there is no version {whole[:12]}")
        return read_content(whole, text)
