"""The result of a replay as a table and as JSON."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from gspo.cli.replay.replay_plan import ReplayPlan
from gspo.cli.replay.step_comparison import DIGEST, ComparedValue, first_difference

_MOST_DIFFERING = 12
# So many equal steps are shown with their figures, and more with their digests alone.
_FEW_STEPS = 10
_DIGEST_LETTERS = 12


def shown_figures(plan: ReplayPlan) -> tuple[str, ...]:
    """The figures that are shown of each step: loss, clipped share of the ratio's unit, gradient norm."""
    ratios = [config.algorithm.importance_sampling for config in (plan.recorded, plan.changed.config)]
    units = dict.fromkeys("clipped_tokens" if ratio == "token" else "clipped_sequences" for ratio in ratios)
    return ("loss", *units, "grad_norm")


def result_of(plan: ReplayPlan, folder: Path, values: Sequence[ComparedValue]) -> dict[str, Any]:
    """The result as JSON holds it: every compared value of every step."""
    first = first_difference(values)
    return {
        "run": str(plan.run_dir),
        "folder": str(folder),
        "first": plan.first,
        "last": plan.last,
        "start": plan.start,
        "with": {name: _plain(after) for name, (_, after) in plan.changed.values.items()},
        "exact": plan.is_exact,
        "rounding": list(plan.rounding),
        "notes": list(plan.notes),
        "equal": first is None,
        "first_difference": _as_json(first) | {"step": first.step, "name": first.name} if first else None,
        "steps": [
            {"step": step, "values": {value.name: _as_json(value) for value in of_step}}
            for step, of_step in groupby(values, lambda value: value.step)
        ],
        "plot": None,
    }


def _plain(value: Any) -> Any:
    return value if isinstance(value, int | float | str | bool | list | dict | None) else str(value)


def _as_json(value: ComparedValue) -> dict[str, Any]:
    return {
        "recorded": value.recorded,
        "replayed": value.replayed,
        "difference": value.difference,
        "equal": value.is_equal,
    }


def print_result(plan: ReplayPlan, result: dict[str, Any], values: Sequence[ComparedValue], console: Console) -> None:
    """Print a row for each digest and each figure that is compared or differs, and the verdict in a sentence."""
    table = Table("step", "figure", "recorded", "replayed", "difference", box=None, pad_edge=False, header_style="bold")
    for column in table.columns[2:]:
        column.justify = "right"
    for step, of_step in groupby(values, lambda value: value.step):
        for value in _rows(plan, list(of_step)):
            is_verified = not plan.changed.trains_otherwise or step < plan.first
            style = {True: "green", False: "red", None: ""}[value.is_equal] if is_verified else ""
            shown = (str(step), value.name, _text(value.recorded), _text(value.replayed))
            table.add_row(*shown, Text(_difference(value), style))
    console.print(table)
    console.print(_verdict(plan, values), highlight=False, soft_wrap=True)
    if result["plot"]:
        console.print(result["plot"], highlight=False, soft_wrap=True)


def _rows(plan: ReplayPlan, values: Sequence[ComparedValue]) -> Iterator[ComparedValue]:
    step = values[0].step
    digest, figures = values[0], values[1:]
    if step == plan.start or step < plan.first:  # before the steps that were asked for
        yield from (value for value in values if value.is_equal is False)
        return
    by_name = {value.name: value for value in figures}
    shown = [by_name[name] for name in shown_figures(plan) if name in by_name]
    if plan.changed.trains_otherwise:
        yield from shown
        return
    yield digest
    differing = [value for value in figures if value.is_equal is False]
    is_short = plan.last - plan.first < _FEW_STEPS
    yield from differing[:_MOST_DIFFERING] or (shown if is_short or plan.rounding else ())


def _text(value: float | str | None) -> str:
    if value is None:
        return "-"
    return value[:_DIGEST_LETTERS] if isinstance(value, str) else f"{value:.6g}"


def _difference(value: ComparedValue) -> str:
    if value.name == DIGEST:
        return {True: "equal", False: "differs", None: "not compared"}[value.is_equal]
    if value.difference is None:
        return "-"
    return "0" if value.difference == 0 else f"{value.difference:+.3g}"


def _verdict(plan: ReplayPlan, values: Sequence[ComparedValue]) -> str:
    num_steps = len({value.step for value in values} - {plan.start})
    first = first_difference(values)
    rule = "within the tolerance" if plan.rounding else "to the bit"
    if plan.changed.trains_otherwise and first is not None and first.step >= plan.first:
        return f"The first step that these keys change is {first.step} ({first.name})."
    if first is None:
        return f"Equal: {num_steps} steps are as recorded, {rule}."
    if first.step == plan.start:
        source = f"the checkpoint of step {first.step}" if first.step else f"the model {plan.recorded.model.path}"
        return f"Differs before the first step: {source} has other weights than the recorded version {first.step}."
    return (
        f"Differs: the first step that is not as recorded, {rule}, is {first.step}: {first.name} was "
        f"{_text(first.recorded)}, and is {_text(first.replayed)}."
    )
