"""Under any order of events and restarts of the coordinator, the budget holds and every group ends once."""

from __future__ import annotations

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gspo.coordinator.groups.slots import OpenGroup, Slots

BATCH_SIZE, MAX_LAG = 3, 2
NUM_SLOTS = (MAX_LAG + 1) * BATCH_SIZE
SETTLEMENTS = ("filtered", "stale", "failed")


class SlotsMachine(RuleBasedStateMachine):
    """A learner that trains and settles; a coordinator whose events come late, twice, or after a restart."""

    def __init__(self) -> None:
        super().__init__()
        self.slots = Slots(NUM_SLOTS, BATCH_SIZE)
        self.open: dict[int, OpenGroup] = {}
        self.issued: Counter[int] = Counter()
        self.ended: dict[int, str] = {}
        self.made_from: dict[int, list[int]] = {}
        self.version, self.live = 0, -1
        self.events: list[tuple[str, list[int], int]] = []

    @rule(count=st.integers(0, NUM_SLOTS))
    def issue(self, count: int) -> None:
        for group in self.slots.upcoming(min(count, self.slots.num_free)):
            open_group = OpenGroup(1, 0.0, 1.0, self.slots.issue_version)
            self.slots.open[group] = open_group
            self.open[group] = open_group
            self.issued[group] += 1

    @precondition(lambda self: bool(set(self.open) - set(self.ended)))
    @rule(data=st.data())
    def train(self, data: st.DataObject) -> None:
        waiting = sorted(set(self.open) - set(self.ended))
        groups = data.draw(st.lists(st.sampled_from(waiting), min_size=1, max_size=BATCH_SIZE, unique=True))
        self.version += 1
        self.made_from[self.version] = groups
        self.ended |= dict.fromkeys(groups, "trained")
        self.events.append(("trained", groups, self.version))

    @precondition(lambda self: bool(set(self.open) - set(self.ended)))
    @rule(data=st.data(), settlement=st.sampled_from(SETTLEMENTS))
    def settle(self, data: st.DataObject, settlement: str) -> None:
        group = data.draw(st.sampled_from(sorted(set(self.open) - set(self.ended))))
        self.ended[group] = settlement
        self.events.append((settlement, [group], 0))

    @rule()
    def push(self) -> None:
        self.live = self.version
        self.events.append(("live", [], self.version))

    @rule(count=st.integers(1, 5), repeated=st.booleans())
    def hear(self, count: int, repeated: bool) -> None:
        heard, self.events = self.events[:count], self.events[count:]
        for _ in range(1 + repeated):
            for kind, groups, version in heard:
                self._apply(kind, groups, version)

    @rule()
    def reconcile(self) -> None:
        self._forget(self.slots.reconcile(self._ranges(), self.version, self.live, dict(Counter(self.ended.values()))))

    @rule()
    def restart(self) -> None:
        """A new coordinator: it hears no event of before, and knows what the learner and Redis know."""
        self.slots = Slots(NUM_SLOTS, BATCH_SIZE)
        self.events = []
        for group, open_group in self.open.items():
            self.slots.open[group] = open_group
        self.reconcile()

    @rule()
    def restart_without_redis(self) -> None:
        """The same after a wipe: the `open` hash is empty, and the open groups are issued again."""
        self.open = {}
        self.restart()

    @invariant()
    def the_budget_holds(self) -> None:
        known_open = set(self.issued) - set(self.ended)
        num_trained = sum(len(groups) for version, groups in self.made_from.items() if version > self.live)
        assert len(known_open & set(self.open)) + num_trained <= NUM_SLOTS

    @invariant()
    def what_has_ended_is_not_issued_again(self) -> None:
        assert not set(self.slots.upcoming(NUM_SLOTS)) & (set(self.open) | set(self.ended) - self._unheard())
        assert all(self.issued[group] for group in self.ended)

    def teardown(self) -> None:
        """Let the run end: every group issued has ended exactly once, and the slots know how."""
        self.hear(len(self.events) + 1, False)
        while waiting := sorted(set(self.open) - set(self.ended)):
            self.ended |= dict.fromkeys(waiting[:BATCH_SIZE], "trained")
            self.version += 1
            self._apply("trained", waiting[:BATCH_SIZE], self.version)
        self._apply("live", [], self.version)
        self.reconcile()
        assert not self.slots.open
        assert self.slots.num_free == NUM_SLOTS
        assert +self.slots.counts == +Counter(self.ended.values())
        assert len(self.slots.settled) == len(self.ended)

    def _apply(self, kind: str, groups: list[int], version: int) -> None:
        if kind == "live":
            self.slots.go_live(version)
        elif kind == "trained":
            self._forget(self.slots.settle_trained(groups, version))
        else:
            self._forget(self.slots.settle(groups, kind))

    def _forget(self, groups: list[int]) -> None:
        for group in groups:
            self.open.pop(group, None)

    def _unheard(self) -> set[int]:
        return {group for _, groups, _ in self.events for group in groups}

    def _ranges(self) -> list[tuple[int, int]]:
        return [(group, group) for group in sorted(self.ended)]


TestRun = SlotsMachine.TestCase
TestRun.settings = settings(stateful_step_count=40)
