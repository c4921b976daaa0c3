"""Prints a plan as tables, or as JSON."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from gspo.cli.plan.plan_request import Planned
from gspo.cli.plan.planned_times import SecondsRange
from gspo.cli.plan.planner import plan_keys
from gspo.cli.plan.refusal import counted
from gspo.common.host.machine import GIB
from gspo.common.planning.host_memory import HOST_SHARE
from gspo.common.planning.longest import kept_by_generators
from gspo.common.planning.memory import kv_bytes, reserved_bytes

_WHOLE = 10
_ADVICE = {
    "training": "A shorter context, or more GPUs for the learner, shorten a step.",
    "generation": "Shorter answers, or more GPUs for generators, shorten a step.",
    "open groups": "More open groups (staleness.max_lag) shorten a step.",
    "longest answers": "Steps wait for their longest answers: a higher staleness.max_lag, or on_stale: mask, does not.",
}
_ALL_USED = "All GPUs ({}) of this plan are in use: --gpus plans for more."
_NOTE = (
    "Advice: everything below follows from the rates at the end, most of them assumed or of another GPU. It chose no "
    "key. Exchange between GPUs is not counted, so a step on several may take longer."
)


def print_plan(planned: Planned, console: Console) -> None:
    """Memory, and as advice times, steady state, and the rates that they follow from."""
    choice, learner = planned.choice, planned.choice.config.learner
    shifts = ", in shifts on the same GPUs (placement: shared)" if choice.config.placement == "shared" else ""
    checkpointing = "gradient checkpointing" if learner.gradient_checkpointing else "no gradient checkpointing"
    teacher = planned.profile.teacher
    beside = "" if teacher is None else f", and a teacher of {teacher.num_parameters / 1e9:.3g} B,"
    console.print(
        f"{planned.request.model}: {planned.profile.num_parameters / 1e9:.3g} B parameters{beside} on "
        f"{planned.request.num_gpus} x {planned.gpu.name}, {planned.machine.gpu_bytes / GIB:.0f} GiB each. It fits: "
        f"{counted(choice.ranks, 'rank')} of the learner, {counted(choice.replicas, 'generator')} on "
        f"{counted(choice.parallel, 'GPU')} each{shifts}.",
        f"ZeRO {learner.zero_stage}, offload {learner.offload}, micro-batches of {learner.micro_batch_tokens:,} "
        f"tokens, {counted(learner.sequence_ranks, 'rank')} a line, {checkpointing}, bfloat16.",
        sep="\n",
        highlight=False,
    )
    if number := _num_machines(planned):
        console.print(
            f"It is for {number} machines of {planned.machine.gpus_per_host} GPUs: start it on one with "
            "`gspo run CONFIG.yaml --cluster ray` (docs/cluster.md).",
            highlight=False,
        )
    console.print(_table("GiB of memory", ("part", "each rank", "each generator's GPU"), memory_rows(planned)))
    console.print(_table("GiB of a host's own memory", ("part", "the fullest host"), host_rows(planned)))
    console.print(_NOTE, highlight=False)
    console.print(_table("Seconds of a step", ("part", "s", "follows from"), time_rows(planned)))
    console.print(_table("In the steady state", ("", "fast", "slow"), state_rows(planned)))
    console.print(_table("Rates", ("rate", "range", "source"), rate_rows(planned)))
    for advice in advices(planned):
        console.print(advice, highlight=False)


def _num_machines(planned: Planned) -> int:
    """Machines of the plan; 0 if one is enough."""
    number = -(-planned.machine.num_gpus // planned.machine.gpus_per_host)
    return number if number > 1 else 0


def advices(planned: Planned) -> list[str]:
    """Sentences that name a way to a shorter step, and the GPUs that a plan leaves idle."""
    choice, bounds = planned.choice, {planned.times.fast.bound, planned.times.slow.bound}
    lines = sorted(_ADVICE[bound] for bound in bounds)
    if not bounds & {"training", "generation"}:
        return lines
    used = choice.ranks + (0 if choice.on_same_gpus else choice.replicas * choice.parallel)
    idle = planned.request.num_gpus - used
    return [*lines, f"{counted(idle, 'GPU')} of this plan would be idle." if idle else _ALL_USED.format(used)]


def memory_rows(planned: Planned) -> list[tuple[str, str, str]]:
    """(part, GiB of a rank, GiB of a generator's GPU)."""
    rank, generator, total = planned.choice.rank, planned.choice.generator, planned.machine.gpu_bytes
    reserved = reserved_bytes(total)
    kept = kept_by_generators(planned.choice.config, total, int(planned.choice.on_same_gpus))
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
        ("generator on the same GPU", kept or None, None),
        ("head room", total - reserved - kept - rank.peak, None),
        ("loading (peak)", rank.loading, None),
    ]
    return [(name, _gib(first), _gib(second)) for name, first, second in rows if (first, second) != (None, None)]


def host_rows(planned: Planned) -> list[tuple[str, str]]:
    """(part, GiB) of the host that needs the most."""
    host, total = planned.choice.host, planned.machine.host_bytes
    in_shifts = planned.choice.config.placement == "shared"
    parts = {
        "ranks, in the generators' shift" if in_shifts else "ranks: offloaded, or while they load": host.ranks,
        "policies for pushes": host.published,
        "policies of generators": host.staged,
        "processes": host.processes,
        "head room": total - host.total,
    }
    return [(name, _gib(size)) for name, size in parts.items()]


def time_rows(planned: Planned) -> list[tuple[str, str, str]]:
    """(part, seconds, what they follow from)."""
    times, sampling = planned.times, "decode_bytes_share, decode_passes_s, prefill_flops_share"
    low, high, whole = (short_number(size / 1e9) for size in times.sent_bytes)
    sent = f"pack_bytes_s, wire_bytes_s, stage_bytes_s; {low} to {high} GB of changes, {whole} GB whole"
    at_a_time = f"{counted(times.concurrency, 'rollout')} of a generator at a time"
    products = "mixture_flops_share" if planned.profile.is_mixture else "train_flops_share"
    return [
        ("training: passes and optimizer", _range(times.products), products),
        ("training: gradients and weights in host memory", _range(times.offload), "to_host_bytes_s"),
        ("generation", _range(times.generation), f"{sampling}; {at_a_time}"),
        ("one token of a rollout", _range(times.token), ""),
        ("states to the host and back, on shared GPUs", _range(times.shift), "to_host_bytes_s"),
        ("weight update: copy to the host", _range(times.make), "to_host_bytes_s"),
        ("weight update: pack, send, stage", _range(times.send), sent),
        ("weight update: pause of the engine", _range(times.load), "load_bytes_s"),
        ("weight update, until all generators serve it", _range(times.update), ""),
    ]


def state_rows(planned: Planned) -> Iterator[tuple[str, str, str]]:
    """(figure, at the fast end, at the slow end)."""
    states = (planned.times.fast, planned.times.slow)
    tokens = planned.choice.config.algorithm.num_rollouts * planned.lengths.mean()

    def row(name: str, values: Sequence[str]) -> tuple[str, str, str]:
        return name, values[0], values[1]

    yield row("seconds a step", [short_number(state.step_s) for state in states])
    yield row("trained tokens/s", [f"{tokens * (1 - state.stale_share) / state.step_s:,.0f}" for state in states])
    yield row("bound by", [state.bound for state in states])
    yield row("staleness: mean", [f"{state.staleness_mean:.1f}" for state in states])
    yield row("staleness: 95th percentile", [f"{state.staleness_p95:.1f}" for state in states])
    yield row("stale tokens", [f"{state.stale_share:.0%}" for state in states])


def rate_rows(planned: Planned) -> list[tuple[str, str, str]]:
    """(rate, range, source), those of the data sheet first."""
    gpu, request, lengths = planned.gpu, planned.request, planned.lengths
    rows = [
        ("bfloat16 flop/s", f"{gpu.flops:.3g}", gpu.source),
        ("memory bytes/s", f"{gpu.memory_bytes_s:.3g}", gpu.source),
    ]
    for name, rate in planned.rates.items():
        span = f"{rate.low:.3g}" if rate.low == rate.high else f"{rate.low:.3g} to {rate.high:.3g}"
        rows.append((name, span, rate.source))
    assumed = f"assumed: {HOST_SHARE} times that of its GPUs (--host-memory)"
    host = assumed if request.host_gib is None else "--host-memory, or what this machine has free"
    spread = f"at most {lengths.longest:,}; log-normal, sigma {lengths.sigma:g}"
    answers = "assumed" if request.mean_answer is None else "--answer-tokens"
    prompts = "assumed" if request.mean_prompt is None else "--prompt-tokens"
    return [
        *rows,
        ("memory of a host", f"{planned.machine.host_bytes / GIB:,.0f} GiB", host),
        ("answers", f"{lengths.mean():,.0f} tokens in the mean, {spread}", answers),
        ("prompts", f"{lengths.prompt:,.0f} tokens", prompts),
    ]


def plan_json(planned: Planned) -> str:
    """The whole plan, in bytes, seconds and tokens."""
    choice, machine = planned.choice, planned.machine
    content: dict[str, Any] = {
        "model": asdict(planned.profile),
        "card": asdict(planned.gpu) | {"memory_bytes": machine.gpu_bytes},
        "host_bytes": machine.host_bytes,
        "rates": {name: asdict(rate) for name, rate in planned.rates.items()},
        "lengths": asdict(planned.lengths),
        "ranks": choice.ranks,
        "kv_bytes_a_token": kv_bytes(choice.config, planned.profile, choice.parallel),
        **{name: asdict(getattr(choice, name)) for name in ("rank", "generator", "host")},
        "times": asdict(planned.times),
        "config": plan_keys(choice.config),
    }
    return json.dumps(content, indent=1)


def _table(title: str, heads: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for number, head in enumerate(heads):
        table.add_column(head, justify="left" if number != 1 else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def _gib(value: float | None) -> str:
    return "" if value is None else f"{value / GIB:,.1f}"


def _range(seconds: SecondsRange) -> str:
    low, high = short_number(seconds.low), short_number(seconds.high)
    return low if low == high else f"{low} to {high}"


def short_number(value: float) -> str:
    """With two digits, or all before the point."""
    return f"{value:,.0f}" if value >= _WHOLE else f"{value:.2g}"
