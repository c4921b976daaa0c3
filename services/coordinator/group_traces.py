"""The root span of each rollout's trace, and its first station: from the issue of its group until the group has ended.

Only the coordinator sees both ends. Neighbours: issuer.py issues, loop.py hears of the ends, services/common/traces.py
sends.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable

from services.common.traces import Traces


class GroupTraces:
    """The groups that are under way; holds nothing where traces are off.

    Args:
        group_size: Rollouts of a group.
    """

    def __init__(self, traces: Traces, group_size: int) -> None:
        self._traces, self._numbers = traces, range(group_size)
        self._issued: dict[int, float] = {}
        self._not_live: dict[int, list[int]] = defaultdict(list)

    def issued(self, groups: Iterable[int], began_unix_s: float) -> None:
        """Groups were written, again perhaps, after their prompts were read from `began_unix_s` on."""
        if not self._traces.on:
            return
        now = time.time()
        for group in groups:
            self._issued.setdefault(group, began_unix_s)
            for number in self._numbers:
                self._traces.add("prompt", group, number, began_unix_s, now)

    def trained(self, groups: Iterable[int], version: int) -> None:
        """Groups are in the step that made `version`; their way ends when it is live."""
        if self._traces.on:
            self._not_live[version] += groups

    def live(self, version: int) -> None:
        """A generator serves `version`."""
        for made in [made for made in self._not_live if made <= version]:
            self.ended(self._not_live.pop(made), "trained")

    def ended(self, groups: Iterable[int], settlement: str) -> None:
        """Groups have ended."""
        if not self._traces.on:
            return
        now = time.time()
        for group in groups:
            if (began := self._issued.pop(group, None)) is not None:
                for number in self._numbers:
                    self._traces.add_root(group, number, began, now, settlement=settlement)
