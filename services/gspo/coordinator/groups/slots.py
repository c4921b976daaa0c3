"""The staleness budget: the open groups, the slots that trained groups still take, the next group.

A pure state machine without Redis or a clock. Events and the learner's own account overlap, so a call that is
repeated with the same arguments changes nothing.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass

TRAINED = "trained"


@dataclass(frozen=True)
class OpenGroup:
    """One value of the `open` hash: a group that is issued and not settled.

    Attributes:
        min_version: Version of the first issue: answers of an earlier attempt count, so no token can be older.
        progress: Tokens that its rollouts had when its deadline was last checked.
    """

    attempt: int
    issued_unix_s: float
    deadline_unix_s: float
    min_version: int
    progress: int = 0

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> OpenGroup:
        """Read a value of the hash."""
        return cls(**json.loads(text))


class SettledGroups:
    """A set of group ids that grows from below: all under `floor`, and some above it."""

    def __init__(self) -> None:
        self.floor = 0
        self._above: set[int] = set()

    def __contains__(self, group: int) -> bool:
        return group < self.floor or group in self._above

    def __len__(self) -> int:
        return self.floor + len(self._above)

    def add(self, first: int, last: int) -> None:
        """Add groups first .. last, both included."""
        if first <= self.floor:
            self.floor = max(self.floor, last + 1)
            self._above = {group for group in self._above if group >= self.floor}
        else:
            self._above.update(range(first, last + 1))
        while self.floor in self._above:
            self._above.remove(self.floor)
            self.floor += 1


class Slots:
    """Slots and settlement of one run.

    A group takes a slot when it is issued. A trained one gives it back when the version made from it is live on a
    generator, any other when it is settled.

    Attributes:
        open: The groups that are issued and not settled; the ledger enters them.

    Args:
        num_slots: (max_lag + 1) * batch_size.
        batch_size: Groups in a step, at most.
        num_groups: Groups that exist in all; None is endless.
    """

    def __init__(self, num_slots: int, batch_size: int, num_groups: int | None = None) -> None:
        self.num_slots, self._batch_size, self._num_groups = num_slots, batch_size, num_groups
        self.open: dict[int, OpenGroup] = {}
        self.settled = SettledGroups()
        self.counts: Counter[str] = Counter()
        self.version, self.live_version = 0, -1
        self._trained_by_version: dict[int, int] = {}

    @property
    def num_trained(self) -> int:
        """Slots of groups that are trained, while their version is not live yet."""
        return sum(self._trained_by_version.values())

    @property
    def num_taken(self) -> int:
        return len(self.open) + self.num_trained

    @property
    def num_free(self) -> int:
        """Groups that may be issued now."""
        return max(0, self.num_slots - self.num_taken)

    @property
    def num_issued(self) -> int:
        """Groups issued in all, repeats not counted."""
        return len(self.settled) + len(self.open)

    @property
    def issue_version(self) -> int:
        """Oldest version that may work on a group issued now: the newest live one, or the learner's before any is."""
        return self.live_version if self.live_version >= 0 else self.version

    @property
    def exhausted(self) -> bool:
        """Whether every group that exists was issued."""
        return self._num_groups is not None and not self.upcoming(1)

    def upcoming(self, count: int) -> list[int]:
        """The next `count` groups to issue: those missing below the newest first, fewer where the order ends."""
        groups: list[int] = []
        group = self.settled.floor
        while len(groups) < count and (self._num_groups is None or group < self._num_groups):
            if group not in self.settled and group not in self.open:
                groups.append(group)
            group += 1
        return groups

    def settle_trained(self, groups: Iterable[int], version: int) -> list[int]:
        """A step made `version` from these groups; returns those not known as settled before."""
        groups = list(groups)
        if version > self.live_version:
            self._trained_by_version[version] = len(groups)
        self.version = max(self.version, version)
        return self.settle(groups, TRAINED)

    def settle(self, groups: Iterable[int], settlement: str) -> list[int]:
        """Groups ended; returns those not known as settled before."""
        new = [group for group in groups if group not in self.settled]
        for group in new:
            self.settled.add(group, group)
            self.open.pop(group, None)
        self.counts[settlement] += len(new)
        return new

    def go_live(self, version: int) -> None:
        """A generator has `version`: groups trained into it or an older one give their slots back."""
        self.live_version = max(self.live_version, version)
        self._trained_by_version = {
            trained: count for trained, count in self._trained_by_version.items() if trained > self.live_version
        }

    def expired(self, now_unix_s: float) -> list[int]:
        """Open groups past their deadline, the oldest first."""
        return sorted(group for group, value in self.open.items() if value.deadline_unix_s <= now_unix_s)

    def reconcile(
        self, settled: Iterable[tuple[int, int]], version: int, live_version: int, counts: dict[str, int]
    ) -> list[int]:
        """Take over the learner's own account; returns the open groups that it has settled.

        It does not name the groups of the versions that are not live yet. Each such version takes the slots of a
        whole batch until it is live or its StepDone comes. Too many taken slots only delay; too few would break the
        budget.
        """
        for first, last in settled:
            self.settled.add(first, last)
        closed = [group for group in self.open if group in self.settled]
        for group in closed:
            del self.open[group]
        for settlement, count in counts.items():
            self.counts[settlement] = max(self.counts[settlement], count)
        self.version = max(self.version, version)
        self.go_live(live_version)
        # The slots bound how many versions can wait, also where a learner just restarted reports an old live version.
        oldest = max(self.live_version, 0, self.version - self.num_slots // self._batch_size)
        for trained in range(oldest + 1, self.version + 1):
            self._trained_by_version.setdefault(trained, self._batch_size)
        return closed
