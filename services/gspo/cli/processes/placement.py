"""Places the processes of a run on the GPUs of one machine, by pure functions.

Generators come first, then the learner's ranks. A GPU is shared only where there are too few of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gspo.common.config.schema import Config
from gspo.common.errors import InputError
from gspo.common.host.machine import (
    DEFAULT_SHARE,
    GENERATORS_PER_GPU,
    GIB,
    PARALLEL_ARGUMENTS,
    SHARE_ARGUMENT,
    VISIBLE,
    Gpu,
)
from gspo.common.streams.keys import GENERATION, LEARNER

_SHARE_KEY = f"generation.engine.{SHARE_ARGUMENT}"


@dataclass(frozen=True)
class GpuDemand:
    """The number of different GPUs that one process needs.

    Attributes:
        key: The configuration key that says how many.
    """

    process: str
    num_gpus: int
    key: str


@dataclass(frozen=True)
class GpuAssignment:
    """The GPUs of one process."""

    process: str
    gpus: tuple[Gpu, ...]

    @property
    def is_generator(self) -> bool:
        """Whether vLLM runs in it."""
        return self.process.startswith(GENERATION)


@dataclass(frozen=True)
class Placement:
    """The GPUs of every process; empty on a machine without GPUs.

    Attributes:
        free: GPUs without a process.
    """

    assignments: tuple[GpuAssignment, ...] = ()
    free: tuple[Gpu, ...] = ()

    def environment(self, process: str) -> dict[str, str]:
        """Environment variables for a process, such as "learner-0"; none for a process without GPUs."""
        for it in self.assignments:
            if it.process == process:
                generators = "" if it.is_generator else ",".join(str(self._num_generators(gpu)) for gpu in it.gpus)
                shared = {GENERATORS_PER_GPU: generators} if generators else {}
                return {**_visible(it.gpus), **shared}
        return {}

    def free_gpu_environment(self) -> dict[str, str]:
        """Environment variables for a learner that the user starts, with the free GPUs, if any."""
        return _visible(self.free) if self.free else {}

    def others_on(self, gpus: Iterable[Gpu], process: str) -> list[str]:
        """The other processes on any of these GPUs."""
        names = {gpu.name for gpu in gpus}
        return [
            it.process for it in self.assignments if it.process != process and names & {gpu.name for gpu in it.gpus}
        ]

    def table(self) -> str:
        """A line for each process: its GPUs, and the processes that share them."""
        rows = [("process", "GPU", "shared with")]
        for it in self.assignments:
            names = ", ".join(gpu.name for gpu in it.gpus)
            rows.append((it.process, names, ", ".join(self.others_on(it.gpus, it.process)) or "nobody"))
        if self.free:
            rows.append(("nobody", ", ".join(gpu.name for gpu in self.free), ""))
        return _aligned(rows)

    def _num_generators(self, gpu: Gpu) -> int:
        return sum(it.is_generator and gpu in it.gpus for it in self.assignments)


NO_GPUS = Placement()


def gpus_per_generator(config: Config) -> dict[str, int]:
    """The configured arguments of vLLM that multiply the GPUs of one generator, if they are whole numbers."""
    engine = config.generation.engine
    return {name: engine[name] for name in PARALLEL_ARGUMENTS if type(engine.get(name)) is int}


def gpu_demands(config: Config, processes: Sequence[str]) -> list[GpuDemand]:
    """The demand of each process, generators first. A learner of 0 ranks has none: the user starts it."""
    parallel = gpus_per_generator(config)
    key = f"generation.engine.{next(iter(parallel), PARALLEL_ARGUMENTS[0])}"
    generators = [
        GpuDemand(name, math.prod(parallel.values()), key) for name in processes if name.startswith(GENERATION)
    ]
    ranks = config.learner.ranks
    learners = [GpuDemand(name, ranks, "learner.ranks") for name in processes if name.startswith(LEARNER) and ranks]
    return generators + learners


def place(config: Config, processes: Sequence[str], gpus: Sequence[Gpu]) -> Placement:
    """Assign GPUs to every process: each time the GPUs with the fewest processes, in order.

    Args:
        processes: Names of the run's processes, such as "generation-0".
        gpus: All GPUs that the run may use; empty if everything runs on the CPU.

    Raises:
        InputError: A process needs more GPUs than there are, or generators do not fit on a GPU together. The message
            ends with a table of the demands.
    """
    needs = gpu_demands(config, processes)
    if not gpus or not needs:
        return NO_GPUS
    num_users = dict.fromkeys(gpus, 0)
    assignments = []
    for need in needs:
        if need.num_gpus > len(gpus):
            raise _too_few(need, needs, gpus)
        # The sort is stable: of GPUs with equally many processes the first one is chosen.
        chosen = sorted(sorted(gpus, key=lambda gpu: num_users[gpu])[: need.num_gpus], key=list(gpus).index)
        for gpu in chosen:
            num_users[gpu] += 1
        assignments.append(GpuAssignment(need.process, tuple(chosen)))
    placement = Placement(tuple(assignments), tuple(gpu for gpu in gpus if not num_users[gpu]))
    _check_shares(config, placement, gpus)
    return placement


def _too_few(need: GpuDemand, needs: Sequence[GpuDemand], gpus: Sequence[Gpu]) -> InputError:
    names = ", ".join(gpu.name for gpu in gpus)
    rows = [("process", "GPUs wanted"), *((it.process, str(it.num_gpus)) for it in needs)]
    return InputError(
        need.key,
        f"{need.process} wants {need.num_gpus} GPUs, each a different one, and {len(gpus)} can be seen ({names})",
        f"Lower it to {len(gpus)}, or take a machine with more GPUs\n{_aligned(rows)}",
    )


def _check_shares(config: Config, placement: Placement, gpus: Sequence[Gpu]) -> None:
    """vLLM takes its share of a GPU's whole memory, and refuses to start where that is not free."""
    share = config.generation.engine.get(SHARE_ARGUMENT, DEFAULT_SHARE)
    if not isinstance(share, (int, float)):
        return  # vLLM refuses it itself
    for gpu in gpus:
        on_it = [it.process for it in placement.assignments if it.is_generator and gpu in it.gpus]
        total = gpu.total_bytes or 0
        if not on_it or share * len(on_it) <= 1 - (gpu.used_bytes / total if total else 0):
            continue
        each = f"{share:g}{'' if SHARE_ARGUMENT in config.generation.engine else ' (vLLM default)'}"
        used = f", of which other programs hold {gpu.used_bytes / GIB:.1f}" if gpu.used_bytes else ""
        size = f"{total / GIB:.1f} GiB{used}" if total else "a size that is not known"
        most = (1 - (gpu.used_bytes / total if total else 0)) / len(on_it)
        raise InputError(
            _SHARE_KEY,
            f"{each} of GPU {gpu.name} for each of {', '.join(on_it)} is more than it has: {size}",
            f"Set it to at most {math.floor(most * 100) / 100:g}, lower generation.replicas, or end the GPU's other "
            f"programs\n{placement.table()}",
        )


def _visible(gpus: Iterable[Gpu]) -> dict[str, str]:
    # By the bus, as nvidia-smi counts: CUDA's own order is by speed, so an index would mean another GPU.
    return {VISIBLE: ",".join(gpu.name for gpu in gpus), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
