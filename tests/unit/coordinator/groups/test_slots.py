"""Slots by hand: two of a batch of two (max_lag 1), so four slots."""

from __future__ import annotations

from gspo.coordinator.groups.slots import OpenGroup, SettledGroups, Slots


def open_group(deadline_unix_s: float = 100.0) -> OpenGroup:
    return OpenGroup(attempt=1, issued_unix_s=0.0, deadline_unix_s=deadline_unix_s, min_version=0)


def issued(num_groups: int | None = None) -> Slots:
    """All four slots taken by groups 0 to 3, version 0 live."""
    slots = Slots(4, 2, num_groups)
    slots.go_live(0)
    for group in slots.upcoming(slots.num_free):
        slots.open[group] = open_group()
    return slots


def test_as_many_groups_as_slots() -> None:
    slots = issued()
    assert sorted(slots.open) == [0, 1, 2, 3]
    assert (slots.num_free, slots.num_taken, slots.num_issued) == (0, 4, 4)


def test_a_trained_group_gives_its_slot_back_when_its_version_is_live() -> None:
    slots = issued()
    assert slots.settle_trained([1, 3], version=1) == [1, 3]
    assert (sorted(slots.open), slots.num_trained, slots.num_free) == ([0, 2], 2, 0)
    slots.go_live(0)
    assert slots.num_free == 0
    slots.go_live(1)
    assert (slots.num_trained, slots.num_free) == (0, 2)
    assert slots.upcoming(2) == [4, 5]
    assert slots.counts == {"trained": 2}


def test_a_later_version_frees_the_slots_of_those_before() -> None:
    slots = issued()
    slots.settle_trained([0, 1], version=1)
    slots.settle_trained([2, 3], version=2)
    assert slots.num_free == 0
    slots.go_live(2)
    assert slots.num_free == 4


def test_a_version_live_before_its_step_event_keeps_no_slot() -> None:
    slots = issued()
    slots.go_live(1)
    slots.settle_trained([0, 1], version=1)
    assert (slots.num_trained, slots.num_free) == (0, 2)


def test_any_other_settlement_gives_the_slot_back_at_once() -> None:
    slots = issued()
    assert slots.settle([2], "filtered") == [2]
    assert slots.num_free == 1
    assert slots.settle([2], "filtered") == []
    assert slots.counts == {"filtered": 1}
    assert slots.upcoming(1) == [4]


def test_an_event_heard_twice_counts_once() -> None:
    slots = issued()
    slots.settle_trained([0, 1], version=1)
    assert slots.settle_trained([0, 1], version=1) == []
    assert (slots.num_trained, slots.counts["trained"]) == (2, 2)


def test_the_order_ends() -> None:
    slots = issued(num_groups=5)
    slots.settle([0, 1], "filtered")
    assert slots.upcoming(2) == [4]
    assert not slots.exhausted
    slots.open[4] = open_group()
    assert slots.exhausted
    assert slots.num_free == 1


def test_groups_that_got_lost_are_issued_before_new_ones() -> None:
    slots = Slots(4, 2)
    slots.open[7] = open_group()
    slots.reconcile([(0, 2), (4, 5)], version=3, live_version=3, counts={"trained": 5})
    assert slots.upcoming(3) == [3, 6, 8]


def test_after_a_restart_versions_that_are_not_live_keep_whole_batches() -> None:
    slots = Slots(4, 2)
    slots.open[4] = open_group()
    closed = slots.reconcile([(0, 4)], version=2, live_version=1, counts={"trained": 4, "failed": 1})
    assert closed == [4]
    assert (slots.num_trained, slots.num_free, len(slots.open)) == (2, 2, 0)
    slots.settle_trained([3], version=2)
    assert slots.num_trained == 1
    slots.go_live(2)
    assert slots.num_free == 4


def test_a_learner_just_restarted_calls_nothing_live() -> None:
    slots = Slots(4, 2)
    slots.reconcile([(0, 99)], version=50, live_version=-1, counts={})
    assert (slots.num_trained, slots.num_free, slots.issue_version) == (4, 0, 50)
    slots.go_live(50)
    assert slots.num_free == 4


def test_the_account_never_goes_back() -> None:
    slots = issued()
    slots.settle_trained([0, 1], version=1)
    slots.go_live(1)
    slots.reconcile([], version=0, live_version=-1, counts={"trained": 0})
    assert (slots.version, slots.live_version, slots.counts["trained"], slots.num_trained) == (1, 1, 2, 0)


def test_deadlines() -> None:
    slots = Slots(4, 2)
    slots.open[1] = open_group(20.0)
    slots.open[0] = open_group(10.0)
    slots.open[2] = open_group(30.0)
    assert slots.expired(9.9) == []
    assert slots.expired(20.0) == [0, 1]


def test_an_open_group_survives_its_text() -> None:
    group = OpenGroup(attempt=2, issued_unix_s=1.5, deadline_unix_s=601.5, min_version=7, progress=30)
    text = '{"attempt": 2, "issued_unix_s": 1.5, "deadline_unix_s": 601.5, "min_version": 7, "progress": 30'
    assert group.to_json() == text + "}"
    assert OpenGroup.from_json(group.to_json().encode()) == group
    assert OpenGroup.from_json(text + "}") == group, "an entry of an older coordinator"


def test_settled_groups_grow_from_below() -> None:
    settled = SettledGroups()
    settled.add(2, 3)
    assert (settled.floor, len(settled), 2 in settled, 0 in settled) == (0, 2, True, False)
    settled.add(0, 0)
    assert settled.floor == 1
    settled.add(1, 1)
    assert (settled.floor, len(settled)) == (4, 4)
    settled.add(0, 9)
    assert (settled.floor, 9 in settled, 10 in settled) == (10, True, False)
