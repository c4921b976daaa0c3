"""GPUs by name and memory, and the rates that results of `make gpu-test` replace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gspo.cli.plan.rates import ASSUMED, find_kind, rates_of
from gspo.common.errors import InputError
from gspo.common.host.gpu_kinds import GPU_KINDS

H100 = GPU_KINDS["NVIDIA H100 80GB HBM3"]


@pytest.mark.parametrize(
    ("name", "memory_gb", "expected"),
    [
        (None, 80, "NVIDIA H100 80GB HBM3"),
        (None, 141, "NVIDIA H200"),
        ("h100 nvl", None, "NVIDIA H100 NVL"),
        ("NVIDIA L4", 80, "NVIDIA L4"),
        ("a6000", None, "NVIDIA RTX A6000"),
    ],
)
def test_a_gpu_is_found_by_its_name_or_its_memory(name: str | None, memory_gb: float | None, expected: str) -> None:
    assert find_kind(name, memory_gb).name == expected


@pytest.mark.parametrize(
    ("name", "memory_gb", "message"),
    [
        (None, 77, r"--gpu-memory: 77 GB stands for no known GPU. Name the GPU by --card, or give its GB: 24 "),
        (None, None, "--gpu-memory: is not given, and nvidia-smi shows no GPU of this machine"),
        ("H100", None, "--card: 'H100' is a part of several names. Give one of NVIDIA H100 80GB HBM3, NVIDIA H100 NVL"),
        ("NVIDIA H300", 80, "--card: 'NVIDIA H300' is no known GPU. Give one of .*NVIDIA H100"),
    ],
)
def test_an_unknown_gpu_is_refused_with_those_near_it(name: str | None, memory_gb: float | None, message: str) -> None:
    with pytest.raises(InputError, match=message):
        find_kind(name, memory_gb)


def record(**changes: Any) -> dict[str, Any]:
    rates = {"decode_bytes_share": 0.7}
    return {"part": "engine", "passed": True, "card": H100.name, "date": "2027-01-02", "rates": rates} | changes


def test_rates_measured_on_the_gpu_replace_the_assumed_ones(tmp_path: Path) -> None:
    file = tmp_path / "gpu.json"
    file.write_text(json.dumps([record(), {"part": "push", "passed": True, "card": H100.name, "date": "2027-01-02"}]))
    rates = rates_of(H100, file)
    measured = rates.pop("decode_bytes_share")
    assert (measured.low, measured.high, measured.measured) == (0.7, 0.7, True)
    assert measured.source == "measured: part engine, 2027-01-02"
    assert rates == {name: rate for name, rate in ASSUMED.items() if name != "decode_bytes_share"}
    assert not any(rate.measured for rate in rates_of(H100).values())
    with pytest.raises(InputError, match=r"--rates: .*missing\.json cannot be read .*Give a file that `make gpu-test`"):
        rates_of(H100, tmp_path / "missing.json")


@pytest.mark.parametrize(
    "changes", [{"card": "NVIDIA H200"}, {"passed": False}, {"rates": None}, {"rates": {"optimizer_bytes_share": 0.7}}]
)
def test_other_records_measure_nothing(tmp_path: Path, changes: dict[str, Any]) -> None:
    file = tmp_path / "gpu.json"
    file.write_text(json.dumps([record(**changes)]))
    assert rates_of(H100, file) == ASSUMED


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot be read"),
        ("{}", "holds another content than records"),
    ],
)
def test_a_broken_results_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "gpu.json"
    file.write_text(text)
    with pytest.raises(InputError, match=f"--rates: .*{message}"):
        rates_of(H100, file)
