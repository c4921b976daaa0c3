"""Places the processes of a run on the GPUs of one machine, by pure functions; only an error asks who uses a GPU.

Generators come first, then the learner's ranks. A GPU is shared only where there are too few of them, or under
`placement: shared`. Then the ranks get the generators' GPUs, and each service has their memory in its shifts.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

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
    choose_unused,
    describe_use,
    gpus_of_engine,
)
from gspo.common.streams.keys import GENERATION, LEARNER

_SHARE_KEY = f"generation.engine.{SHARE_ARGUMENT}"
# A smaller share holds no engine.
_LEAST_SHARE = 0.05


@dataclass(frozen=True)
class Placement:
    """The GPUs of every process; empty on a machine without GPUs.

    Attributes:
        gpus: By process, in the order of their placement.
        free: GPUs without a process.
        in_shifts: Whether generators and learner alternate in the memory of a GPU.
    """

    gpus: Mapping[str, tuple[Gpu, ...]] = field(default_factory=dict)
    free: tuple[Gpu, ...] = ()
    in_shifts: bool = False

    def environment(self, process: str) -> dict[str, str]:
        """Environment variables for a process, such as "learner-0"; none for a process without GPUs."""
        if process not in self.gpus:
            return {}
        visible = _visible(self.gpus[process])
        if process.startswith(GENERATION):
            return visible
        return visible | {GENERATORS_PER_GPU: ",".join(str(len(self.generators_on(gpu))) for gpu in self.gpus[process])}

    def generators_on(self, gpu: Gpu) -> list[str]:
        return [name for name, gpus in self.gpus.items() if name.startswith(GENERATION) and gpu in gpus]

    def taken(self) -> list[Gpu]:
        """The GPUs that have a process, once each."""
        return list(dict.fromkeys(gpu for gpus in self.gpus.values() for gpu in gpus))

    def table(self) -> str:
        """A line for each process: its GPUs, and the processes that share them."""
        return aligned([("process", "GPU", "shared with"), *self.rows()])

    def rows(self) -> list[tuple[str, str, str]]:
        """The lines of the table: the process, its GPUs, and who shares them."""
        rows = []
        for name, gpus in self.gpus.items():
            others = [
                f"{other} in shifts" if self.in_shifts and _service(other) != _service(name) else other
                for other, theirs in self.gpus.items()
                if other != name and set(gpus) & set(theirs)
            ]
            rows.append((name, ", ".join(gpu.name for gpu in gpus), ", ".join(others) or "nobody"))
        free = [("nobody", ", ".join(gpu.name for gpu in self.free), "")] if self.free else []
        return [*rows, *free]


NO_GPUS = Placement()


def _service(process: str) -> str:
    return process.partition("-")[0]


def place(config: Config, processes: Sequence[str], gpus: Sequence[Gpu]) -> Placement:
    """Assign GPUs to every process: each time the GPUs with the fewest processes, in order.

    Args:
        processes: Names of the run's processes, such as "generation-0".
        gpus: All GPUs that the run may use; empty if everything runs on the CPU.

    Raises:
        InputError: A process needs more GPUs than there are, or generators do not fit on a GPU together. The message
            ends with a table of the demands.
    """
    demands = _demands(config, processes)
    if not gpus or not demands:
        return NO_GPUS
    num_users: Counter[tuple[str, Gpu]] = Counter()
    placed = {}
    for process, (num_gpus, key) in demands.items():
        if num_gpus > len(gpus):
            rows = [("process", "GPUs wanted"), *((name, str(needed)) for name, (needed, _) in demands.items())]
            names = ", ".join(gpu.name for gpu in gpus)
            raise InputError(
                key,
                f"{process} wants {num_gpus} GPUs, each a different one, and {len(gpus)} can be seen ({names})",
                f"Lower it to {len(gpus)}, or {_more_gpus(process)}\n{aligned(rows)}",
            )
        # Under `placement: shared` each service is placed as if it were alone, and begins with the first GPU.
        side = _service(process) if config.placement == "shared" else ""
        # The sort is stable: of GPUs with equally many processes the first one is chosen.
        order = sorted(range(len(gpus)), key=[num_users[side, gpu] for gpu in gpus].__getitem__)
        placed[process] = tuple(gpus[place] for place in sorted(order[:num_gpus]))
        num_users.update((side, gpu) for gpu in placed[process])
    used = {gpu for chosen in placed.values() for gpu in chosen}
    free = tuple(gpu for gpu in gpus if gpu not in used)
    placement = Placement(placed, free, in_shifts=config.placement == "shared")
    _check_shares(config, placement, gpus)
    return placement


def _more_gpus(process: str) -> str:
    """A generator is on one machine, the ranks of a learner may be on several."""
    if process.startswith(LEARNER):
        return "spread the run over machines with `gspo run CONFIG.yaml --cluster ray` (docs/cluster.md)"
    return "take a machine with more GPUs"


def _demands(config: Config, processes: Sequence[str]) -> dict[str, tuple[int, str]]:
    """By process, generators first: how many different GPUs it needs, and the configuration key of that number."""
    ranks, engine = config.learner.ranks, config.generation.engine
    argument = next((name for name in PARALLEL_ARGUMENTS if type(engine.get(name)) is int), PARALLEL_ARGUMENTS[0])
    of_generator = gpus_of_engine(engine), f"generation.engine.{argument}"
    demands = {name: of_generator for name in processes if name.startswith(GENERATION)}
    return demands | {name: (ranks, "learner.ranks") for name in processes if name.startswith(LEARNER)}


def _check_shares(config: Config, placement: Placement, gpus: Sequence[Gpu]) -> None:
    """vLLM takes its share of a GPU's whole memory, and refuses to start where that is not free."""
    share = config.generation.engine.get(SHARE_ARGUMENT, DEFAULT_SHARE)
    if not isinstance(share, (int, float)):
        return  # vLLM refuses it itself
    for gpu in gpus:
        on_it = placement.generators_on(gpu)
        total = gpu.total_bytes or 0
        if not on_it or share * len(on_it) <= 1 - (gpu.used_bytes / total if total else 0):
            continue
        each = f"{share:g}{'' if SHARE_ARGUMENT in config.generation.engine else ' (vLLM default)'}"
        size = f"{total / GIB:.1f} GiB{describe_use(gpu)}" if total else "a size that is not known"
        most = (1 - (gpu.used_bytes / total if total else 0)) / len(on_it)
        fixes = [f"Set it to at most {math.floor(most * 100) / 100:g}"] if most >= _LEAST_SHARE else []
        num_fitting = len(gpus) // len(placement.gpus[on_it[0]])
        fixes += [f"lower generation.replicas to {num_fitting}"] if len(on_it) > 1 else []
        fixes += [f"end the GPU's other programs{choose_unused(gpus)}"] if gpu.used_bytes else []
        raise InputError(
            _SHARE_KEY,
            f"{each} of GPU {gpu.name} for each of {', '.join(on_it)} is more than it has: {size}",
            f"{', or '.join(fixes)}\n{placement.table()}",
        )


def _visible(gpus: Iterable[Gpu]) -> dict[str, str]:
    # By the bus, as nvidia-smi counts: CUDA's own order is by speed, so an index would mean another GPU.
    return {VISIBLE: ",".join(gpu.name for gpu in gpus), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """The rows as lines with equally wide columns; a row may end early."""
    widths = [max(len(cell) for cell in column) for column in zip_longest(*rows, fillvalue="")]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)).rstrip() for row in rows
    )
