"""The GPUs that a process may use: nvidia-smi's table, and every form that CUDA_VISIBLE_DEVICES takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from gspo.common.errors import InputError
from gspo.common.host import machine
from gspo.common.host.machine import Gpu, choose_gpus, engine_gpus, generators_per_gpu, visible_gpus
from gspo.common.host.nvidia_smi import programs_on
from tests.support.gpu_machine import GIB, PRODUCT, pretend_gpu_machine, slice_uuid, uuid

INSTALLED = [Gpu(str(n), uuid(n), 80 * GIB) for n in range(4)]


@pytest.mark.parametrize(
    ("chosen", "names"),
    [
        (None, ["0", "1", "2", "3"]),
        ("", []),
        ("-1", []),
        ("2", ["2"]),
        (" 3 , 0", ["3", "0"]),
        ("0,-1,1", ["0"]),
        ("0,,1", ["0"]),
        (uuid(1), [uuid(1)]),
        ("GPU-25b2,0", [uuid(2), "0"]),
        ("MIG-5f3,MIG-6a1", ["MIG-5f3", "MIG-6a1"]),
    ],
)
def test_what_the_caller_leaves(chosen: str | None, names: list[str]) -> None:
    found = choose_gpus(INSTALLED, chosen)
    assert [gpu.name for gpu in found] == names
    by_name = {gpu.name: gpu for gpu in INSTALLED} | {uuid(1): INSTALLED[1], uuid(2): INSTALLED[2]}
    assert [gpu.total_bytes for gpu in found] == [80 * GIB if name in by_name else None for name in names]


@pytest.mark.parametrize(
    ("chosen", "rule"),
    [
        ("4", r"'4' names no GPU of this machine. nvidia-smi shows: 0 \(GPU-05b2a6f0"),
        ("GPU-", "'GPU-' names no GPU"),  # four of them
        ("GPU-77", "'GPU-77' names no GPU"),
        ("all", "'all' names no GPU"),
        ("1,1", "'1,1' names 1 twice"),
        (f"1,{uuid(1)}", f"names {uuid(1)} twice"),
    ],
)
def test_a_name_of_no_gpu_is_refused(chosen: str, rule: str) -> None:
    with pytest.raises(InputError, match=f"CUDA_VISIBLE_DEVICES: .*{rule}"):
        choose_gpus(INSTALLED, chosen)


def test_without_gpus_the_variable_says_nothing() -> None:
    assert choose_gpus([], "3") == []


def test_the_table_of_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpu_machine(monkeypatch, tmp_path, 2, gib=24)
    assert visible_gpus() == [Gpu(str(n), uuid(n), 24 * GIB, product=PRODUCT) for n in (0, 1)]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert visible_gpus() == [Gpu("1", uuid(1), 24 * GIB, product=PRODUCT)]
    # As in a container on a MIG slice, and what a driver prints that has failed.
    tool = tmp_path / "nvidia-smi"
    answer = "0, GPU-1, [N/A], [Insufficient Permissions], NVIDIA A100-SXM4-40GB, Enabled"
    tool.write_text(f"#!/bin/sh\necho '{answer}'\n")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert visible_gpus() == [Gpu("0", "GPU-1", None, product="NVIDIA A100-SXM4-40GB")]
    tool.write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed because it could not talk to the driver'; exit 9\n")
    assert visible_gpus() == []


def test_the_gpus_of_an_engine_are_the_first_that_it_sees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpu_machine(monkeypatch, tmp_path, 4)
    assert engine_gpus({}) == {uuid(0): PRODUCT}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    assert engine_gpus({"tensor_parallel_size": 2}) == {uuid(3): PRODUCT, uuid(1): PRODUCT}


def test_slices_stand_in_the_place_of_a_divided_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpu_machine(monkeypatch, tmp_path, 2, slices={1: ["3g.40gb", "1g.10gb+me"]})
    large, small = slice_uuid(1, 0), slice_uuid(1, 1)
    assert visible_gpus() == [
        Gpu("0", uuid(0), 80 * GIB, product=PRODUCT),
        Gpu(large, large, 40 * 10**9, product=f"{PRODUCT} MIG 3g.40gb"),
        Gpu(small, small, 10 * 10**9, product=f"{PRODUCT} MIG 1g.10gb+me"),
    ]
    assert machine.describe_device() == f"1 x {PRODUCT}, 1 x {PRODUCT} MIG 3g.40gb, 1 x {PRODUCT} MIG 1g.10gb+me"
    for chosen, names in (("MIG-11", [small]), (f"{large},0", [large, "0"]), ("MIG-GPU-1/2/0", ["MIG-GPU-1/2/0"])):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
        assert [gpu.name for gpu in visible_gpus()] == names
    for wrong in ("MIG-7", "1", "MIG-1"):  # unknown, divided, and the beginning of two
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", wrong)
        with pytest.raises(
            InputError, match=rf"'{wrong}' names no GPU of this machine.*0 \(GPU-05.*, {large}, {small}"
        ):
            visible_gpus()


def test_programs_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpu_machine(monkeypatch, tmp_path, 3, used_gib=[0, 70])
    assert programs_on(uuid(1)) == "process 4001, python: 70.0 GiB"
    assert programs_on(uuid(0)) == ""


def test_engines_made_for_cpus_leave_every_gpu_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpu_machine(monkeypatch, tmp_path, 2)
    monkeypatch.setattr("importlib.metadata.version", lambda _: "2.13.0+cpu")
    assert visible_gpus() == []


@pytest.mark.parametrize(
    ("dtype", "seen", "warned"), [("float32", 1, True), ("float32", 0, False), ("bfloat16", 1, False)]
)
def test_float32_on_a_gpu_is_warned_of(dtype: str, seen: int, warned: bool, capsys: pytest.CaptureFixture[str]) -> None:
    machine.warn_of_float32("generation.dtype", dtype, INSTALLED[:seen])
    assert capsys.readouterr().err.startswith("warning: generation.dtype is float32") is warned


def test_who_shares_is_told_by_gspo_run_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GSPO_GENERATORS_PER_GPU", raising=False)
    assert generators_per_gpu(INSTALLED[:2]) == [0, 0]
    monkeypatch.setenv("GSPO_GENERATORS_PER_GPU", "2,0")
    assert generators_per_gpu(INSTALLED[:2]) == [2, 0]
