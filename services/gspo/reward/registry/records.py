"""The records of the registry: a submission and its version, the content of a version, a name, an audit line.

A submission comes from a user. The other records are JSON documents in Redis and in the copies on disk. The rules of a
change are methods of `RegisteredName`, without Redis, disk or clock.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    StringConstraints,
    ValidationError,
    model_validator,
)

from gspo.common.modules_beside import MAX_MODULE_BYTES, MAX_MODULES

Action = Literal["submit", "activate", "retire", "remove"]
Kind = Literal["reward", "environment"]
FunctionName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
Version = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{8,64}$")]

MAX_SOURCE_CHARS = 256 * 1024
MAX_TESTS = 64
MAX_UNKNOWN_FIELDS, MAX_PARTS, MAX_COLUMNS = 20, 64, 1000
MAX_TIMEOUT_S, MAX_MEMORY_MB = 600, 65_536
MAX_NAME_CHARS = 100
_MEND = "Submit it again, or remove it"


def _without_bom(source: Any) -> Any:
    """A source without the BOM that some editors put before a file."""
    return source.removeprefix("\ufeff") if isinstance(source, str) else source


def _is_plain_json(value: Any) -> Any:
    """Refuse a value that JSON cannot carry: NaN, infinity, half a surrogate pair, endless numbers."""
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError) as error:
        raise ValueError(f"cannot be written as JSON: {error}") from error
    return value


def _few(most: int, members: str, rule: str) -> Callable[[Any], Any]:
    """A check that refuses a mapping of more than `most`: each member costs time in the event loop."""

    def check(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > most:
            raise ValueError(f"has {len(value)} {members}, and {rule}")
        return value

    return check


def _has_few_bytes(modules: dict[str, str]) -> dict[str, str]:
    num_bytes = sum(len(text.encode()) for text in modules.values())
    if num_bytes > MAX_MODULE_BYTES:
        raise ValueError(f"have {num_bytes} bytes together, and at most {MAX_MODULE_BYTES} are taken")
    return modules


_has_few_parts = _few(MAX_PARTS, "parts", f"a function returns at most {MAX_PARTS}")
has_few_columns = _few(MAX_COLUMNS, "columns", f"at most {MAX_COLUMNS} are taken")
Columns = Annotated[dict[str, Any], BeforeValidator(has_few_columns), AfterValidator(_is_plain_json)]
PlainJson = Annotated[Any, AfterValidator(_is_plain_json)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
ModulePath = Annotated[
    str, StringConstraints(pattern=r"^([A-Za-z_][A-Za-z0-9_]*/)*[A-Za-z_][A-Za-z0-9_]*\.py$", max_length=200)
]
SourceText = Annotated[str, StringConstraints(min_length=1, max_length=MAX_SOURCE_CHARS), BeforeValidator(_without_bom)]
ModuleText = Annotated[str, StringConstraints(max_length=MAX_SOURCE_CHARS), BeforeValidator(_without_bom)]
Modules = Annotated[
    dict[ModulePath, ModuleText],
    BeforeValidator(_few(MAX_MODULES, "modules", f"at most {MAX_MODULES} are taken")),
    AfterValidator(_has_few_bytes),
]


class RequestBody(BaseModel):
    """A part of a request: unknown fields are refused, text is not read as a number."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _has_few_unknown_fields(cls, value: Any) -> Any:
        """Each unknown field would be a problem of its own; so many are one."""
        if isinstance(value, dict) and len(value) > len(cls.model_fields) + MAX_UNKNOWN_FIELDS:
            raise ValueError(f"has {len(value)} fields, and at most {len(cls.model_fields)} are known")
        return value


class RequestedLimits(RequestBody):
    """The limits of one call; by default those of the service."""

    timeout_s: Annotated[float, Field(gt=0, le=MAX_TIMEOUT_S, allow_inf_nan=False)] | None = Field(
        None, description="Longest a call may take before its process is killed"
    )
    memory_mb: Annotated[int, Field(ge=64, le=MAX_MEMORY_MB)] | None = Field(
        None, description="Address space of the process, in MiB"
    )
    cpu_s: Annotated[float, Field(gt=0, le=MAX_TIMEOUT_S, allow_inf_nan=False)] | None = Field(
        None, description="Processor time that a call may use"
    )


class TestCase(RequestBody):
    """An input with the value that the function must give."""

    __test__ = False  # pytest: not a test class
    input: Columns = Field(
        description="Of a reward: prompt, completion and columns of the data set. Of an environment: task and actions"
    )
    expected: Finite | Annotated[dict[str, Finite], BeforeValidator(_has_few_parts)] = Field(
        description="The number, or the named parts; of an environment the summed reward of all actions"
    )
    tolerance: Annotated[float, Field(ge=0, allow_inf_nan=False)] = Field(
        1e-6, description="Largest difference that passes"
    )


class Submission(RequestBody):
    """A reward function or an environment, as it is handed in."""

    name: FunctionName = Field(description="Its name in runs; versions of one function share it")
    source: SourceText = Field(
        description="Python, importing the standard library, reward.allowed_packages and its own modules"
    )
    kind: Kind = "reward"
    entry: Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,99}$")] | None = Field(
        None, description="Name of the function, where the source holds more than one. Of a reward only"
    )
    modules: Modules = Field(
        {}, description="Modules that it imports from beside it: the text of each by its path, such as helpers.py"
    )
    limits: RequestedLimits = RequestedLimits()
    # A million elements of a wrong kind are one problem, not a million.
    tests: Annotated[tuple[TestCase, ...], FailFast(), Field(max_length=MAX_TESTS, strict=False)] = Field(
        (), description="Run before it is accepted; each must give what it expects"
    )
    activate: bool = Field(
        False, description="Make it the name's active version at once; the first version always becomes it"
    )

    @property
    def version(self) -> str:
        """The content's hash: see `version_of`."""
        return version_of(self.source.encode(), self.kind, self.entry, self.limits, modules=self.modules)


def version_of(
    source: bytes,
    kind: Kind = "reward",
    entry: str | None = None,
    limits: RequestedLimits | None = None,
    args: dict[str, Any] | None = None,
    modules: Mapping[str, str] | None = None,
) -> str:
    """SHA-256 of the source, extended by kind (unless reward), entry, limits, args and modules if they are set.

    So the version of a source alone is what `sha256sum` prints, and the same function under other limits is another
    version: it may fail where the first does not.
    """
    further: dict[str, Any] = {"entry": entry, "args": args or None, "modules": dict(modules or {}) or None}
    further |= limits.model_dump() if limits else {}
    further = {key: value for key, value in further.items() if value is not None}
    if kind != "reward":
        further["kind"] = kind
    digest = hashlib.sha256(source)
    if further:
        digest.update(b"\0" + json.dumps(further, sort_keys=True).encode())
    return digest.hexdigest()


class NotRegisteredError(Exception):
    """There is no such name, or no such version of it; the message says which there are."""


class UnreadableError(NotRegisteredError):
    """A stored name or version cannot be read; the message says why."""


class ConflictError(Exception):
    """The present state of the registry does not allow a change; the message says why."""


class Stored(BaseModel):
    """A stored record; it is never changed, only replaced."""

    model_config = ConfigDict(frozen=True)


class StoredSignature(Stored):
    """The entry and convention of a version, as recognised at its admission."""

    model_config = ConfigDict(frozen=True, strict=True)
    entry: str = Field("", max_length=MAX_NAME_CHARS)
    convention: str = Field("", max_length=MAX_NAME_CHARS)


class Content(Stored):
    """One version: everything that decides what it computes, and the test cases it passed."""

    version: str
    kind: Kind
    source: str
    entry: str = Field(description="Name of the function; empty for an environment")
    modules: dict[str, str] = {}
    limits: RequestedLimits = RequestedLimits()
    tests: tuple[TestCase, ...] = ()
    signature: StoredSignature = StoredSignature()


class Origin(Stored):
    """The caller who submitted a version under a name or removed it from there, and the time."""

    by: str
    unix_s: float
    num_bytes: int = Field(0, description="Of its content, test cases included")
    removed: bool = False


class RegisteredName(Stored):
    """One name with its versions: one JSON document in Redis, and the same in a file of every copy on disk."""

    name: str
    kind: Kind
    active: str = Field(description="Version; empty where the name is retired")
    retired: bool
    revision: int = Field(description="Counts changes of the name")
    versions: dict[str, Origin] = Field(description="The oldest first")
    removed: dict[str, Origin] = Field({}, description="Versions that it had, so that no older copy brings them back")

    @classmethod
    def empty(cls, name: str, kind: Kind) -> RegisteredName:
        """A name before its first version."""
        return cls(name=name, kind=kind, active="", retired=False, revision=0, versions={})

    def find(self, version: str) -> str:
        """The whole version that begins with `version`; the active one for an empty text.

        Raises:
            NotRegisteredError: There is none, or more than one.
        """
        if not version:
            if not self.active:
                why = "was retired, and no version of it is asked for"
                raise NotRegisteredError(f"{self.name} {why}. Activate one, or pin one in the configuration")
            return self.active
        matches = [known for known in self.versions if known.startswith(version)]
        if len(matches) != 1:
            newest = ", ".join(known[:12] for known in list(self.versions)[-5:])
            number = "several versions" if matches else "no version"
            raise NotRegisteredError(f"{self.name} has {number} {version[:12]}; its newest are {newest}")
        return matches[0]

    def with_version(self, version: str, kind: Kind, origin: Origin, *, activate: bool) -> RegisteredName:
        """The name with one more version, which becomes active if it is asked for or none is active.

        Returns:
            The same name if it has the version already, and the active one stays.

        Raises:
            ConflictError: The name holds functions of another kind.
        """
        if self.versions and kind != self.kind:
            raise ConflictError(
                f"{self.name} holds functions of kind {self.kind}, and this one is of kind {kind}. Give it another name"
            )
        versions = self.versions if version in self.versions else {**self.versions, version: origin}
        removed = {known: removal for known, removal in self.removed.items() if known != version}
        active = version if activate or not self.active else self.active
        update = {"kind": kind, "versions": versions, "removed": removed, "active": active, "retired": False}
        changed = self.model_copy(update=update)
        return self if changed == self else changed.model_copy(update={"revision": self.revision + 1})

    def activated(self, version: str, if_active: str | None) -> RegisteredName:
        """The name with another active version.

        Args:
            version: One of `versions`, whole.
            if_active: The version that must be active before, whole; empty for none, None for any.

        Raises:
            ConflictError: Another version than `if_active` is active.
        """
        if if_active not in (None, self.active):
            active = f"version {self.active[:12]}" if self.active else "no version"
            raise ConflictError(
                f"{active} of {self.name} is active, and not {(if_active or 'none')[:12]}. Look and try again"
            )
        return self.model_copy(update={"active": version, "retired": False, "revision": self.revision + 1})

    def without_active(self) -> RegisteredName:
        """The name retired: no version is active, all stay."""
        return self.model_copy(update={"active": "", "retired": True, "revision": self.revision + 1})

    def without_version(self, version: str, removal: Origin) -> RegisteredName:
        """The name without one of its versions.

        Raises:
            ConflictError: The version is active.
        """
        if self.active == version:
            raise ConflictError(
                f"version {version[:12]} of {self.name} is active. Activate another, or retire the name first"
            )
        versions = {known: origin for known, origin in self.versions.items() if known != version}
        removed = {**self.removed, version: removal}
        return self.model_copy(update={"versions": versions, "removed": removed, "revision": self.revision + 1})

    def merged(self, other: RegisteredName) -> RegisteredName:
        """One state of two that may have grown apart, independent of their order.

        The later origin of each version counts, so a removed version stays removed until it is submitted again. The
        higher revision decides about the rest. An active version that the other state has removed is retired. Of equal
        revisions a retirement counts: else merging the result once more could activate another version.
        """
        newest = max(self, other, key=lambda name: (name.revision, name.retired, name.active, name.kind))
        origins: dict[str, Origin] = {}
        for state in (self.versions, self.removed, other.versions, other.removed):
            for version, origin in state.items():
                origins[version] = max(origins.get(version, origin), origin, key=_age)
        oldest_first = sorted(origins.items(), key=lambda pair: (pair[1].unix_s, pair[0]))
        versions = {version: origin for version, origin in oldest_first if not origin.removed}
        active = newest.active if newest.active in versions else ""
        return newest.model_copy(
            update={
                "active": active,
                "retired": newest.retired or active != newest.active,
                "versions": versions,
                "removed": {version: origin for version, origin in oldest_first if origin.removed},
            }
        )


def _age(origin: Origin) -> tuple[float, bool, str, int]:
    # By everything after the time, so that two origins of one moment compare alike on every replica.
    return origin.unix_s, origin.removed, origin.by, origin.num_bytes


class AuditLine(Stored):
    """One change: the caller, the action, the name and the time."""

    unix_s: float
    who: str
    action: Action
    name: str
    version: str = Field(description="Empty for a retirement")
    was: str = Field("", description="Version that was active before an activation or retirement")
    replica: str


def parse_name(name: str, text: str | bytes) -> RegisteredName:
    """A name as Redis and the copies on disk keep it.

    Raises:
        UnreadableError: The text is something else, or of another name.
    """
    try:
        registered = RegisteredName.model_validate_json(text)
    except ValidationError as error:
        raise UnreadableError(f"{name} cannot be read ({_short(error)})") from error
    if registered.name != name:
        raise UnreadableError(f"{name} cannot be read (it is of the name {registered.name[:MAX_NAME_CHARS]!r})")
    return registered


def read_content(version: str, text: str) -> Content:
    """A version as it is kept.

    Raises:
        UnreadableError: The text is something else, or of another version.
    """
    try:
        content = Content.model_validate_json(text)
    except ValidationError as error:
        raise UnreadableError(f"version {version[:12]} cannot be read ({_short(error)}). {_MEND}") from error
    entry = content.entry or None
    if version_of(content.source.encode(), content.kind, entry, content.limits, modules=content.modules) != version:
        raise UnreadableError(f"version {version[:12]} cannot be read (its content has another hash). {_MEND}")
    return content


def _short(error: ValidationError) -> str:
    """The first of its reasons, in one line."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    return f"{'.'.join(map(str, first['loc']))[:100]}: {first['msg'][:200]}".removeprefix(": ")
