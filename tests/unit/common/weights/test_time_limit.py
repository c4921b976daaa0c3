"""Limits that follow from bytes and from the times seen, by numbers worked by hand."""

from __future__ import annotations

from gspo.common.weights.time_limit import TimeLimit


def test_the_limit_grows_with_the_bytes_and_is_never_below_the_least() -> None:
    limit = TimeLimit(60.0, 100e6)
    assert limit.seconds(0) == limit.seconds(1_000_000_000) == 60.0
    # 4 x 15 GB at 100 MB/s.
    assert limit.seconds(15_000_000_000) == 600.0
    assert limit.seconds(470_000_000_000) == 18800.0


def test_the_limit_follows_the_slowest_of_the_last_eight_times() -> None:
    limit = TimeLimit(1.0, 100e6)
    for _ in range(7):
        limit.record(1_000_000_000, 1.0)
        assert limit.seconds(10_000_000_000) == 400.0, "the first assumption holds until enough was seen"
    limit.record(1_000_000_000, 1.0)
    assert limit.seconds(10_000_000_000) == 40.0
    limit.record(1_000_000_000, 20.0)
    assert limit.seconds(10_000_000_000) == 800.0
    for _ in range(8):
        limit.record(1_000_000_000, 2.0)
    assert limit.seconds(10_000_000_000) == 80.0


def test_work_without_bytes_says_nothing_of_a_rate() -> None:
    limit = TimeLimit(1.0, 100.0)
    limit.record(0, 5.0)
    assert limit.seconds(100) == 4.0
