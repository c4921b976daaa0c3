"""The position in the order of prompts after a resume: behind every group that ended, however it ended.

The learner reads its log again, and the coordinator's slots take the settled groups over.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from gspo.coordinator.groups.slots import OpenGroup, Slots
from gspo.learner.assembly.rows import row_from_scored
from gspo.learner.assembly.settlements import EndedGroup, GroupEnding
from gspo.learner.storage.run_directory import RunDir
from tests.unit.learner.conftest import MakeScored

OPEN = OpenGroup(attempt=1, issued_unix_s=0.0, deadline_unix_s=100.0, min_version=0)


@pytest.mark.parametrize(
    ("still_open", "expected"),
    # Groups 0 and 3 were trained, 1, 2 and 5 dropped; 4 is open, or was lost with Redis.
    [([4], [6, 7, 8]), ([], [4, 6, 7])],
)
def test_dropped_prompts_hold_nothing_back_and_are_not_asked_again(
    tmp_path: Path, scored: MakeScored, still_open: list[int], expected: list[int]
) -> None:
    with RunDir(tmp_path) as run:
        run.write_step(1, [replace(row_from_scored(scored(group)), step=1) for group in (0, 3)])
        run.settle([EndedGroup(1, GroupEnding.FILTERED, "all rewards equal")])
        run.settle([EndedGroup(2, GroupEnding.FAILED, "given up"), EndedGroup(5, GroupEnding.STALE, "too old")])
    slots = Slots(6, 2)
    for group in still_open:
        slots.open[group] = OPEN
    with RunDir(tmp_path) as resumed:
        account = resumed.settlements
        assert slots.reconcile(account.ranges(), 1, -1, account.counts()) == []
    assert slots.upcoming(3) == expected
    assert slots.num_issued == 5 + len(still_open)
