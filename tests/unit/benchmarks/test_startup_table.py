"""The table of the start, from a made-up result worked by hand."""

from benchmarks.system.startup_table import start

CASE = {
    "number": 1,
    "reached_s": {"checked": 4.25, "first answer": 20.0},
    "processor_s": {"gspo run": 1.0, "coordinator": 2.5, "generation": 9.0, "reward": 1.25, "learner": 4.0},
}


def test_processor_times_are_added() -> None:
    assert start([CASE]).splitlines()[2] == "| start 1 | 4.2 | 20.0 | 1.0 | 2.5 | 9.0 | 1.2 | 4.0 | 0.0 | 17.8 |"
