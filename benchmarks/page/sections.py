"""The tables of the page, from the results of the parts."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean
from typing import Any

from benchmarks.engine.token_rate import SERVICE, SETTINGS
from benchmarks.harness.sizes import DTYPES, LENGTHS, Dtype, Lengths
from benchmarks.harness.tables import (
    Record,
    fastest,
    floor_s,
    middle,
    number,
    only,
    percent,
    share_of_floor,
    shared_end,
    table,
    value_at,
)
from benchmarks.system.window import COMMAND_LINE, REDIS
from gspo.common.streams.keys import SERVICES

Results = Mapping[str, Mapping[str, Any]]
_PUSH = ("push_s", "stall_s", "bytes")
_ALONE = tuple(name for name in SETTINGS if name != SERVICE)


def cases(results: Results, part: str) -> list[Record]:
    """Return the cases of a part; none if it was not measured."""
    return list(results[part]["cases"]) if part in results else []


def engine(results: Results) -> str:
    """Tokens a second of vLLM alone and of our service, and their ratios."""
    measured = cases(results, "engine")
    header = ("", "tokens/s", "s for all", *(f"of {name}" for name in _ALONE), "start, s")
    return table(header, [_engine_row(case, measured) for case in measured])


def _engine_row(case: Record, measured: list[Record]) -> list[str]:
    ratios = [""] * len(_ALONE)
    if case["settings"] == SERVICE:
        same = {"lengths": case["lengths"], "dtype": case["dtype"]}
        alone = [only(measured, settings=name, **same) for name in _ALONE]
        ratios = [percent(case["tokens_per_s"] / other["tokens_per_s"] if other else None) for other in alone]
    name = f"{SETTINGS[case['settings']]}, {case['lengths']}, {case['dtype']}"
    rate, seconds = number(case["tokens_per_s"], 0), number(case["seconds"], 2)
    return [name, rate, seconds, *ratios, number(case["start_s"], 0)]


def learner(results: Results) -> str:
    """Seconds a step of the trainer alone."""
    rows = [
        [
            f"{case['lengths']}, {case['dtype']}, {case['threads']} threads",
            number(case["seconds"], 2),
            number(case["tokens_per_s"], 0),
            number(case["policy_s"] * 1e3, 0),
        ]
        for case in cases(results, "learner")
    ]
    return table(("", "s a step", "tokens/s", "weights out, ms"), rows)


def logprobs(results: Results) -> str:
    """Time and peak memory of the plain way and of ours, and what ours takes of the plain one's."""
    header = ("", "s", "of plain", "peak, GiB", "of plain")
    rows = []
    for case in cases(results, "logprobs"):
        plain = case["ways"]["plain"]
        for name, label in (("plain", "plain"), ("chunked", "in chunks")):
            way = case["ways"][name]
            rows.append(
                [
                    f"{label}: V {case['vocabulary']:,}, {case['tokens']:,} tokens, D {case['width']:,}",
                    number(way["seconds"]),
                    number(way["seconds"] / plain["seconds"], 2),
                    number(way["peak_bytes"] / 2**30, 2),
                    number(way["peak_bytes"] / plain["peak_bytes"], 2),
                ]
            )
    return table(header, rows)


def alone(results: Results) -> dict[tuple[Lengths, Dtype], tuple[float, float]]:
    """(lengths, dtype) -> the fastest engine and the fastest learner alone, in seconds a step."""
    engines = [case for case in cases(results, "engine") if case["settings"] != SERVICE]
    found = {}
    for lengths in LENGTHS:
        for dtype in DTYPES:
            engine_s = fastest(engines, lengths=lengths, dtype=dtype)
            learner_s = fastest(cases(results, "learner"), lengths=lengths, dtype=dtype)
            if engine_s is not None and learner_s is not None:
                found[lengths, dtype] = (engine_s, learner_s)
    return found


def times(results: Results) -> str:
    """Seconds a step of the whole system, against its floor."""
    bounds = alone(results)
    header = (
        "",
        "s a step",
        "least to most",
        "trained tokens/s",
        "floor, s",
        "of the floor",
        "generated/trained",
        "tokens an answer: median, mean, max",
    )
    return table(header, [_time_row(case, bounds) for case in cases(results, "system")])


def _time_row(case: Record, bounds: Mapping[tuple[Lengths, Dtype], tuple[float, float]]) -> list[str]:
    floor = floor_s(*bounds.get((case["lengths"], case["dtype"]), (None, None)))
    answers = case["answer_tokens"]
    return [
        _name(case),
        number(case["seconds"], 2),
        f"{number(min(case['seconds_each']))} to {number(max(case['seconds_each']))}",
        number(case["tokens_per_s"], 0),
        number(floor, 2),
        percent(share_of_floor(floor, case["seconds"])),
        number(case["tokens_generated"] / case["tokens_trained"], 2),
        ", ".join(number(answers[name], 0) for name in ("median", "mean", "max")),
    ]


def _name(case: Record) -> str:
    return f"max_lag {case['max_lag']}, {case['lengths']}, {case['dtype']}"


def shares(results: Results) -> str:
    """Idle share and processor share of every service."""
    rows = []
    for case in cases(results, "system"):
        idle, used = case["idle_share"], case["processor_share"]
        cells = [f"{percent(idle.get(name))}, {percent(used.get(name))}" for name in SERVICES]
        rows.append(
            [
                _name(case),
                *cells,
                *(percent(used.get(name)) for name in (REDIS, COMMAND_LINE)),
                number(case["machine_idle_cores"], 2),
            ]
        )
    return table(("", *SERVICES, REDIS, COMMAND_LINE, "idle cores"), rows)


def pushes(results: Results) -> str:
    """Weight pushes, start-up, and the parts of a step."""
    header = ("", "push, s", "stall, s", "MiB", "first rollout, s", "wait, s", "log, s", "train, s", "publish, s")
    return table(header, [_push_row(case) for case in cases(results, "system")])


def _push_row(case: Record) -> list[str]:
    found, figures = case["pushes"], case["figures"]
    push_s, stall_s, size = (middle([push[name] for push in found]) if found else None for name in _PUSH)
    return [
        _name(case),
        number(push_s, 3),
        number(stall_s, 3),
        number(size and size / 2**20),
        number(case["first_rollout_s"], 0),
        *(number(figures[name], 2) for name in ("wait_s", "log_s", "train_s", "publish_s")),
    ]


def learning(results: Results) -> str:
    """Accuracy at equal steps and at equal time."""
    measured = cases(results, "learning")
    by_step, by_time = ([_curve(case, x) for case in measured] for x in ("step", "seconds"))
    steps, seconds = ((shared_end(curves) / 2, shared_end(curves)) for curves in (by_step, by_time))
    at = [f"step {step:g}" for step in steps] + [f"{second:.0f} s" for second in seconds]
    header = ("", "before", *at, "all steps, s", "standard error", "clipped")
    rows = [
        [
            f"max_lag {case['max_lag']}, {case['old_logprobs']}",
            number(over_steps[0][1], 3),
            *(number(value_at(over_steps, step), 3) for step in steps),
            *(number(value_at(over_time, second), 3) for second in seconds),
            number(over_time[-1][0], 0),
            number(case["curve"][-1]["stderr"], 3),
            percent(fmean(case["clipped"])),
        ]
        for case, over_steps, over_time in zip(measured, by_step, by_time, strict=True)
    ]
    return table(header, rows)


def _curve(case: Record, x: str) -> list[tuple[float, float]]:
    return [(point[x], point["accuracy"]) for point in case["curve"]]


def reward(results: Results) -> str:
    """Return the cost of the sandbox, each figure beside its baseline."""
    found = [_REWARD_ROWS[case["what"]](case) for case in cases(results, "reward")]
    return table(("", "sandbox", "beside", ""), found)


def _batch_row(case: Record) -> list[str]:
    added = f"{number((case['sandbox_s'] - case['in_process_s']) * 1e3, 2)} ms added"
    name = f"a batch of 64, median, level {case['level']}"
    sandbox, in_process = (f"{number(case[key] * 1e3, 2)} ms" for key in ("sandbox_s", "in_process_s"))
    return [name, sandbox, f"{in_process} in process", added]


def _rate_row(case: Record) -> list[str]:
    share = f"{percent(case['sandbox_per_s'] / case['pool_per_s'])} of the pool"
    rates = [f"{number(case[name], 0)} scores/s" for name in ("sandbox_per_s", "pool_per_s")]
    return [f"rate, workers: {case['num_workers']}", rates[0], f"{rates[1]} of a bare pool", share]


def _beside_row(case: Record) -> list[str]:
    alone, beside = (f"{number(case[f'{name}_p99_s'] * 1e3, 2)} ms" for name in ("alone", "beside"))
    times = f"{number(case['beside_p99_s'] / case['alone_p99_s'], 2)} times"
    return ["p99 of a fast function beside 32 calls of 200 ms", beside, f"{alone} alone", times]


def _first_row(case: Record) -> list[str]:
    plain, numpy = (f"{number(case[f'{name}_s'], 2)} s" for name in ("plain", "numpy"))
    return ["from source to first score, the slowest", plain, f"{numpy} with numpy", ""]


def _stream_row(case: Record) -> list[str]:
    name = f"{number(case['num_rollouts'], 0)} rollouts through stream, sandbox and back"
    return [name, f"{number(case['per_s'], 0)} rollouts/s", "", f"{number(case['seconds'], 2)} s"]


_REWARD_ROWS = {
    "batch": _batch_row,
    "rate": _rate_row,
    "beside": _beside_row,
    "first": _first_row,
    "stream": _stream_row,
}
