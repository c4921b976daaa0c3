"""Runs beside each other: curves, configurations, and answers to the same prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gspo.view.log_query import LogQuery
from gspo.view.picture.viewed_run import ViewedRun

# One for each run.
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9")
MAX_RUNS = len(_COLOURS)
_NUM_PROMPTS, _NUM_ANSWERS = 5, 2
# Beside the first line of each curve: the results that can be compared best.
_HELD_OUT = "sampled_mean"


def compared_curves(runs: Sequence[ViewedRun]) -> list[dict[str, Any]]:
    """The curves of any run, each with one line a run; held-out results have a curve of their own."""
    by_run = [{curve["name"]: curve for curve in _split(run.curves())} for run in runs]
    names = list(dict.fromkeys(name for curves in by_run for name in curves))
    return [_over_each_other(name, runs, by_run) for name in names]


def _split(curves: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each curve with its first solid line alone; before that of rewards, one of held-out results."""
    split = []
    for curve in curves:
        if held_out := [line for line in curve["lines"] if line["figure"] == _HELD_OUT]:
            question = "Is it better on held-out prompts?"
            split.append({**curve, "name": "held_out", "question": question, "lines": held_out})
        solid = [line for line in curve["lines"] if not line["is_dashed"]]
        split.append({**curve, "lines": (solid or curve["lines"])[:1]})
    return split


def _over_each_other(
    name: str, runs: Sequence[ViewedRun], by_run: Sequence[dict[str, dict[str, Any]]]
) -> dict[str, Any]:
    having = [
        (run, curves[name], colour)
        for run, curves, colour in zip(runs, by_run, _COLOURS, strict=False)
        if name in curves
    ]
    steps = sorted({step for _, curve, _ in having for step in curve["steps"]})
    lines = []
    for run, curve, colour in having:
        values = dict(zip(curve["steps"], curve["lines"][0]["values"], strict=True))
        line = {**curve["lines"][0], "label": run.name, "colour": colour, "is_dashed": False}
        lines.append({**line, "values": [values.get(step) for step in steps]})
    return {**having[0][1], "steps": steps, "lines": lines}


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
