"""The root span of each rollout's trace, from the issue of its group to its end, and the span of its prompt.

Only the coordinator sees both ends.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Mapping

from gspo.common.service.traces import Traces
from gspo.coordinator.groups.slots import OpenGroup


class GroupTraces:
    """Times of the issued groups; empty where traces are off.

    Args:
        group_size: Rollouts of a group.
    """

    def __init__(self, traces: Traces, group_size: int) -> None:
        self._traces, self._numbers = traces, range(group_size)
        self._issued: dict[int, float] = {}
        self._not_live: dict[int, list[int]] = defaultdict(list)
        self._live_version = -1

    def issued(self, groups: Mapping[int, OpenGroup]) -> None:
        """Groups were written, for the first time or again; the prompt's span ends now."""
        if not self._traces.on:
            return
        now = time.time()
        for group, entry in groups.items():
            self._issued.setdefault(group, entry.issued_unix_s)
            for number in self._numbers:
                self._traces.add("prompt", group, number, entry.issued_unix_s, now, attempt=entry.attempt)

    def trained(self, groups: Iterable[int], version: int) -> None:
        """Groups are in the step that made `version`. They end when it is live, and that event may come first."""
        if self._traces.on:
            self._not_live[version] += groups
            self.live(self._live_version)

    def live(self, version: int) -> None:
        """A generator serves `version`."""
        self._live_version = version
        for served in [trained for trained in self._not_live if trained <= version]:
            self.ended(self._not_live.pop(served), "trained")

    def ended(self, groups: Iterable[int], settlement: str) -> None:
        """Groups have ended."""
        if not self._traces.on:
            return
        now = time.time()
        for group in groups:
            if (began := self._issued.pop(group, None)) is not None:
                for number in self._numbers:
                    self._traces.add_root(group, number, began, now, settlement=settlement)
