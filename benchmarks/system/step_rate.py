"""The section `system`: `gspo run` with a reward that costs nothing, for every lag, length and dtype.

The first steps are dropped, because the engine's caches and the pipeline fill up in them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pandas as pd

from benchmarks.harness.gspo_run import END_S, START_S, STEP_S, answer_tokens, observed_run
from benchmarks.harness.plots import panels
from benchmarks.harness.section import Effort, Measurement, PageSection, Record, Results
from benchmarks.harness.tables import side_by_side, table
from benchmarks.harness.workload import LAGS, Dtype, Lengths, cases, write_config
from benchmarks.system.window import COMMAND_LINE, REDIS, between, look
from gspo.common.streams.keys import SERVICES
from gspo.view.picture.curves import BLUE, GREEN, GREY, ORANGE, SKY

_PHASES = ["wait_s", "log_s", "train_s", "publish_s", "step_s", "age_mean", "age_max"]
_KEY = ["lengths", "dtype"]
DROPPED = 2
_TEXT = """
`gspo run` with a trivial reward. A step lasts from the end of the previous one to its own end; the mean excludes the \
first two. The floor is the fastest `LLM.generate` plus the fastest learner alone, since both share the cores; *of the \
floor* is our time divided by the floor. *Generated/trained* is 1 in a steady state.

{times}

![Seconds a step](benchmarks-steps.png)

### Waits of each service

Each cell has the waiting share of the service's time (`gspo_activity_seconds_total`) and its processor time as a \
share of one core. Idle cores are of the whole machine.

{shares}

![Idle share](benchmarks-waits.png)

### Weight pushes and the learner's time

Push: from the end of a step until the generator serves the new version. Stall: pause of generation during a push. \
Values are medians over the steps. First rollout: from the start of `gspo run` to the end of the first answer, with \
the compilation of vLLM's graphs. The last four columns are parts of a step.

{pushes}
"""


def measurements(effort: Effort) -> Iterator[Measurement]:
    """All lags at every length and dtype; quick: one lag at both lengths in float32."""
    quick = [(lengths, dtype, LAGS[1]) for lengths, dtype in cases(quick=False) if dtype == "float32"]
    every = [(lengths, dtype, max_lag) for lengths, dtype in cases(quick=False) for max_lag in LAGS]
    steps, dropped = effort.num_steps(8), 1 if effort.quick else DROPPED
    for lengths, dtype, max_lag in quick if effort.quick else every:
        arguments = (lengths, dtype, max_lag, steps, dropped)
        yield Measurement(f"max_lag {max_lag}, {lengths}, {dtype}", _measure, arguments)


def _measure(lengths: Lengths, dtype: Dtype, max_lag: int, num_steps: int, dropped: int) -> Record:
    # One step more than is measured: the window ends while everything still runs.
    sections = {"staleness": {"max_lag": max_lag}, "run": {"total_steps": num_steps + 1}}
    with observed_run(write_config(f"system-{lengths}-{dtype}-{max_lag}", lengths, dtype, **sections)) as run:
        run.wait_for_step(dropped, START_S + STEP_S * dropped)
        before = asyncio.run(look(run.redis_url, "run", run.process.pid))
        run.wait_for_step(num_steps, STEP_S * num_steps)
        after = asyncio.run(look(run.redis_url, "run", run.process.pid))
        run.wait_for_end(STEP_S + END_S)
    steps = run.steps(dropped, num_steps)
    return {
        "lengths": lengths,
        "dtype": dtype,
        "max_lag": max_lag,
        "num_steps": len(steps),
        "seconds": float(steps.duration_s.mean()),
        "seconds_each": steps.duration_s.tolist(),
        "tokens_per_s": float(steps.tokens.sum() / steps.duration_s.sum()),
        "tokens_trained": float(steps.tokens.sum()),
        "figures": steps[_PHASES].mean().to_dict(),
        **between(before, after),
        "answer_tokens": answer_tokens(run.rollouts(dropped, num_steps, "token_ids").map(len)),
        "first_rollout_s": float(run.rollouts(0, 1, "finished_unix_s").min()) - run.started_unix_s,
    }


def floors(results: Results) -> pd.DataFrame:
    """Seconds of the fastest bare vLLM and of the fastest learner alone for a step, by lengths and dtype."""
    engine = pd.DataFrame(results.get("engine", []), columns=[*_KEY, "settings", "seconds"])
    learner = pd.DataFrame(results.get("learner", []), columns=[*_KEY, "seconds"])
    alone = {"vLLM alone": engine[engine.settings != "service"], "learner alone": learner}
    return pd.concat({name: times.groupby(_KEY).seconds.min() for name, times in alone.items()}, axis=1, join="inner")


def text(results: Results) -> str:
    """Seconds a step against the floor, idle time and processor time, weight pushes and the parts of a step."""
    frame = pd.json_normalize(results["system"])
    frame = frame.join(floors(results).sum(axis=1).rename("floor_s"), on=_KEY)
    name = ("", "max_lag " + frame.max_lag.astype(str) + ", " + frame.lengths + ", " + frame.dtype, "")
    least, most = frame.seconds_each.map(min), frame.seconds_each.map(max)
    tokens = side_by_side(*((frame[f"answer_tokens.{key}"], ".0f") for key in ("median", "mean", "max")))
    columns = ["push_s", "stall_s", "bytes"]
    pushes = pd.DataFrame([pd.DataFrame(served, columns=columns).median() for served in frame.pushes])
    shares = {
        name: side_by_side((frame[f"idle_share.{name}"], ".0%"), (frame[f"processor_share.{name}"], ".0%"))
        for name in SERVICES
    }
    return _TEXT.format(
        times=table(
            name,
            ("s a step", frame.seconds, ".2f"),
            ("least to most", side_by_side((least, ".1f"), (most, ".1f"), separator=" to "), ""),
            ("trained tokens/s", frame.tokens_per_s, ",.0f"),
            ("floor, s", frame.floor_s, ".2f"),
            ("of the floor", frame.seconds / frame.floor_s, ".0%"),
            ("generated/trained", frame.tokens_generated / frame.tokens_trained, ".2f"),
            ("tokens an answer: median, mean, max", tokens, ""),
        ),
        shares=table(
            name,
            *((service, cells, "") for service, cells in shares.items()),
            *((process, frame[f"processor_share.{process}"], ".0%") for process in (REDIS, COMMAND_LINE)),
            ("idle cores", frame.machine_idle_cores, ".2f"),
        ),
        pushes=table(
            name,
            ("push, s", pushes.push_s, ".3f"),
            ("stall, s", pushes.stall_s, ".3f"),
            ("MiB", pushes.bytes / 2**20, ".1f"),
            ("first rollout, s", frame.first_rollout_s, ".0f"),
            *((f"{part}, s", frame[f"figures.{part}_s"], ".2f") for part in ("wait", "log", "train", "publish")),
        ),
    )


def draw_steps(results: Results, folder: Path) -> None:
    """Seconds a step, beside the stacked floor."""
    floor = floors(results)
    groups = list(pd.DataFrame(results["system"]).groupby(_KEY, sort=False))
    path, question = folder / "benchmarks-steps.png", "How near does a step come to its floor?"
    with panels(path, question, columns=len(groups)) as axes:
        for axis, ((lengths, dtype), group) in zip(axes, groups, strict=True):
            bars = pd.DataFrame({"whole system": group.set_index("max_lag").seconds}).rename(index="lag {}".format)
            if (lengths, dtype) in floor.index:
                alone = floor.loc[[(lengths, dtype)]].set_axis(["alone,\nadded"])
                bars = pd.concat([alone, bars])
                axis.axhline(alone.sum(axis=1).item(), color=GREY, linestyle=":", linewidth=1)
            colours = {"vLLM alone": SKY, "learner alone": GREY, "whole system": BLUE}
            bars.plot.bar(ax=axis, stacked=True, width=0.8, rot=0, legend=False, color=colours)
            axis.set_title(f"{lengths} answers, {dtype}", fontsize=9)
            axis.grid(visible=False, axis="x")
        axes[0].set_ylabel("seconds a step")


def draw_waits(results: Results, folder: Path) -> None:
    """The idle share of every service at every lag, in float32."""
    frame = pd.json_normalize(results["system"]).query("dtype == 'float32'")
    groups = list(frame.groupby("lengths", sort=False))
    path, question = folder / "benchmarks-waits.png", "Which service waits?"
    with panels(path, question, columns=len(groups), height=3.2) as axes:
        for axis, (lengths, group) in zip(axes, groups, strict=True):
            columns = {f"idle_share.{service}": service for service in SERVICES}
            idle = group.set_index("max_lag").reindex(columns=columns).rename(columns=columns).T
            colours = dict(zip(LAGS, (BLUE, ORANGE, GREEN), strict=True))
            idle.plot.bar(ax=axis, width=0.8, rot=0, legend=False, color=colours, fontsize=7.5)
            for bars, max_lag in zip(axis.containers, idle.columns, strict=True):
                bars.set_label(f"max_lag {max_lag}")
            axis.set_title(f"{lengths} answers", fontsize=9)
            axis.yaxis.set_major_formatter("{x:.0%}")
            axis.grid(visible=False, axis="x")
        axes[0].set_ylabel("share of the time")


SYSTEM = PageSection("system", "The whole system", measurements, text, (draw_steps, draw_waits))
