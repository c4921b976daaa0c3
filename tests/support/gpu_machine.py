"""A machine with GPUs, as far as our code asks before it starts anything: an nvidia-smi, and engines built for CUDA.

What it is not: a GPU; no engine can be started on it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from gspo.common.host.machine import GENERATORS_PER_GPU, VISIBLE

GIB = 1 << 30


def gpu_machine(folder: Path, num_gpus: int, *, gib: int = 80, used_gib: Sequence[int] = ()) -> dict[str, str]:
    """Variables under which a process believes that it is on such a machine."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [
        f"{n}, {uuid(n)}, {gib * 1024}, {(used_gib[n] if n < len(used_gib) else 0) * 1024}" for n in range(num_gpus)
    ]
    tool = folder / "nvidia-smi"
    tool.write_text("#!/bin/sh\ncat <<'END'\n" + "\n".join(rows) + "\nEND\n")
    tool.chmod(0o755)
    for package, version in (("torch", "2.13.0"), ("vllm", "0.32.0")):
        info = folder / f"{package}-{version}.dist-info"
        info.mkdir(exist_ok=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
    python_path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    return {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": python_path}


def pretend_gpu_machine(monkeypatch: pytest.MonkeyPatch, folder: Path, num_gpus: int, *, gib: int = 80) -> None:
    """Have this very process believe it; what CUDA_VISIBLE_DEVICES said is forgotten."""
    for name, value in gpu_machine(folder, num_gpus, gib=gib).items():
        monkeypatch.setenv(name, value)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delenv(VISIBLE, raising=False)
    monkeypatch.delenv(GENERATORS_PER_GPU, raising=False)


def uuid(index: int) -> str:
    """Of the GPU with this index."""
    return f"GPU-{index}5b2a6f0-0000-0000-0000-00000000000{index}"
