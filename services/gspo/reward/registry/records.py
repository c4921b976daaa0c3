"""What is registered, as it is kept and shown: a version's content, a name with its versions, an audit line.

Types alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gspo.reward.registry.submission import Kind, RequestedLimits, TestCase, version_of

Action = Literal["submit", "activate", "retire", "remove"]
MAX_NAME_CHARS = 100
RETIRED = "{name} was retired, and no version of it is asked for. Activate one, or pin one in the configuration"
_MEND = "Submit it again, or remove it"


class NotRegisteredError(Exception):
    """There is no such name, or no such version of it; the message says which there are."""


class UnreadableError(NotRegisteredError):
    """What is kept of a name or version cannot be read; the message says why."""


class ConflictError(Exception):
    """A change that what is registered does not allow; the message says why."""


class Stored(BaseModel):
    """What is kept, and in a file."""

    model_config = ConfigDict(frozen=True)


class StoredSignature(Stored):
    """How a version is called, as its process said when it was admitted."""

    model_config = ConfigDict(frozen=True, strict=True)
    entry: str = Field("", max_length=MAX_NAME_CHARS)
    convention: str = Field("", max_length=MAX_NAME_CHARS)


class Content(Stored):
    """One version: everything that decides what it computes, and the test cases it passed."""

    version: str
    kind: Kind
    source: str
    entry: str = Field(description="Name of the function; empty for an environment")
    limits: RequestedLimits = RequestedLimits()
    tests: tuple[TestCase, ...] = ()
    signature: StoredSignature = StoredSignature()


class Origin(Stored):
    """Who handed a version in under a name or removed it from there, and when."""

    by: str
    unix_s: float
    num_bytes: int = Field(0, description="Of its content, test cases included")
    removed: bool = False


class Name(Stored):
    """One name with its versions."""

    name: str
    kind: Kind
    active: str = Field(description="Version; empty where the name is retired")
    retired: bool
    revision: int = Field(description="Counts changes of the name")
    versions: dict[str, Origin] = Field(description="The oldest first")
    removed: dict[str, Origin] = Field({}, description="Versions that it had, so that no older copy brings them back")

    def lacks(self, other: Name) -> bool:
        """Whether `other` knows something of this name that is not in here."""
        theirs = {**other.versions, **other.removed}
        ours = {**self.versions, **self.removed}
        newer = (version not in ours or ours[version].unix_s < origin.unix_s for version, origin in theirs.items())
        return self.revision < other.revision or any(newer)

    def find(self, version: str) -> str:
        """The whole version that begins with `version`.

        Raises:
            NotRegisteredError: There is none, or more than one.
        """
        found = [known for known in self.versions if known.startswith(version)]
        if len(found) != 1:
            known = ", ".join(one[:12] for one in list(self.versions)[-5:])
            number = "several versions" if found else "no version"
            raise NotRegisteredError(f"{self.name} has {number} {version[:12]}; its newest are {known}")
        return found[0]


class AuditLine(Stored):
    """One change: who did what to which name, and when."""

    unix_s: float
    who: str
    action: Action
    name: str
    version: str = Field(description="Empty for a retirement")
    was: str = Field("", description="Version that was active before an activation or retirement")
    replica: str


def read_name(name: str, fields: Mapping[bytes, bytes]) -> Name:
    """A name as its hash in Redis has it.

    Raises:
        UnreadableError: It holds something else.
    """
    try:
        origins = {
            field.decode()[2:]: Origin.model_validate_json(value)
            for field, value in fields.items()
            if field.startswith(b"v:")
        }
        newest_last = sorted(origins.items(), key=lambda pair: (pair[1].unix_s, pair[0]))
        return Name.model_validate(
            {
                "name": name,
                "kind": fields[b"kind"].decode(),
                "active": fields.get(b"active", b"").decode(),
                "retired": fields.get(b"retired", b"0") == b"1",
                "revision": int(fields[b"revision"]),
                "versions": {version: origin for version, origin in newest_last if not origin.removed},
                "removed": {version: origin for version, origin in newest_last if origin.removed},
            }
        )
    except (KeyError, ValueError) as error:
        raise UnreadableError(f"{name} cannot be read ({_short(error)})") from error


def parse_name(name: str, text: str) -> Name:
    """A name as a copy on disk has it.

    Raises:
        UnreadableError: The text is something else, or of another name.
    """
    try:
        found = Name.model_validate_json(text)
    except ValueError as error:
        raise UnreadableError(f"{name} cannot be read ({_short(error)})") from error
    if found.name != name:
        raise UnreadableError(f"{name} cannot be read (it is of the name {found.name[:MAX_NAME_CHARS]!r})")
    return found


def read_audit(lines: Iterable[bytes]) -> list[AuditLine]:
    """The lines that can be read."""
    found = []
    for line in lines:
        with suppress(ValueError):
            found.append(AuditLine.model_validate_json(line))
    return found


def read_content(version: str, text: str) -> Content:
    """A version as it is kept.

    Raises:
        UnreadableError: The text is something else, or of another version.
    """
    try:
        content = Content.model_validate_json(text)
    except ValueError as error:
        raise UnreadableError(f"version {version[:12]} cannot be read ({_short(error)}). {_MEND}") from error
    entry = content.entry or None
    if version_of(content.source.encode(), content.kind, entry, content.limits) != version:
        raise UnreadableError(f"version {version[:12]} cannot be read (its content has another hash). {_MEND}")
    return content


def _short(error: Exception) -> str:
    """What is wrong in one line: the first of pydantic's reasons."""
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        return f"{'.'.join(map(str, first['loc']))[:100]}: {first['msg'][:200]}".removeprefix(": ")
    return f"{type(error).__name__}: {error}"[:200]
