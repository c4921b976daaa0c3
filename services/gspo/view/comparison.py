"""Runs beside each other: curves, configurations, and answers to the same prompts."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from gspo.runlog.sentences.held_out import difference, stated_change
from gspo.view.log_query import LogQuery
from gspo.view.picture.curves import COLOURS, Curve, Line, captioned
from gspo.view.picture.viewed_run import ViewedRun

MAX_RUNS = len(COLOURS)
_NUM_PROMPTS, _NUM_ANSWERS = 5, 2
# Beside the first line of each curve: the results that can be compared best.
_HELD_OUT = "sampled_mean"
_SINGLE_FILE, _HELD_OUT_QUESTION = "held_out", "Is it better on held-out prompts ({})?"
# Figures of lines that say different things: the first of them does not stand for the others.
_APART = ("source_", "pass_at_")


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
        curve = having[0][1]
        if name == _SINGLE_FILE:
            curve = replace(curve, question=_HELD_OUT_QUESTION.format(_names_of_single([run for run, *_ in having])))
        compared.append(replace(curve, lines=lines))
    return captioned(compared)


def _split(curves: Sequence[Curve]) -> Iterator[Curve]:
    """Each curve with one line: its first figure of the steps, or the sum of stacked ones.

    Before the curve of rewards comes one of the results on each held-out file. Lines of sources and of pass@k have a
    curve each.
    """
    for curve in curves:
        for line in curve.lines:
            if line.figure == _HELD_OUT:
                name = f"{_SINGLE_FILE} ({line.file})" if line.file else _SINGLE_FILE
                yield replace(curve, name=name, question=_HELD_OUT_QUESTION.format(line.file), lines=[line])
        apart: dict[str, Line] = {}
        for line in curve.lines:  # the first of a figure; its running mean may follow
            if line.figure.startswith(_APART):
                apart.setdefault(line.figure, line)
        if apart:
            for line in apart.values():
                yield replace(_named(curve, line.label), name=f"{curve.name} ({line.figure})", lines=[line])
            continue
        if stacked := [line for line in curve.lines if line.style == "stacked"]:
            yield replace(curve, lines=[_sum(stacked)])
            continue
        of_steps = [line for line in curve.lines if line.style in ("solid", "faint")]
        yield replace(curve, lines=(of_steps or curve.lines)[:1])


def _named(curve: Curve, line: str) -> Curve:
    """The curve under the name of its only line: the k of pass@k at the axis, the source in the question."""
    if line.startswith("pass@"):
        return replace(curve, axis=replace(curve.axis, label=f"{curve.axis.label}, {line}"))
    return replace(curve, question=f"{curve.question} ({line})")


def _names_of_single(runs: Sequence[ViewedRun]) -> str:
    """The name of the single held-out file of these runs: the configuration has none, and each may have another."""
    return " and ".join(dict.fromkeys(run.headline_name or "a single file" for run in runs))


def _sum(lines: Sequence[Line]) -> Line:
    """Stacked lines on top of each other; a gap where none has a value."""
    steps = dict.fromkeys(step for line in lines for step in line.values)
    known = {step: [v for line in lines if (v := line.values.get(step)) is not None] for step in steps}
    values = {step: math.fsum(of_step) if of_step else None for step, of_step in known.items()}
    return replace(lines[0], figure=" + ".join(line.figure for line in lines), values=values)


def compared_results(runs: Sequence[ViewedRun]) -> list[tuple[str, list[tuple[str, str, str]]]]:
    """For each held-out file of any run, under its name: (run, last result with its error, difference to the first)."""
    by_run = [run.held_out() for run in runs]
    tables = []
    for file in dict.fromkeys(file for of_run in by_run for file in of_run):
        having = [(run, *of_run[file]) for run, of_run in zip(runs, by_run, strict=True) if file in of_run]
        _, first, prompts = having[0]
        heading = file or _names_of_single([run for run, *_ in having])
        rows = []
        for run, record, own_prompts in having:
            change = difference(first.figures, record.figures) if record is not first else None
            words = stated_change(change) if change else ""
            words = words if own_prompts == prompts else "other prompts, or not known to be the same"
            rows.append((run.name, f"{record.line} at version {record.version}", words))
        tables.append((heading, rows))
    return tables


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
