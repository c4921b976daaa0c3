"""The tables of the pipeline, from made-up results, by numbers worked by hand."""

from __future__ import annotations

from benchmarks.pipeline.rollout_rate_tables import memory, quarters, rates

USED = {"coordinator-0": 1.0, "generation-0": 4.0, "generation-1": 4.0, "reward-0": 2.0, "learner-0": 6.0, "redis": 3.0}
CASES = [
    {"what": "redis", "tokens": 1000, "bytes": 8039, "per_s": 20_000.0},
    {
        "what": "pipeline",
        "replicas": 1,
        "rollouts": 20_000,
        "per_s": 2_000.0,
        "processor_s": USED,
        "memory": {"mib": {"reward-0": [0.0, 100.0, 100.0, 110.0, 110.0, 110.0, 110.0, 120.0]}},
    },
]


def rows(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]


def test_processor_time_is_that_of_one_rollout_over_all_replicas() -> None:
    redis, pipeline = rows(rates(CASES))
    assert redis[:2] == ["Redis alone, entries of 8,039 bytes", "20,000"]
    # 8 s of two generators over 20,000 rollouts are 0.4 ms.
    assert pipeline[1:] == ["2,000", "0.05", "0.40", "0.10", "0.30", "0.15", "1.00"]


def test_memory_is_read_off_at_the_quarters() -> None:
    assert quarters([0.0, 100.0, 100.0, 110.0, 110.0, 110.0, 110.0, 120.0]) == [100.0, 110.0, 110.0, 120.0]
    assert rows(memory(CASES)) == [["reward-0", "100", "110", "110", "120", "20%"]]
