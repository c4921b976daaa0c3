"""Curves over the steps of a run, from the declarations of plots.py to the JSON that curves.js draws.

It knows no figure by name. The colours are those of Okabe and Ito, which people without colour vision can distinguish.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, Literal

from gspo.runlog.run_history import RunHistory

BLUE, ORANGE, GREEN, RED, PURPLE, SKY, GREY = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#D55E00",
    "#CC79A7",
    "#56B4E9",
    "#6B7280",
)
# For lines of one kind, such as those of several runs.
COLOURS = (BLUE, ORANGE, GREEN, RED, PURPLE, SKY)
# From so many steps on a figure is drawn thin, with its running mean over a twentieth of the steps.
_SMOOTH_FROM = 60
_DIGITS = 6

Style = Literal["solid", "dashed", "dotted", "faint", "points", "stacked"]
Values = Mapping[int, float | None]


@dataclass(frozen=True)
class CaptionHint:
    """A sentence on how to read a curve.

    Attributes:
        needs: Figures, or labels of limits, that it speaks of: without one of them it is left out.
    """

    text: str
    needs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Line:
    """A line of a curve.

    Attributes:
        figure: Its name in the log; empty for a limit.
        file: The held-out file of its points.
        prompts: Names of its held-out prompts; several where its points are not of the same ones.
        values: By step; None is a gap.
        style: `stacked` lines are bars on top of those before them.
        widths: By step, how far a band reaches above and below the value.
    """

    label: str
    figure: str
    colour: str
    values: Values
    style: Style = "solid"
    widths: Values = field(default_factory=dict)
    file: str = ""
    prompts: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Axis:
    """The y axis of a curve.

    Attributes:
        is_share: Whether it is in per cent.
        low, high: Its bounds; None where the data decide.
        least_top: Lower bound of the highest y.
    """

    label: str
    is_share: bool = False
    low: float | None = None
    high: float | None = None
    least_top: float | None = None


@dataclass(frozen=True)
class Curve:
    """Lines over the same steps. Curves of one question are drawn below each other.

    Attributes:
        name: Its own on the page.
        hints: How to read it; `captioned` makes the reading of those that speak of drawn lines.
    """

    name: str
    question: str
    hints: tuple[CaptionHint, ...]
    axis: Axis
    lines: Sequence[Line]
    reading: str = ""

    @property
    def steps(self) -> list[int]:
        """The steps of any line, in order."""
        return sorted({step for line in self.lines for step in line.values})

    def as_json(self) -> dict[str, Any]:
        """The input of curves.js: each line has a value or null for each of `steps`."""
        steps = self.steps
        lines = [
            {
                **{name: getattr(line, name) for name in ("label", "figure", "colour", "style")},
                "values": [_finite(line.values.get(step)) for step in steps],
                "widths": [_finite(line.widths.get(step)) for step in steps] if line.widths else None,
            }
            for line in self.lines
        ]
        words = {"name": self.name, "question": self.question, "reading": self.reading}
        return {**words, **vars(self.axis), "steps": steps, "lines": lines}


def captioned(curves: Iterable[Curve]) -> list[Curve]:
    """Curves with their readings. Those of one question have one, from the lines of all of them."""
    curves = list(curves)
    by_question: dict[str, list[Line]] = {}
    for curve in curves:
        by_question.setdefault(curve.question, []).extend(curve.lines)
    return [replace(curve, reading=_reading(curve.hints, by_question[curve.question])) for curve in curves]


def _reading(hints: Iterable[CaptionHint], lines: Sequence[Line]) -> str:
    drawn = {name for line in lines for name in (line.figure or line.label).split(" + ")}
    return " ".join([*(hint.text for hint in hints if drawn.issuperset(hint.needs)), *_on_prompts(lines)])


def _on_prompts(lines: Sequence[Line]) -> Iterator[str]:
    """Whether the held-out points can be compared."""
    of_lines = [line.prompts for line in lines if line.prompts]
    if not of_lines:
        return
    are_alike = len(set(of_lines)) == 1
    if max(map(len, of_lines)) > 1:
        others = "" if are_alike else "; those of another line need not be the same"
        yield f"Some points of a line are of its first held-out prompts alone (evaluation.limit_between){others}."
    elif are_alike:
        yield "The held-out points can be compared: all are of the same prompts."
    else:
        yield "The points of a line are of the same held-out prompts; those of another line need not be."


@dataclass(frozen=True)
class StepFigure:
    """A figure of each step as a line; `width` names the figure that is the width of its band.

    A stacked one is left out where it is 0 at every step.
    """

    name: str
    label: str
    colour: str
    style: Style = "solid"
    width: str = ""

    def lines(self, history: RunHistory) -> Iterator[Line]:
        """Its line, nothing where no step has the figure. Of many steps it is faint, and its running mean follows."""
        values = history.series(self.name)
        if all(value is None for value in values.values()) or (self.style == "stacked" and not any(values.values())):
            return
        widths = history.series(self.width) if self.width else {}
        if self.style == "stacked" or len(values) < _SMOOTH_FROM:
            yield Line(self.label, self.name, self.colour, values, self.style, widths)
            return
        yield Line(self.label, self.name, self.colour, values, "faint", widths)
        num_steps = len(values) // 20 | 1
        means = dict(zip(values, running_mean(list(values.values()), num_steps), strict=True))
        yield Line(f"{self.label}, mean of {num_steps} steps", self.name, self.colour, means, self.style)


def no_lines(_history: RunHistory) -> Iterable[Line]:
    """Nothing beside the figures."""
    return ()


class Panel:
    """One panel of a plot; it is left out where it has nothing to draw.

    Args:
        label: That of the y axis.
        lines: Makes lines that are of no step's figures.
        beside: Makes lines that are no reason to draw the panel, such as limits.
        low: Lowest y; None where the data decide.
        bounds: Others of Axis.
    """

    def __init__(
        self,
        label: str,
        *figures: StepFigure,
        lines: Callable[[RunHistory], Iterable[Line]] = no_lines,
        beside: Callable[[RunHistory], Iterable[Line]] = no_lines,
        low: float | None = 0.0,
        **bounds: Any,
    ) -> None:
        self.axis = Axis(label, low=low, **bounds)
        self.figures, self._lines, self._beside = figures, lines, beside

    def drawn(self, history: RunHistory) -> list[Line]:
        """Its lines, the stacked ones first."""
        content = [line for figure in self.figures for line in figure.lines(history)]
        content += self._lines(history)
        return sorted([*content, *(self._beside(history) if content else ())], key=lambda line: line.style != "stacked")


class Plot:
    """One plot.

    Args:
        question: Its title.
        reading: How to read it: a sentence or more, or hints that speak of some of its lines alone.
        panels: From top to bottom.
        needs: Figures of which one must have a value other than 0; empty where any value of a panel is enough.
    """

    def __init__(
        self, name: str, question: str, reading: str | Sequence[CaptionHint], *panels: Panel, needs: Sequence[str] = ()
    ) -> None:
        self.name, self._question, self.panels, self._needs = name, question, panels, needs
        self._hints = (CaptionHint(reading),) if isinstance(reading, str) else tuple(reading)

    def curves(self, history: RunHistory) -> Iterator[Curve]:
        """A curve for each panel that has something to draw."""
        if self._needs and not any(any(history.series(name).values()) for name in self._needs):
            return
        for number, panel in enumerate(self.panels):
            if lines := panel.drawn(history):
                name = f"{self.name}-{number}" if number else self.name
                yield Curve(name, self._question, self._hints, panel.axis, lines)


def level(history: RunHistory, value: float, label: str, colour: str = GREY) -> Line:
    """A dashed line at a value that the configuration or the advice names."""
    return Line(label, "", colour, dict.fromkeys(history.series(""), value), "dashed")


def running_mean(values: Sequence[float | None], width: int) -> list[float | None]:
    """The mean of the up to `width` values around each, an odd number; a gap counts for nothing."""
    sums = [0.0, *accumulate(value or 0.0 for value in values)]
    counts = [0, *accumulate(int(value is not None) for value in values)]
    means: list[float | None] = []
    for place in range(len(values)):
        first, end = max(0, place - width // 2), min(len(values), place + width // 2 + 1)
        count = counts[end] - counts[first]
        means.append((sums[end] - sums[first]) / count if count else None)
    return means


def _finite(value: float | None) -> float | None:
    """A value for JSON, which has finite numbers alone, with the digits that a picture shows."""
    return float(f"{value:.{_DIGITS}g}") if value is not None and math.isfinite(value) else None
