"""What is registered, as it is kept and shown: a version's content, a name with its versions, an audit line.

Types alone. Neighbours: registry.py keeps them, library.py loads a content, door/ shows them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from services.reward.submission import Kind, Limits, TestCase


class NotRegisteredError(Exception):
    """There is no such name, or no such version of it; the message says which there are."""


class ConflictError(Exception):
    """A change that what is registered does not allow; the message says why."""


class Stored(BaseModel):
    """What is kept, and in a file."""

    model_config = ConfigDict(frozen=True)


class Content(Stored):
    """One version: everything that decides what it computes, and the test cases it passed."""

    version: str
    kind: Kind
    source: str
    entry: str = Field(description="Name of the function; empty for an environment")
    limits: Limits = Limits()
    tests: tuple[TestCase, ...] = ()
    signature: dict[str, Any] = Field(default_factory=dict, description="As its process told it")


class Origin(Stored):
    """Who handed a version in under a name, and when first."""

    by: str
    unix_s: float


class Name(Stored):
    """One name with its versions."""

    name: str
    kind: Kind
    active: str = Field(description="Version; empty where the name is retired")
    retired: bool
    revision: int = Field(description="Counts changes of the name")
    versions: dict[str, Origin] = Field(description="The oldest first")

    def lacks(self, other: Name) -> bool:
        """Whether `other` knows something of this name that is not in here."""
        return self.revision < other.revision or not set(other.versions) <= set(self.versions)

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
    action: Literal["submit", "activate", "retire"]
    name: str
    version: str = Field(description="Empty for a retirement")
    was: str = Field("", description="Version that was active before an activation or retirement")
    replica: str


def read_name(name: str, fields: Mapping[bytes, bytes]) -> Name:
    """A name as its hash in Redis has it."""
    origins = {
        field.decode()[2:]: Origin.model_validate_json(value)
        for field, value in fields.items()
        if field.startswith(b"v:")
    }
    return Name.model_validate(
        {
            "name": name,
            "kind": fields[b"kind"].decode(),
            "active": fields.get(b"active", b"").decode(),
            "retired": fields.get(b"retired", b"0") == b"1",
            "revision": int(fields[b"revision"]),
            "versions": dict(sorted(origins.items(), key=lambda pair: (pair[1].unix_s, pair[0]))),
        }
    )
