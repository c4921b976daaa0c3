"""The tables of the weight push, from the results of its part."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from benchmarks.harness.tables import Record, middle, number, percent, table

_MIB, _GIB = 2**20, 2**30


def facts(cases: Iterable[Record]) -> dict[str, str]:
    """What the words of the section name: parameters, MiB of the whole, GiB/s of the digest."""
    versions = [version for case in _of(cases, "packing") for version in case["versions"]]
    return {
        "parameters": number(_of(cases, "packing")[0]["parameters"], 0),
        "mib": number(versions[0]["bytes"] / _MIB, 0),
        "versions": str(len(_of(cases, "packing")[0]["versions"])),
        "digest": number(middle([version["bytes"] / version["digest_s"] for version in versions]) / _GIB, 2),
    }


def packing(cases: Iterable[Record]) -> str:
    """The encoding at every learning rate, medians over the versions."""
    header = ("learning rate", "elements changed", "of all bytes", "pack, ms", "apply, ms")
    rows = []
    for case in _of(cases, "packing"):
        found = [version["gaps"] for version in case["versions"]]
        share = [one["bytes"] / version["bytes"] for one, version in zip(found, case["versions"], strict=True)]
        rows.append(
            [
                f"{case['rate']:g}",
                _percent(middle([version["changed"] for version in case["versions"]])),
                _percent(middle(share)),
                *(number(middle([one[key] for one in found]) * 1e3, 0) for key in ("pack_s", "apply_s")),
            ]
        )
    return table(header, rows)


def wire(cases: Iterable[Record]) -> str:
    """The whole policy on every way between two processes."""
    (case,) = _of(cases, "wire")
    ways = {"plain TCP": "tcp_s", "gRPC, our frames": "grpc_s"}
    rows = [
        [
            way,
            number(case[key] * 1e3, 0),
            number(case["bytes"] / case[key] / _GIB, 2),
            percent(case["tcp_s"] / case[key]),
        ]
        for way, key in ways.items()
    ]
    return table(("", "ms", "GiB/s", "of TCP"), rows)


def pushes(cases: Iterable[Record]) -> str:
    """Real pushes: the whole model, and each learning rate's changes."""
    (case,), wires = _of(cases, "service"), _of(cases, "wire")
    sent_s: dict[str, Any] = wires[0]["changes_s"] | {"whole": wires[0]["grpc_s"]}
    rates = sorted({push["rate"] for push in case["pushes"]})
    rows = [_push_row("every element", [p for p in case["pushes"] if not p["version"]], sent_s["whole"])]
    for rate in rates:
        found = [push for push in case["pushes"] if push["rate"] == rate and push["version"]]
        rows.append(_push_row(f"changes at {rate:g}", found, sent_s[f"{rate:g}"]))
    return table(("", "MiB", "of all bytes", "transfer alone, s", "staged and checked, s", "stall, s", "push, s"), rows)


def _push_row(name: str, found: list[Record], sent_s: float) -> list[str]:
    def of(key: str) -> float:
        return middle([push[key] for push in found])

    return [
        name,
        number(of("bytes") / _MIB),
        _percent(of("share")),
        *(number(seconds, 3) for seconds in (sent_s, of("stage_s"), of("stall_s"), of("push_s"))),
    ]


def _percent(value: float) -> str:
    return f"{value:.1%}"


def _of(cases: Iterable[Record], kind: str) -> list[Record]:
    return [case for case in cases if case["kind"] == kind]
