"""The names in Redis, and one replica's view of them: in memory, and as a copy on disk.

Each change of the registry sets a new random token. A view is up to date if it belongs to the present token. A change
is one compare-and-set on the token: all of the change with its audit line, or nothing.

Redis and the copy are kept alike: `RegisteredName.merged` gives each the states that only the other has. A name that
cannot be read is logged and left as it is. It is replaced if the other side is readable.
"""

import asyncio
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import structlog
from redis.asyncio import Redis

from gspo.common.host.durable_write import replace_file
from gspo.reward.registry.records import AuditLine, ConflictError, RegisteredName, UnreadableError, parse_name

# The registry in Redis, which all runs share. No run may be called `@rewards`, so no key of a run is one of these.
PREFIX = "gspo:{@rewards}:"
# Hash name -> JSON document: kind, active version, revision, versions; retired names too.
NAMES = f"{PREFIX}registered"
# Hash version -> JSON document: source, entry, limits, test cases, signature; written once.
CONTENTS = f"{PREFIX}content"
# Random text that each change of the registry replaces; absent once Redis has lost it.
TOKEN = f"{PREFIX}token"
# List of all changes, each with its caller, the newest last.
AUDIT = f"{PREFIX}audit"
# Changes in Redis; each replica also appends its own to a file, which is never cut.
AUDIT_KEPT = 10_000
# Only changes by other replicas make an attempt fail, and each failure means that another change succeeded.
MAX_ATTEMPTS = 100
log = structlog.get_logger()

# KEYS: token, names, contents, audit. ARGV: expected token, new token, audit lines kept, then triples of the key's
# number, field and value; an empty value removes the field. A call that is repeated because its reply was lost has
# written already.
_COMPARE_AND_SET = """
local token = redis.call('GET', KEYS[1]) or ''
if token == ARGV[2] then return 1 end
if token ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[2])
for i = 4, #ARGV, 3 do
  local key, field, value = KEYS[tonumber(ARGV[i])], ARGV[i + 1], ARGV[i + 2]
  if key == KEYS[4] then redis.call('RPUSH', key, value)
  elseif value == '' then redis.call('HDEL', key, field)
  else redis.call('HSET', key, field, value) end
end
redis.call('LTRIM', KEYS[4], -tonumber(ARGV[3]), -1)
return 1
"""


@dataclass(frozen=True)
class Change:
    """One change of the registry.

    Attributes:
        name: The name after it.
        line: Its line of the audit.
        contents: Version -> text to keep; empty to remove it.
    """

    name: RegisteredName
    line: AuditLine
    contents: Mapping[str, str] = field(default_factory=dict)


# All names, by name -> the change of one of them. It raises to refuse.
Rule = Callable[[Mapping[str, RegisteredName]], Change]


class _Snapshot(NamedTuple):
    """The state of Redis at one moment."""

    token: str
    names: dict[str, RegisteredName]
    unreadable: dict[str, str]
    contents: set[str]
    has_audit: bool


class DiskCopy:
    """One replica's copy: the files below one folder, made when first written.

    content/VERSION.json   as it was written, until it is removed
    names/NAME.json        replaced as a whole
    audit.jsonl            appended to
    """

    def __init__(self, folder: Path) -> None:
        self._contents, self._names, self._audit = folder / "content", folder / "names", folder / "audit.jsonl"

    def write_content(self, version: str, text: str) -> None:
        """Write the file of a version; an empty text removes it."""
        path = self._contents / f"{version}.json"
        if text:
            replace_file(path, text.encode())
        else:
            path.unlink(missing_ok=True)

    def list_contents(self) -> set[str]:
        return {path.stem for path in self._contents.glob("*.json")}

    def read_content(self, version: str) -> str | None:
        """A version's text; None if the copy lacks it."""
        try:
            return (self._contents / f"{version}.json").read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return None

    def write_name(self, name: RegisteredName) -> None:
        """Replace the file of a name."""
        replace_file(self._names / f"{name.name}.json", name.model_dump_json().encode())

    def stamp(self) -> int:
        """A number that changes with every file of a name, also if another process wrote it."""
        try:
            return self._names.stat().st_mtime_ns
        except FileNotFoundError:
            return 0

    def read_names(self) -> dict[str, RegisteredName]:
        """Every name that can be read; the others are logged and stay as they are."""
        names = {}
        for path in sorted(self._names.glob("*.json")):
            try:
                names[path.stem] = parse_name(path.stem, path.read_bytes())
            except UnreadableError as error:
                log.error("registry_unreadable", name=path.stem, reason=str(error), detail="the copy on disk")
        return names

    def append_audit(self, line: str) -> None:
        """Add one line; replicas that share the folder do not cut into each other's."""
        self._audit.parent.mkdir(parents=True, exist_ok=True)
        with self._audit.open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def read_audit(self, limit: int) -> list[str]:
        """The newest lines, the oldest of them first."""
        if not self._audit.exists():
            return []
        with self._audit.open(encoding="utf-8") as file:
            return [line.rstrip("\n") for line in deque(file, maxlen=limit) if line.endswith("\n")]


class RegistrySync:
    """One replica's view beside Redis.

    Attributes:
        names: Every readable name, as of the last `refresh` or `change`.
        unreadable: Name -> why its document in Redis cannot be read.
    """

    def __init__(self, redis: Redis, disk: DiskCopy) -> None:
        self._redis, self._disk = redis, disk
        self.names: dict[str, RegisteredName] = {}
        self.unreadable: dict[str, str] = {}
        # The token in Redis and the stamp of the copy on disk that `names` belongs to.
        self._seen = ("", -1)
        self._lock = asyncio.Lock()
        self._compare_and_set = redis.register_script(_COMPARE_AND_SET)

    @property
    def removed(self) -> set[tuple[str, str]]:
        """Names with a version that was removed from them."""
        return {(name.name, version) for name in self.names.values() for version in name.removed}

    async def refresh(self) -> None:
        """Make view, Redis and disk alike if Redis or the disk has changed since the last time."""
        if await self._has_changed():
            async with self._lock:
                await self._align()

    async def change(self, rule: Rule) -> Change:
        """Apply a rule to the newest state; its change is on disk before this returns.

        Args:
            rule: Called again each time that another replica came first.

        Raises:
            ConflictError: Other replicas came first MAX_ATTEMPTS times.
        """
        async with self._lock:
            for _ in range(MAX_ATTEMPTS):
                await self._align()
                change = rule(self.names)
                line = change.line.model_dump_json()
                if await self._write_redis(self._seen[0], [change.name], change.contents, [line]):
                    for version, text in change.contents.items():
                        await asyncio.to_thread(self._disk.write_content, version, text)
                    await asyncio.to_thread(self._disk.write_name, change.name)
                    await asyncio.to_thread(self._disk.append_audit, line)
                    await self._align()
                    log.info("reward_registry", **change.line.model_dump())
                    return change
        raise ConflictError("other replicas change the registry at the same time. Try again")

    async def _has_changed(self) -> bool:
        """Whether Redis or the disk is another than `names` belongs to."""
        token: Any = await self._redis.get(TOKEN)
        return ((token or b"").decode(), self._disk.stamp()) != self._seen

    async def _align(self) -> None:
        """Make view, Redis and disk alike; the lock is the caller's.

        Raises:
            ConflictError: Other replicas came first MAX_ATTEMPTS times.
        """
        for _ in range(MAX_ATTEMPTS):
            stamp = self._disk.stamp()
            if not await self._has_changed():
                return
            copied = await asyncio.to_thread(self._disk.read_names)
            redis = await self._read_redis()
            names = dict(redis.names)
            for name, copy in copied.items():
                names[name] = names[name].merged(copy) if name in names else copy
            await self._align_contents(names.values(), redis.contents)
            lacking = [document for name, document in names.items() if document != redis.names.get(name)]
            token: str | None = redis.token
            if lacking or (copied and not redis.has_audit):
                token = await self._restore(redis, lacking)
            if token is None:
                continue
            behind = [document for name, document in names.items() if document != copied.get(name)]
            for document in behind:
                await asyncio.to_thread(self._disk.write_name, document)
            self.names, self._seen = names, (token, self._disk.stamp() if behind else stamp)
            unreadable = {name: reason for name, reason in redis.unreadable.items() if name not in names}
            for name in unreadable.keys() - self.unreadable.keys():
                log.error("registry_unreadable", name=name, reason=unreadable[name])
            self.unreadable = unreadable
            return
        raise ConflictError("other replicas change the registry at the same time. Try again")

    async def _restore(self, redis: _Snapshot, lacking: list[RegisteredName]) -> str | None:
        """Write to Redis the names that it lacks, for it was wiped or is another run's; the new token."""
        lines = [] if redis.has_audit else await asyncio.to_thread(self._disk.read_audit, AUDIT_KEPT)
        token = await self._write_redis(redis.token, lacking, {}, lines)
        if token and lacking:
            log.info("registry_restored", names=[name.name for name in lacking], detail="from the copy on disk")
        return token

    async def _align_contents(self, names: Iterable[RegisteredName], in_redis: set[str]) -> None:
        """Write each side the contents that only the other has, and drop removed ones from the disk."""
        on_disk = await asyncio.to_thread(self._disk.list_contents)
        documents = list(names)
        present = {version for name in documents for version in name.versions}
        for version in present & (on_disk - in_redis):
            if kept := await asyncio.to_thread(self._disk.read_content, version):
                await self._redis.hsetnx(CONTENTS, version, kept)
        for version in present & (in_redis - on_disk):
            text: Any = await self._redis.hget(CONTENTS, version)
            if text is not None:
                await asyncio.to_thread(self._disk.write_content, version, text.decode(errors="replace"))
        for version in {version for name in documents for version in name.removed} - present:
            await asyncio.to_thread(self._disk.write_content, version, "")

    async def _read_redis(self) -> _Snapshot:
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.get(TOKEN)
            pipe.hgetall(NAMES)
            pipe.hkeys(CONTENTS)
            pipe.exists(AUDIT)
            token, texts, contents, has_audit = await pipe.execute()
        names, unreadable = {}, {}
        for field_name, text in sorted(texts.items()):
            name = field_name.decode(errors="replace")
            try:
                names[name] = parse_name(name, text)
            except UnreadableError as error:
                unreadable[name] = str(error)
        versions = {version.decode(errors="replace") for version in contents}
        return _Snapshot((token or b"").decode(), names, unreadable, versions, bool(has_audit))

    async def _write_redis(
        self, expected: str, names: Iterable[RegisteredName], contents: Mapping[str, str], lines: Iterable[str]
    ) -> str | None:
        """Write everything if the token is still `expected`; the new token, or None if another change came first."""
        token = uuid.uuid4().hex
        triples: list[tuple[int, str, str]] = [
            *((2, name.name, name.model_dump_json()) for name in names),
            *((3, version, text) for version, text in contents.items()),
            *((4, "", line) for line in lines),
        ]
        is_written = await self._compare_and_set(
            keys=[TOKEN, NAMES, CONTENTS, AUDIT],
            args=[expected, token, AUDIT_KEPT, *(part for triple in triples for part in triple)],
        )
        return token if is_written else None
