"""A machine with GPUs, as far as our code asks before it starts anything: an nvidia-smi, and engines built for CUDA.

What it is not: a GPU; no engine can be started on it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from gspo.common.host.machine import GENERATORS_PER_GPU, VISIBLE

GIB = 1 << 30
PRODUCT = "NVIDIA H100 80GB HBM3"


def gpu_machine(
    folder: Path,
    num_gpus: int,
    *,
    gib: int = 80,
    used_gib: Sequence[int] = (),
    slices: Mapping[int, Sequence[str]] = {},
) -> dict[str, str]:
    """Variables under which a process believes that it is on such a machine.

    Args:
        used_gib: That of each GPU, by one program; 0 for those after the last.
        slices: Profiles of the MIG slices of a divided GPU, by its index.
    """
    folder.mkdir(parents=True, exist_ok=True)
    used_mib = [1024 * gib for gib in used_gib] + [0] * (num_gpus - len(used_gib))
    rows, programs, gpus = [], [], []
    for n in range(num_gpus):
        mode = "Enabled" if n in slices else "Disabled"
        rows.append(f"{n}, {uuid(n)}, {gib * 1024}, {used_mib[n]}, {PRODUCT}, {mode}")
        programs += [f"{uuid(n)}, {4000 + n}, {used_mib[n]}, python"] if used_mib[n] else []
        gpus.append(f"GPU {n}: {PRODUCT} (UUID: {uuid(n)})")
        gpus += [
            f"  MIG {profile:<15} Device {place:>2}: (UUID: {slice_uuid(n, place)})"
            for place, profile in enumerate(slices.get(n, ()))
        ]
    _write_tool(folder / "nvidia-smi", {"*query-gpu*": rows, "*query-compute-apps*": programs, "-L": gpus})
    for package, version in (("torch", "2.13.0"), ("vllm", "0.32.0")):
        info = folder / f"{package}-{version}.dist-info"
        info.mkdir(exist_ok=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
    python_path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    # Locks of GPUs that other tests believe in are elsewhere.
    runtime = {"XDG_RUNTIME_DIR": str(folder)}
    return {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": python_path, **runtime}


def _write_tool(path: Path, answers: Mapping[str, Sequence[str]]) -> None:
    """A program that prints the lines of the first pattern that its arguments match."""
    lines = ["#!/bin/sh", 'case "$*" in']
    for pattern, answer in answers.items():
        lines += [f"{pattern})", "cat <<'END'", *answer, "END", ";;"]
    path.write_text("\n".join([*lines, "esac", ""]))
    path.chmod(0o755)


def pretend_gpu_machine(
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    num_gpus: int,
    *,
    gib: int = 80,
    used_gib: Sequence[int] = (),
    slices: Mapping[int, Sequence[str]] = {},
) -> None:
    """Have this very process believe it; what CUDA_VISIBLE_DEVICES said is forgotten."""
    for name, value in gpu_machine(folder, num_gpus, gib=gib, used_gib=used_gib, slices=slices).items():
        monkeypatch.setenv(name, value)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delenv(VISIBLE, raising=False)
    monkeypatch.delenv(GENERATORS_PER_GPU, raising=False)


def uuid(index: int) -> str:
    """The UUID of the GPU with this index."""
    return f"GPU-{index}5b2a6f0-0000-0000-0000-00000000000{index}"


def slice_uuid(index: int, place: int) -> str:
    """The UUID of a MIG slice, by its place on the GPU with this index."""
    return f"MIG-{index}{place}2a6f0-0000-0000-0000-000000000000"
