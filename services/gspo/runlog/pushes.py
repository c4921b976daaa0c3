"""The pushes of each policy version: the lines of `log/pushes.jsonl`, added up by version."""

from __future__ import annotations

from collections.abc import Iterable

from pydantic import BaseModel, ConfigDict

PUSHES = "pushes.jsonl"


class PushRecord(BaseModel):
    """The pushes of a policy version to the generators. A version whose pushes came late has several lines.

    Attributes:
        unix_s: Time of the record.
        full, changes: Generators that got every element, and those that got changes.
        bytes: Sent to all of them.
        longest_s: Seconds of the longest push, from its header to the answer.
        failures: Failed pushes.
        reason: The last failure's.
    """

    model_config = ConfigDict(frozen=True)

    version: int
    unix_s: float
    full: int = 0
    changes: int = 0
    bytes: int = 0
    longest_s: float = 0.0
    failures: int = 0
    reason: str = ""

    def __add__(self, other: PushRecord) -> PushRecord:
        """Both lines of a version as one."""
        return PushRecord(
            version=self.version,
            unix_s=max(self.unix_s, other.unix_s),
            full=self.full + other.full,
            changes=self.changes + other.changes,
            bytes=self.bytes + other.bytes,
            longest_s=max(self.longest_s, other.longest_s),
            failures=self.failures + other.failures,
            reason=other.reason or self.reason,
        )


def by_version(records: Iterable[PushRecord]) -> list[PushRecord]:
    """One record for each version, in order."""
    added: dict[int, PushRecord] = {}
    for record in records:
        added[record.version] = added[record.version] + record if record.version in added else record
    return [added[version] for version in sorted(added)]
