"""The prompt order: every prompt once a pass, each pass its own order, the same again from the same seed."""

from __future__ import annotations

from gspo.coordinator.groups.tasks import PromptOrder


def places(order: PromptOrder, groups: range) -> list[int]:
    return [order.place(group) for group in groups]


def test_a_pass_has_every_prompt_once_and_the_next_pass_another_order() -> None:
    order = PromptOrder(50, seed=3, shuffle=True, total_epochs=None)
    first, second = places(order, range(50)), places(order, range(50, 100))
    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second
    assert first != list(range(50))


def test_the_order_follows_from_the_seed_alone() -> None:
    again = PromptOrder(50, seed=3, shuffle=True, total_epochs=None)
    other = PromptOrder(50, seed=4, shuffle=True, total_epochs=None)
    order = PromptOrder(50, seed=3, shuffle=True, total_epochs=None)
    backwards = [order.place(group) for group in reversed(range(200))]
    assert places(again, range(200)) == backwards[::-1]
    assert places(other, range(50)) != places(again, range(50))


def test_without_shuffling_the_file_is_repeated_as_it_is() -> None:
    order = PromptOrder(3, seed=0, shuffle=False, total_epochs=None)
    assert places(order, range(7)) == [0, 1, 2, 0, 1, 2, 0]
    assert order.num_groups is None


def test_epochs_bound_the_groups() -> None:
    bounds = {0.01: 1, 0.29: 29, 1.0: 100, 2.5: 250}
    for epochs, num_groups in bounds.items():
        assert PromptOrder(100, seed=0, shuffle=True, total_epochs=epochs).num_groups == num_groups
