"""Two states of first name, however they differ, become first state."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gspo.reward.registry.records import Origin, RegisteredName

VERSIONS = st.sampled_from(["a" * 64, "b" * 64, "c" * 64])
ACTIONS = st.lists(st.tuples(st.sampled_from(["submit", "activate", "retire", "remove"]), VERSIONS), max_size=6)


def play(actions: list[tuple[str, str]], times: list[float]) -> RegisteredName:
    """A name after these actions, as far as its rules allow them."""
    name = RegisteredName.empty("exact", "reward").with_version(
        "a" * 64, "reward", Origin(by="ann", unix_s=0), activate=False
    )
    for (action, version), unix_s in zip(actions, times, strict=False):
        if action == "submit":
            name = name.with_version(version, "reward", Origin(by="ann", unix_s=unix_s), activate=False)
        elif action == "retire":
            name = name.without_active()
        elif version in name.versions and action == "activate":
            name = name.activated(version, None)
        elif version in name.versions and version != name.active and action == "remove":
            name = name.without_version(version, Origin(by="bob", unix_s=unix_s, removed=True))
    return name


TIMES = st.lists(st.integers(1, 20).map(float), min_size=6, max_size=6).map(sorted)
NAMES = st.builds(play, ACTIONS, TIMES)


@given(NAMES, NAMES)
def test_merging_two_states_gives_the_same_in_either_order_and_nothing_twice(
    first: RegisteredName, second: RegisteredName
) -> None:
    merged = first.merged(second)
    assert merged == second.merged(first)
    assert merged.merged(first) == merged.merged(second) == merged.merged(merged) == merged
    assert not set(merged.versions) & set(merged.removed)
    assert merged.active == "" or merged.active in merged.versions


def test_a_merge_that_retires_a_version_stays_so_when_it_meets_its_parts_again() -> None:
    active = play([("submit", "b" * 64), ("activate", "b" * 64)], [1.0, 1.0])
    removed = play([("submit", "b" * 64), ("remove", "b" * 64)], [1.0, 1.0])
    merged = active.merged(removed)
    assert merged.active == ""
    assert merged.merged(removed) == merged.merged(active) == merged


@given(NAMES)
def test_a_state_from_before_a_removal_does_not_bring_the_version_back(name: RegisteredName) -> None:
    before = name.with_version("d" * 64, "reward", Origin(by="ann", unix_s=30), activate=False)
    if before.active == "d" * 64:
        before = before.without_active()
    after = before.without_version("d" * 64, Origin(by="bob", unix_s=31, removed=True))
    assert "d" * 64 not in after.merged(before).versions
    again = after.with_version("d" * 64, "reward", Origin(by="ann", unix_s=32), activate=False)
    assert "d" * 64 in after.merged(again).versions


def test_the_higher_revision_says_which_version_is_active() -> None:
    older = play([("submit", "b" * 64)], [1.0])
    newer = older.activated("b" * 64, if_active="a" * 64)
    assert older.merged(newer).active == newer.merged(older).active == "b" * 64
