"""The activity of a service: its beginning, its time by kind, and the return to the earlier one."""

from __future__ import annotations

import threading

import pytest

from gspo.common.telemetry import activity as module
from gspo.common.telemetry import metrics
from gspo.common.telemetry.activity import Activity


class Clock:
    """Stands in for `time` in the module: the test decides how much passes."""

    def __init__(self) -> None:
        self.now = 100.0

    def time(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def counted(service: str, kind: str, what: str) -> float:
    return float(metrics.ACTIVITY_SECONDS.labels(service, kind, what)._value.get())


def test_a_service_starts_busy_starting(clock: Clock) -> None:
    assert Activity("a").describe() == {"kind": "busy", "what": "starting", "detail": "", "since_unix_s": 100.0}


def test_time_is_counted_for_what_was_done_and_not_for_what_comes(clock: Clock) -> None:
    activity = Activity("b")
    clock.now += 3
    activity.set("waiting", "rewards")
    clock.now += 5
    activity.set("busy", "training")
    assert (counted("b", "busy", "starting"), counted("b", "waiting", "rewards")) == (3, 5)
    assert counted("b", "busy", "training") == 0


def test_a_new_detail_of_the_same_wait_keeps_its_beginning(clock: Clock) -> None:
    activity = Activity("c")
    activity.set("waiting", "rewards", "of 3 groups")
    clock.now += 7
    activity.set("waiting", "rewards", "of 2 groups")
    described = activity.describe()
    assert (described["since_unix_s"], described["detail"]) == (100.0, "of 2 groups")
    assert counted("c", "waiting", "rewards") == 7


def test_a_block_goes_back_to_what_was_before_also_by_an_error(clock: Clock) -> None:
    activity = Activity("d")
    activity.set("busy", "generating", "8 rollouts")
    with pytest.raises(RuntimeError, match="engine"), activity.waiting("weights", "version 3"):
        clock.now += 2
        assert (activity.kind, activity.what, activity.detail) == ("waiting", "weights", "version 3")
        raise RuntimeError("engine")
    assert (activity.kind, activity.what, activity.detail) == ("busy", "generating", "8 rollouts")
    assert counted("d", "waiting", "weights") == 2


def test_a_thread_that_reads_the_time_before_another_counts_after_it(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the later one would count a negative time, which the counter refuses."""
    activity = Activity("e")

    def set_a_second_later() -> None:
        clock.now += 1
        activity.set("busy", "training")

    other = threading.Thread(target=set_a_second_later)

    class Interrupted(Clock):
        def monotonic(self) -> float:
            now = clock.now
            if threading.current_thread() is not other:
                other.start()
                other.join(0.2)
            return now

        def time(self) -> float:
            return clock.now

    monkeypatch.setattr(module, "time", Interrupted())
    activity.set("waiting", "rewards")
    other.join(10)
    assert counted("e", "waiting", "rewards") == 1
    assert activity.describe()["what"] == "training"
