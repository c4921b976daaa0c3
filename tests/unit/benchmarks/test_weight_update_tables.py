"""The tables of the weight push, from made-up results, by numbers worked by hand."""

from __future__ import annotations

from benchmarks.push.weight_update_tables import facts, packing, pushes, wire

MIB = 2**20
VERSION = {
    "changed": 0.04,
    "bytes": 100 * MIB,
    "digest_s": 0.05,
    "gaps": {"bytes": 2 * MIB, "pack_s": 0.2, "apply_s": 0.1},
}
CASES = [
    {"kind": "packing", "rate": 1e-6, "parameters": 52428800, "versions": [VERSION] * 3},
    {
        "kind": "wire",
        "bytes": 1024 * MIB,
        "tcp_s": 0.4,
        "grpc_s": 1.0,
        "changes_s": {"1e-06": 0.01},
    },
    {
        "kind": "service",
        "pushes": [
            {"rate": 1e-6, "version": number, "push_s": s, "stage_s": s / 2, "stall_s": 0.1, "bytes": size, "share": 1}
            for number, s, size in ((0, 3.0, 100 * MIB), (1, 1.0, 2 * MIB), (2, 1.2, 2 * MIB), (3, 9.0, 2 * MIB))
        ],
    },
]


def rows(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]


def test_the_changes_of_a_learning_rate_are_a_row() -> None:
    assert rows(packing(CASES)) == [["1e-06", "4.0%", "2.0%", "200", "100"]]
    assert facts(CASES) == {"parameters": "52,428,800", "mib": "100", "versions": "3", "digest": "1.95"}


def test_every_transfer_is_compared_with_tcp() -> None:
    assert [row[2:] for row in rows(wire(CASES))] == [["2.50", "100%"], ["1.00", "40%"]]


def test_whole_pushes_are_apart_from_changes() -> None:
    whole, changes = rows(pushes(CASES))
    assert whole == ["every element", "100.0", "100.0%", "1.000", "1.500", "0.100", "3.000"]
    assert changes == ["changes at 1e-06", "2.0", "100.0%", "0.010", "0.600", "0.100", "1.200"]
