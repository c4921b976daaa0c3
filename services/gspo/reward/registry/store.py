"""The registered reward functions: names, their versions, which one is active; in Redis for all replicas.

Each change is one compare-and-set in Redis with its audit line, so no two changes overwrite each other. Each replica
keeps a copy on disk, written before a change is answered. It runs no function.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import structlog
from redis.asyncio import Redis

from gspo.common.config.reward import RegistryQuotas
from gspo.common.errors import nearest
from gspo.reward.registry.disk import DiskCopy
from gspo.reward.registry.keys import AUDIT_KEPT, RegistryKeys
from gspo.reward.registry.records import (
    RETIRED,
    Action,
    AuditLine,
    ConflictError,
    Content,
    NotRegisteredError,
    Origin,
    RegisteredName,
    UnreadableError,
    read_audit,
    read_content,
)
from gspo.reward.registry.submission import Submission
from gspo.reward.registry.sync import Change, RegistrySync, Rule

# A replica learns within this of another's change and of a wiped Redis, even without a call.
SYNC_S = 1.0
_MIB = 2**20
log = structlog.get_logger()


class QuotaError(ConflictError):
    """The registry is full; the message has the present usage and the fix."""


class Registry:
    """One replica's view of the registry.

    Args:
        folder: This replica's copy.
        replica: Name of this process, written into the audit.
        quotas: Bounds on the number of versions and their bytes.
    """

    def __init__(self, redis: Redis, folder: Path, *, replica: str, quotas: RegistryQuotas | None = None) -> None:
        self._redis, self._keys, self._replica = redis, RegistryKeys(), replica
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
            QuotaError: It is new to its name, and beyond a quota.
        """
        await self.copy.refresh()
        self._check_quotas(self.copy.names, submission)

    def _check_quotas(self, names: Mapping[str, RegisteredName], submission: Submission) -> None:
        name, num_bytes = submission.name, len(submission.model_dump_json())
        own = [names[name]] if name in names else []
        if not any(submission.version in known.versions for known in own):
            _check_quota(f"'{name}'", own, num_bytes, self._quotas, "versions_per_name", "name_mb")
            _check_quota("the registry", names.values(), num_bytes, self._quotas, "versions", "total_mb")

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
        is_unreadable, is_new = await self._is_unreadable(version), True

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
            is_kept = any(version in known.versions for known in names.values())
            return Change(after, line, {} if is_kept and not is_unreadable else {version: text})

        return (await self._change(rule)).name, is_new

    async def _is_unreadable(self, version: str) -> bool:
        try:
            await self.content(version)
        except UnreadableError:
            return True
        except NotRegisteredError:
            return False
        return False

    async def activate(
        self, name: str, version: str, *, who: str, if_active: str | None = None
    ) -> tuple[RegisteredName, str]:
        """Make a version the active one.

        Args:
            version: Whole, or its beginning.
            if_active: Only while this version is active; empty means while none is.

        Returns:
            The name after it, and the version that was active before.

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

        change = await self._change(rule)
        return change.name, change.line.was

    async def retire(self, name: str, *, who: str) -> tuple[RegisteredName, str]:
        """Leave a name without an active version; its versions stay for calls that name one.

        Returns:
            The name after it, and the version that was active before.

        Raises:
            NotRegisteredError: There is no such name.
        """

        def rule(names: Mapping[str, RegisteredName]) -> Change:
            before = self._known(names, name)
            return Change(before.without_active(), self._line(who, "retire", name, "", was=before.active))

        change = await self._change(rule)
        return change.name, change.line.was

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

        whole = (await self._change(rule)).line.version
        await self._redis.delete(self._keys.usage(name, whole))
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
        if (name, version) in self._pinned:
            return await self.content(self._pinned[name, version])
        registered = await self.name(name)
        if version:
            self._pinned[name, version] = registered.find(version)
            return await self.content(self._pinned[name, version])
        if not registered.active:
            raise NotRegisteredError(RETIRED.format(name=name))
        return await self.content(registered.active)

    async def content(self, version: str) -> Content:
        """The content of a version: by the copy on disk, else by Redis.

        Raises:
            NotRegisteredError: Neither has it, or theirs cannot be read.
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
        stored: Any = await self._redis.hget(self._keys.content, version)
        if stored is not None:
            return read_content(version, stored.decode(errors="replace"))
        raise unreadable or NotRegisteredError(f"there is no version {version[:12]}")

    async def audit(self, name: str | None, limit: int) -> list[AuditLine]:
        """The newest changes of one name, or of all for None; the newest first."""
        stored: Any = await self._redis.lrange(self._keys.audit, -AUDIT_KEPT, -1)
        lines = read_audit(reversed(stored))
        return [line for line in lines if name in (None, line.name)][:limit]

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

    async def _change(self, rule: Rule) -> Change:
        change = await self.copy.change(rule)
        log.info("reward_registry", **change.line.model_dump())
        return change


def _check_quota(
    which: str,
    names: Iterable[RegisteredName],
    num_bytes: int,
    quotas: RegistryQuotas,
    versions_key: str,
    mb_key: str,
) -> None:
    """Refuse one more version of `num_bytes`, by the two keys of `quotas`."""
    origins = [origin for name in names for origin in name.versions.values()]
    used_mb, more_mb = sum(origin.num_bytes for origin in origins) / _MIB, num_bytes / _MIB
    max_versions, max_mb = getattr(quotas, versions_key), getattr(quotas, mb_key)
    if len(origins) >= max_versions:
        problem = f"{which} has {len(origins)} versions, and reward.quotas.{versions_key} is {max_versions}"
        raise QuotaError(_MORE_SPACE.format(problem=problem, key=versions_key))
    if used_mb + more_mb > max_mb:
        usage = f"{which} has {used_mb:.1f} MiB, this version has {more_mb:.1f}"
        raise QuotaError(_MORE_SPACE.format(problem=f"{usage}, and reward.quotas.{mb_key} is {max_mb}", key=mb_key))


_MORE_SPACE = (
    "{problem}. Remove versions that are not needed (`gspo reward remove NAME VERSION`, or DELETE "
    "/v1/rewards/NAME/versions/VERSION), or raise reward.quotas.{key}"
)
