"""The pushes of each version, added up before they are recorded and again when they are read."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from gspo.learner.push.push_account import PushAccount
from gspo.runlog.pushes import PushRecord, by_version


def test_the_pushes_of_a_version_are_one_record() -> None:
    written: list[PushRecord] = []

    def record(records: Sequence[PushRecord]) -> None:
        written.extend(records)

    account = PushAccount(record)
    account.add_push(3, "full", 1000, 2.0)
    account.add_push(3, "changes", 10, 0.5)
    account.add_failure(3, "DEADLINE_EXCEEDED: too slow")
    account.add_push(4, "changes", 12, 0.25)
    asyncio.run(account.write())
    asyncio.run(account.write())
    assert [record.model_dump(exclude={"unix_s"}) for record in written] == [
        {
            "version": 3, "full": 1, "changes": 1, "bytes": 1010, "longest_s": 2.0,
            "failures": 1, "reason": "DEADLINE_EXCEEDED: too slow",
        },
        {"version": 4, "full": 0, "changes": 1, "bytes": 12, "longest_s": 0.25, "failures": 0, "reason": ""},
    ]  # fmt: skip


def test_late_pushes_of_a_version_are_added_to_it() -> None:
    lines = [
        PushRecord(version=4, unix_s=3.0, full=1, bytes=9, longest_s=1.0),
        PushRecord(version=3, unix_s=1.0, failures=1, reason="refused"),
        PushRecord(version=4, unix_s=5.0, changes=2, bytes=4, longest_s=0.5),
    ]
    three, four = by_version(lines)
    assert (three.version, three.failures, three.reason) == (3, 1, "refused")
    assert four == PushRecord(version=4, unix_s=5.0, full=1, changes=2, bytes=13, longest_s=1.0)
