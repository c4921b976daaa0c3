"""The tables of the pipeline, from the results of its part."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median

from benchmarks.harness.tables import Record, number, percent, table

SERVICES = ("coordinator", "generation", "reward", "learner", "redis")


def rates(cases: Iterable[Record]) -> str:
    """Rollouts a second, and of each service the processor time that one rollout takes."""
    header = ("", "rollouts/s", *(f"{service}, ms" for service in SERVICES), "all, ms")
    rows = []
    for case in cases:
        if case["what"] == "redis":
            rows.append(
                [f"Redis alone, entries of {number(case['bytes'], 0)} bytes", number(case["per_s"], 0), *[""] * 6]
            )
            continue
        spent = [_of(case["processor_s"], service) / case["rollouts"] * 1e3 for service in SERVICES]
        name = f"{case['replicas']} of generation and of reward, {number(case['rollouts'], 0)} rollouts"
        rows.append([name, number(case["per_s"], 0), *(number(one, 2) for one in [*spent, sum(spent)])])
    return table(header, rows)


def memory(cases: Iterable[Record]) -> str:
    """MiB of every process at the start of the steady time, in its middle and at its end."""
    (case,) = [case for case in cases if case["what"] == "pipeline" and case["replicas"] == 1]
    header = ("", "after a quarter, MiB", "half", "three quarters", "at the end", "growth")
    rows = []
    for name, mib in case["memory"]["mib"].items():
        parts = quarters(mib)
        rows.append([name, *(number(part, 0) for part in parts), percent(parts[-1] / parts[0] - 1)])
    return table(header, rows)


def quarters(mib: list[float]) -> list[float]:
    """Medians around the quarters of a curve and at its end: one look at a moment says little."""
    width = max(1, len(mib) // 20)
    ends = [max(width, round(len(mib) * part / 4)) for part in (1, 2, 3, 4)]
    return [median(mib[end - width : end]) for end in ends]


def _of(used: dict[str, float], service: str) -> float:
    """Of all replicas of a service."""
    return sum(seconds for name, seconds in used.items() if name.partition("-")[0] == service)
