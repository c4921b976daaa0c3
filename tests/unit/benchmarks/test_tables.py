"""The arithmetic of the benchmark page, by numbers worked by hand; and a page of made-up results.

What it is not: a measurement. Neighbour: benchmarks/harness/tables.py, rows.py, window.py.
"""

from __future__ import annotations

import pytest

from benchmarks.harness.tables import fastest, floor_s, number, percent, share_of_floor, shared_end, table, value_at
from benchmarks.page.sections import alone, engine, learning, logprobs, times
from benchmarks.system.window import CounterSnapshot, between, idle_share

RESULTS = {
    "engine": {
        "cases": [
            {"settings": name, "lengths": "fixed", "dtype": "float32", "start_s": 30.0, **measured}
            for name, measured in (
                ("defaults", {"seconds": 4.0, "tokens_per_s": 8000.0}),
                ("ours", {"seconds": 5.0, "tokens_per_s": 6400.0}),
                ("service", {"seconds": 5.0, "tokens_per_s": 6000.0}),
            )
        ]
    },
    "learner": {
        "cases": [
            {"lengths": "fixed", "dtype": "float32", "threads": "service", "seconds": 3.5},
            {"lengths": "fixed", "dtype": "float32", "threads": "active", "seconds": 3.0},
        ]
    },
    "system": {
        "cases": [
            {
                "max_lag": 1,
                "lengths": "fixed",
                "dtype": "float32",
                "seconds": 8.75,
                "seconds_each": [8.5, 9.0],
                "tokens_per_s": 3700.0,
                "tokens_generated": 330.0,
                "tokens_trained": 300.0,
                "answer_tokens": {"median": 128, "mean": 128.0, "max": 128},
            }
        ]
    },
}


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_the_floor_is_both_times_added_and_its_share_falls_with_the_time() -> None:
    assert floor_s(4.0, 3.0) == 7.0
    assert share_of_floor(7.0, 8.75) == pytest.approx(0.8)
    assert floor_s(None, 3.0) is None
    assert share_of_floor(None, 8.75) is None


def test_the_fastest_of_the_asked_for_records_counts() -> None:
    records = [{"kind": "a", "seconds": 2.0}, {"kind": "a", "seconds": 1.5}, {"kind": "b", "seconds": 1.0}]
    assert fastest(records, kind="a") == 1.5
    assert fastest(records, kind="c") is None


def test_a_curve_is_read_off_between_its_points_and_nowhere_else() -> None:
    curve = [(0.0, 0.2), (10.0, 0.4), (20.0, 0.8)]
    assert value_at(curve, 5.0) == pytest.approx(0.3)
    assert value_at(curve, 15.0) == pytest.approx(0.6)
    assert value_at(curve, 20.0) == 0.8
    assert value_at(curve, 20.1) is None
    assert shared_end([curve, [(0.0, 0.2), (12.0, 0.5)]]) == 12.0


def test_tables_and_numbers() -> None:
    assert table(("", "a"), [["x", "1"]]) == "|  | a |\n| --- | ---: |\n| x | 1 |\n"
    assert (number(12345.67), number(None), percent(0.845), percent(None)) == ("12,345.7", "-", "84%", "-")


def test_the_service_is_compared_with_bare_vllm() -> None:
    last = cells(engine(RESULTS).splitlines()[-1])
    assert last == ["our service, fixed, float32", "6,000", "5.00", "75%", "94%", "30"]


def test_a_step_is_compared_with_its_floor() -> None:
    assert alone(RESULTS) == {("fixed", "float32"): (4.0, 3.0)}
    row = cells(times(RESULTS).splitlines()[-1])
    assert row[1:7] == ["8.75", "8.5 to 9.0", "3,700", "7.00", "80%", "1.10"]


def test_chunked_log_probs_are_compared_with_plain_ones() -> None:
    ways = {"plain": {"seconds": 32.0, "peak_bytes": 7 * 2**30}, "chunked": {"seconds": 33.6, "peak_bytes": 2**30}}
    case = {"vocabulary": 151_936, "tokens": 4096, "width": 1024, "ways": ways}
    lines = logprobs({"logprobs": {"cases": [case]}}).splitlines()
    assert cells(lines[2])[1:] == ["32.0", "1.00", "7.00", "1.00"]
    assert cells(lines[3])[1:] == ["33.6", "1.05", "1.00", "0.14"]


def test_accuracies_are_compared_at_equal_steps_and_at_equal_times() -> None:
    def case(old_logprobs: str, seconds: float) -> dict[str, object]:
        points = ((0, 0.0, 0.2), (10, seconds / 2, 0.4), (20, seconds, 0.8))
        curve = [{"step": step, "seconds": s, "accuracy": accuracy, "stderr": 0.02} for step, s, accuracy in points]
        return {"max_lag": 0, "old_logprobs": old_logprobs, "curve": curve, "clipped": [0.1, 0.3]}

    results = {"learning": {"cases": [case("inference", 20.0), case("recompute", 40.0)]}}
    lines = learning(results).splitlines()
    assert cells(lines[0])[2:6] == ["step 10", "step 20", "10 s", "20 s"]
    assert cells(lines[2])[1:] == ["0.200", "0.400", "0.800", "0.400", "0.800", "20", "0.020", "20%"]
    assert cells(lines[3])[1:] == ["0.200", "0.400", "0.800", "0.300", "0.400", "40", "0.020", "20%"]


def test_what_happened_between_two_looks() -> None:
    doing = ("busy", "training"), ("waiting", "rollouts")
    before = CounterSnapshot(100.0, {"learner": {doing[0]: 5.0}}, {"learner": 8.0}, 20.0, 1000.0, ())
    after = CounterSnapshot(110.0, {"learner": {doing[0]: 11.0, doing[1]: 2.0}}, {"learner": 23.0}, 25.0, 1600.0, ())
    found = between(before, after)
    assert found["idle_share"] == {"learner": pytest.approx(2.0 / 8.0)}
    assert found["processor_share"] == {"learner": pytest.approx(1.5)}
    assert (found["machine_idle_cores"], found["tokens_generated"]) == (pytest.approx(0.5), 600.0)
    assert idle_share({}) == 0.0
