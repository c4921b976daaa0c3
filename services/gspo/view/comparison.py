"""Runs beside each other: curves, configurations, and answers to the same prompts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from gspo.view.log_query import LogQuery
from gspo.view.picture.curves import COLOURS, Curve
from gspo.view.picture.viewed_run import ViewedRun

MAX_RUNS = len(COLOURS)
_NUM_PROMPTS, _NUM_ANSWERS = 5, 2
# Beside the first line of each curve: the results that can be compared best.
_HELD_OUT = "sampled_mean"


def compared_curves(runs: Sequence[ViewedRun]) -> list[Curve]:
    """The curves of any run, each with one line a run; held-out results have a curve of their own."""
    by_run = [{curve.name: curve for curve in _split(run.curves())} for run in runs]
    names = dict.fromkeys(name for curves in by_run for name in curves)
    compared = []
    for name in names:
        having = [
            (run, curves[name], colour)
            for run, curves, colour in zip(runs, by_run, COLOURS, strict=False)
            if name in curves
        ]
        lines = [replace(curve.lines[0], label=run.name, colour=colour, style="solid") for run, curve, colour in having]
        compared.append(replace(having[0][1], lines=lines))
    return compared


def _split(curves: Sequence[Curve]) -> Iterator[Curve]:
    """Each curve with its first figure of the steps alone; before that of rewards, one of held-out results."""
    for curve in curves:
        if held_out := [line for line in curve.lines if line.figure == _HELD_OUT]:
            question = "Is it better on held-out prompts?"
            yield replace(curve, name="held_out", question=question, lines=held_out)
        of_steps = [line for line in curve.lines if line.style in ("solid", "faint", "stacked")]
        yield replace(curve, lines=(of_steps or curve.lines)[:1])


def config_differences(runs: Sequence[ViewedRun]) -> list[tuple[str, list[str]]]:
    """Each key that is not equal in all runs, with its values; `absent` where a run has no such key."""
    keys = [run.keys() for run in runs]
    names = sorted({name for of_one in keys for name in of_one})
    values = ((name, [of_one.get(name, "absent") for of_one in keys]) for name in names)
    return [(name, of_runs) for name, of_runs in values if len(set(of_runs)) > 1]


def shared_answers(logs: Sequence[LogQuery], text: str) -> list[tuple[str, list[list[dict[str, Any]]]]]:
    """Prompts that every run has and that contain the text, with each run's answers of the last step that has them."""
    last_steps = [log.last_steps(text) for log in logs]
    shared = set.intersection(*(set(steps) for steps in last_steps))
    latest = sorted(shared, key=lambda prompt: (-min(steps[prompt] for steps in last_steps), prompt))[:_NUM_PROMPTS]
    return [
        (
            prompt,
            [log.answers(prompt, steps[prompt], _NUM_ANSWERS) for log, steps in zip(logs, last_steps, strict=True)],
        )
        for prompt in latest
    ]
