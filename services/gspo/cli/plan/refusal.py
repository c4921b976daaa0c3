"""The refusal of a plan: the parts of the nearest configuration, and the changes with which one fits."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from gspo.cli.plan.plan_request import Planned, PlanRequest, base_config, machine_of, planned_request
from gspo.cli.plan.search import Shortfall
from gspo.cli.plan.times import Machine
from gspo.cli.processes.placement import aligned
from gspo.common.errors import InputError
from gspo.common.host.machine import GIB
from gspo.common.planning.model_profile import ModelProfile

_MORE_CARDS, _LORA_RANK, _LEAST_CONTEXT = 64, 16, 1024


def does_not_fit(
    request: PlanRequest, profile: ModelProfile, machine: Machine, shortfall: Shortfall | None
) -> InputError:
    """The error of a request without a plan, with a table of the part without enough memory.

    Args:
        shortfall: The nearest configuration; None if no number of ranks divides the rollouts.
    """
    if shortfall is None:
        num_rollouts, updates = request.groups * request.group_size, base_config(request).algorithm.num_mini_batches
        rule = f"{num_rollouts} rollouts in {updates} mini-batches divide over no number of ranks"
        return InputError("--groups", rule, f"Choose --groups times --group-size as a multiple of {updates}")
    nearby = ", or ".join(_nearby(request, profile, machine))
    fix = f"These fit: {nearby}" if nearby else "Take a smaller model, or cards with more memory"
    learner, missing = shortfall.config.learner, shortfall.missing_bytes / GIB
    return InputError(
        "--gpus",
        f"nothing fits on {request.num_cards} x {machine.card.name} of {machine.memory_bytes / GIB:.1f} GiB, with "
        f"{machine.host_bytes / GIB:,.0f} GiB of memory on a host. Nearest: ZeRO {learner.zero_stage} on "
        f"{counted(shortfall.ranks, 'rank')}, offload {learner.offload}; {shortfall.place} lacks {missing:,.1f} GiB",
        f"{fix}\n{_parts_table(shortfall)}",
    )


def counted(number: int, noun: str) -> str:
    """Such as "1 rank" or "2 ranks"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _parts_table(shortfall: Shortfall) -> str:
    """The memory that a place needs, a part a line, and the memory that it has."""
    sizes = {**{name: size for name, size in shortfall.parts.items() if size}, "it has": shortfall.has_bytes}
    return aligned([("GiB", f"of {shortfall.place}"), *((f"{size / GIB:.1f}", name) for name, size in sizes.items())])


def _nearby(request: PlanRequest, profile: ModelProfile, machine: Machine) -> Iterator[str]:
    """The least change of each argument with which a plan fits."""
    num_cards = request.num_cards + 1
    while num_cards <= _MORE_CARDS:
        if _plan_of(replace(request, num_cards=num_cards), profile, machine):
            yield f"--gpus {num_cards}"
            break
        num_cards += 1 if num_cards < 8 else 8 - num_cards % 8
    unlimited = _plan_of(replace(request, host_gib=math.inf), profile, machine)
    if unlimited:
        yield f"--host-memory {math.ceil(unlimited.plan.host.total / GIB)}"
    context = request.context // 2
    while context >= _LEAST_CONTEXT:
        if _plan_of(replace(request, context=context), profile, machine):
            yield f"--context {context}"
            break
        context //= 2
    if request.max_lag and _plan_of(replace(request, max_lag=0), profile, machine):
        yield "--max-lag 0"
    if not request.lora_rank and _plan_of(replace(request, lora_rank=_LORA_RANK), profile, machine):
        yield f"--lora {_LORA_RANK}"


def _plan_of(request: PlanRequest, profile: ModelProfile, machine: Machine) -> Planned | None:
    planned = planned_request(request, profile, machine_of(request, machine.card, machine.rates))
    return planned if isinstance(planned, Planned) else None
