"""Prints a plan as tables, or as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from gspo.cli.plan.plan_request import Planned
from gspo.cli.plan.planner import plan_keys
from gspo.cli.plan.refusal import counted
from gspo.cli.plan.times import Seconds, parallel_cards, update_times
from gspo.common.host.machine import GIB
from gspo.common.planning.host_memory import HOST_SHARE
from gspo.common.planning.longest import kept_by_generators
from gspo.common.planning.memory import kv_bytes, reserved_bytes

_WHOLE = 10
_ADVICE = {
    "training": "More cards for the learner (learner.ranks), or a shorter context, shorten a step.",
    "generation": "More generators (generation.replicas) shorten a step.",
    "open groups": "More open groups (staleness.max_lag) shorten a step.",
    "longest answers": "Steps wait for their longest answers: a higher staleness.max_lag, or on_stale: mask, does not.",
}


def print_plan(planned: Planned, console: Console) -> None:
    """Memory, times, steady state, weight update, and the rates that they follow from."""
    plan, machine, learner = planned.plan, planned.machine, planned.plan.config.learner
    parallel = parallel_cards(plan.config)
    shifts = ", in shifts on the same cards (placement: shared)" if plan.config.placement == "shared" else ""
    teacher = planned.profile.teacher
    beside = "" if teacher is None else f", and a teacher of {teacher.num_parameters / 1e9:.3g} B,"
    console.print(
        f"{planned.request.model}: {planned.profile.num_parameters / 1e9:.3g} B parameters{beside} on "
        f"{planned.request.num_cards} x {machine.card.name}, {machine.memory_bytes / GIB:.0f} GiB each. It fits: "
        f"{counted(plan.ranks, 'rank')} of the learner, {counted(plan.replicas, 'generator')} on "
        f"{counted(parallel, 'card')} each{shifts}.",
        f"ZeRO {learner.zero_stage}, offload {learner.offload}, micro-batches of {learner.micro_batch_tokens:,} "
        f"tokens, {counted(learner.sequence_ranks, 'rank')} a line, gradient checkpointing, bfloat16.",
        sep="\n",
        highlight=False,
    )
    console.print(_table("GiB of memory", ("part", "each rank", "each generator's card"), memory_rows(planned)))
    console.print(_table("GiB of a host's own memory", ("part", "the fullest host"), host_rows(planned)))
    console.print(_table("Seconds of a step", ("part", "s", "follows from"), time_rows(planned)))
    console.print(_table("Weight update", ("to", "GB sent: changes, whole", "s until served"), update_rows(planned)))
    console.print(_table("In the steady state", ("", "fast", "slow"), state_rows(planned)))
    console.print(_table("Rates", ("rate", "range", "source"), rate_rows(planned)))
    for advice in sorted({_ADVICE[state.bound] for state in (plan.fast, plan.slow)}):
        console.print(advice, highlight=False)


def memory_rows(planned: Planned) -> list[tuple[str, str, str]]:
    """(part, GiB of a rank, GiB of a generator's card)."""
    rank, generator, total = planned.plan.rank, planned.plan.generator, planned.machine.memory_bytes
    reserved = reserved_bytes(total)
    kept = kept_by_generators(planned.plan.config, total, int(planned.plan.on_same_cards))
    rows: list[tuple[str, float | None, float | None]] = [
        ("weights", rank.weights, generator.weights),
        ("gradients", rank.gradients, None),
        ("optimizer", rank.optimizer, None),
        ("reference", rank.reference, None),
        ("teacher", rank.teacher or None, None),
        ("buckets", rank.buckets, None),
        ("activations", rank.activations, generator.working),
        ("output layer", rank.output_layer, None),
        ("buffers of the optimizer's step, instead of these three", rank.update or None, None),
        ("KV cache", None, generator.kv_cache),
        ("CUDA and pieces", reserved, None),
        ("generator on the same card", kept or None, None),
        ("head room", total - reserved - kept - rank.peak, None),
        ("loading (peak)", rank.loading, None),
    ]
    known = (row for row in rows if row[1:] != (None, None))
    return [(name, *(_gib(value) for value in values)) for name, *values in known]  # type: ignore[misc]


def host_rows(planned: Planned) -> list[tuple[str, str]]:
    """(part, GiB) of the host that needs the most."""
    host, total = planned.plan.host, planned.machine.host_bytes
    in_shifts = planned.plan.config.placement == "shared"
    parts = {
        "ranks, in the generators' shift" if in_shifts else "ranks: offloaded, or while they load": host.ranks,
        "policies for pushes": host.published,
        "policies of generators": host.staged,
        "processes": host.processes,
        "head room": total - host.total,
    }
    return [(name, _gib(size)) for name, size in parts.items()]


def time_rows(planned: Planned) -> list[tuple[str, str, str]]:
    """(part, seconds, rates)."""
    plan = planned.plan
    products = "mixture_flops_share" if planned.profile.is_mixture else "train_flops_share"
    sampling = "decode_bytes_share, decode_passes_s, small_sums_s, prefill_flops_share"
    at_a_time = f"{plan.generation.concurrency} rollouts a generator at a time"
    return [
        ("training: products", _range(plan.learner.products), products),
        ("training: exchange", _range(plan.learner.exchange), "gather_bytes_s, network_bytes_s"),
        ("training: heads of shared lines", _range(plan.learner.heads), "gather_bytes_s"),
        ("training: gradients and weights in host memory", _range(plan.learner.host), "to_host_bytes_s"),
        ("training: optimizer", _range(plan.learner.optimizer), "optimizer_bytes_share, under offload to_host_bytes_s"),
        ("training", _range(plan.learner.all), ""),
        ("generation", _range(plan.generation.all), f"{sampling}; {at_a_time}"),
        ("one token of a rollout", _range(plan.generation.token), ""),
        ("states to the host and back, on shared cards", _range(plan.shift), "to_host_bytes_s"),
        ("weight update: copy to the host", _range(plan.update.make), "to_host_bytes_s"),
        ("weight update: pack, send, stage", _range(plan.update.pack + plan.update.send + plan.update.stage), ""),
        ("weight update: pause of the engine", _range(plan.update.load), "load_bytes_s"),
    ]


def update_rows(planned: Planned) -> list[tuple[str, str, str]]:
    """(generators, bytes, seconds), for one generator, for the plan's, and for 8 and 64."""
    rows = []
    for replicas in sorted({1, 8, 64, planned.plan.replicas}):
        update = update_times(planned.plan.config, planned.profile, replicas, planned.machine)
        low, high, whole = (size / 1e9 for size in update.sent_bytes)
        sent = f"{short_number(low)} to {short_number(high)}, {short_number(whole)}"
        rows.append((counted(replicas, "generator"), sent, _range(update.all)))
    return rows


def state_rows(planned: Planned) -> Iterator[tuple[str, str, str]]:
    """(figure, at the fast end, at the slow end)."""
    states = (planned.plan.fast, planned.plan.slow)
    tokens = planned.plan.config.algorithm.num_rollouts * planned.lengths.mean()

    def row(name: str, values: Sequence[str]) -> tuple[str, str, str]:
        return name, values[0], values[1]

    yield row("seconds a step", [short_number(state.step_s) for state in states])
    yield row("trained tokens/s", [f"{tokens * (1 - state.stale_share) / state.step_s:,.0f}" for state in states])
    yield row("bound by", [state.bound for state in states])
    yield row("staleness: mean", [f"{state.staleness_mean:.1f}" for state in states])
    yield row("staleness: 95th percentile", [f"{state.staleness_p95:.1f}" for state in states])
    yield row("stale tokens", [f"{state.stale_share:.0%}" for state in states])


def rate_rows(planned: Planned) -> list[tuple[str, str, str]]:
    """(rate, range, source), the card's own ones first."""
    card = planned.machine.card
    rows = [
        ("bfloat16 flop/s", f"{card.flops:.3g}", card.source),
        ("memory bytes/s", f"{card.memory_bytes_s:.3g}", card.source),
    ]
    for name, rate in planned.machine.rates.items():
        span = f"{rate.low:.3g}" if rate.low == rate.high else f"{rate.low:.3g} to {rate.high:.3g}"
        rows.append((name, span, rate.source))
    rows.append(("memory of a host", f"{planned.machine.host_bytes / GIB:,.0f} GiB", _host_source(planned)))
    lengths = planned.lengths
    spread = f"at most {lengths.longest:,}; log-normal, sigma {lengths.sigma:g}"
    answers = f"{lengths.mean():,.0f} tokens in the mean, {spread}"
    rows.append(("answers", answers, "assumed" if planned.request.mean_answer is None else "--answer-tokens"))
    prompts = "assumed" if planned.request.mean_prompt is None else "--prompt-tokens"
    return [*rows, ("prompts", f"{lengths.prompt:,.0f} tokens", prompts)]


def _host_source(planned: Planned) -> str:
    if planned.request.host_gib is None:
        return f"assumed: {HOST_SHARE} times that of its cards (--host-memory)"
    return "--host-memory, or what this machine has free"


def plan_json(planned: Planned) -> str:
    """The whole plan, in bytes, seconds and tokens."""
    plan, machine = planned.plan, planned.machine
    parts = ("rank", "generator", "host", "learner", "generation", "update", "shift", "fast", "slow")
    content: dict[str, Any] = {
        "model": asdict(planned.profile),
        "card": asdict(machine.card) | {"memory_bytes": machine.memory_bytes},
        "host_bytes": machine.host_bytes,
        "rates": {name: asdict(rate) for name, rate in machine.rates.items()},
        "lengths": asdict(planned.lengths),
        "ranks": plan.ranks,
        "kv_bytes_a_token": kv_bytes(plan.config, planned.profile, parallel_cards(plan.config)),
        **{name: asdict(getattr(plan, name)) for name in parts},
        "config": plan_keys(plan.config),
    }
    return json.dumps(content, indent=1)


def _table(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]] | Iterator[Sequence[str]]) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for number, head in enumerate(heads):
        table.add_column(head, justify="left" if number != 1 else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def _gib(value: float | None) -> str:
    return "" if value is None else f"{value / GIB:,.1f}"


def _range(seconds: Seconds) -> str:
    low, high = short_number(seconds.low), short_number(seconds.high)
    return low if low == high else f"{low} to {high}"


def short_number(value: float) -> str:
    """With two digits, or all before the point."""
    return f"{value:,.0f}" if value >= _WHOLE else f"{value:.2g}"
