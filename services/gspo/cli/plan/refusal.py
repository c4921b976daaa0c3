"""The refusal of a plan: what the nearest configuration lacks, and the changes with which one fits."""

import math
from collections.abc import Iterator
from dataclasses import replace

from gspo.cli.plan.choice import Choice, Shortage
from gspo.cli.plan.plan_request import PlanRequest, base_config, choice_of, machine_of
from gspo.cli.processes.placement import aligned
from gspo.common.errors import InputError
from gspo.common.host.gpu_kinds import GpuKind
from gspo.common.host.machine import GIB
from gspo.common.planning.model_profile import ModelProfile

_MOST_GPUS, _LORA_RANK, _LEAST_CONTEXT = 1024, 16, 1024


def does_not_fit(request: PlanRequest, profile: ModelProfile, gpu: GpuKind, nearest: Choice | None) -> InputError:
    """The error of a request without a plan, with a table of each place without enough memory.

    Args:
        nearest: The choice that comes nearest; None if no number of ranks divides the rollouts.
    """
    if nearest is None:
        num_rollouts, updates = request.groups * request.group_size, base_config(request).algorithm.num_mini_batches
        rule = f"{num_rollouts} rollouts in {updates} mini-batches divide over no number of ranks"
        if request.num_gpus > request.gpus_per_host:
            rule += f" on whole hosts of {request.gpus_per_host} GPUs"
            updates *= request.gpus_per_host
        return InputError("--groups", rule, f"Choose --groups times --group-size as a multiple of {updates}")
    changes = ", or ".join(_changes(request, profile, gpu))
    fix = f"These fit: {changes}" if changes else "Take a smaller model, or GPUs with more memory"
    learner, machine = nearest.config.learner, machine_of(request, gpu)
    lacks = ", ".join(f"{short.place} lacks {short.missing_bytes / GIB:,.1f} GiB" for short in nearest.shortages)
    return InputError(
        "--gpus",
        f"nothing fits on {request.num_gpus} x {gpu.name} of {machine.gpu_bytes / GIB:.1f} GiB, with "
        f"{machine.host_bytes / GIB:,.0f} GiB of memory on a host. Nearest: ZeRO {learner.zero_stage} on "
        f"{counted(nearest.ranks, 'rank')}, offload {learner.offload}, generators of "
        f"{counted(nearest.parallel, 'GPU')}; {lacks}",
        "\n".join([fix, *map(_parts_table, nearest.shortages)]),
    )


def counted(number: int, noun: str) -> str:
    """Such as "1 rank" or "2 ranks"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _parts_table(shortage: Shortage) -> str:
    """The memory that a place needs, a part a line, and the memory that it has."""
    sizes = {**{name: size for name, size in shortage.parts.items() if size}, "it has": shortage.has_bytes}
    return aligned([("GiB", f"of {shortage.place}"), *((f"{size / GIB:.1f}", name) for name, size in sizes.items())])


def _changes(request: PlanRequest, profile: ModelProfile, gpu: GpuKind) -> Iterator[str]:
    """The least change of each argument with which a plan fits."""

    def fits(changed: PlanRequest) -> Choice | None:
        choice = choice_of(changed, profile, gpu)
        return choice if choice and not choice.shortages else None

    numbers = (*range(1, 8), *range(8, 128, 8), *range(128, _MOST_GPUS + 1, 64))
    more = (number for number in numbers if number > request.num_gpus)
    if number := next((number for number in more if fits(replace(request, num_gpus=number))), None):
        yield f"--gpus {number}"
    if unlimited := fits(replace(request, host_gib=math.inf)):
        yield f"--host-memory {math.ceil(unlimited.host.total / GIB)}"
    shorter = (request.context >> halvings for halvings in range(1, (request.context // _LEAST_CONTEXT).bit_length()))
    if context := next((context for context in shorter if fits(replace(request, context=context))), None):
        yield f"--context {context}"
    if request.max_lag and fits(replace(request, max_lag=0)):
        yield "--max-lag 0"
    if not request.lora_rank and fits(replace(request, lora_rank=_LORA_RANK)):
        yield f"--lora {_LORA_RANK}"
