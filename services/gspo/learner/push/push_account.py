"""Adds up the pushes of each policy version, for `log/pushes.jsonl`."""

import asyncio
import time
from collections.abc import Callable, Sequence

from gspo.learner.push.weight_updates import UpdateKind
from gspo.runlog.pushes import PushRecord

# Of a failure's text.
_MOST_CHARS = 500


class PushAccount:
    """The pushes that are not on record yet.

    Args:
        record: Writes records; it may wait for the disk. None leaves them out.
    """

    def __init__(self, record: Callable[[Sequence[PushRecord]], None] | None) -> None:
        self._record = record
        self._records: dict[int, PushRecord] = {}

    def add_push(self, version: int, kind: UpdateKind, num_bytes: int, seconds: float) -> None:
        """A generator serves a version that was pushed to it."""
        full = int(kind == "full")
        pushed = PushRecord(
            version=version, unix_s=time.time(), full=full, changes=1 - full, bytes=num_bytes, longest_s=seconds
        )
        self._add(pushed)

    def add_failure(self, version: int, reason: str) -> None:
        """A push of a version failed."""
        self._add(PushRecord(version=version, unix_s=time.time(), failures=1, reason=reason[:_MOST_CHARS]))

    def _add(self, record: PushRecord) -> None:
        before = self._records.get(record.version)
        self._records[record.version] = before + record if before else record

    async def write(self) -> None:
        """Record all pushes so far; on the disk when this returns."""
        records, self._records = list(self._records.values()), {}
        if records and self._record is not None:
            await asyncio.to_thread(self._record, records)
