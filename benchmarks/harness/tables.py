"""The arithmetic of the page, and tables in Markdown. Pure: numbers in, numbers and text out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import Any

Record = Mapping[str, Any]


def middle(values: Sequence[float]) -> float:
    """The median."""
    return float(median(values))


def only(records: Iterable[Record], **wanted: Any) -> Record | None:
    """The one record with these values; None where it was not measured."""
    found = [record for record in records if all(record[key] == value for key, value in wanted.items())]
    return found[0] if found else None


def fastest(records: Iterable[Record], **wanted: Any) -> float | None:
    """Least `seconds` among the records with these values."""
    found = [record["seconds"] for record in records if all(record[key] == value for key, value in wanted.items())]
    return min(found) if found else None


def floor_s(engine_s: float | None, learner_s: float | None) -> float | None:
    """Seconds a step takes at least where both engines use all cores: their times alone, added."""
    return None if engine_s is None or learner_s is None else engine_s + learner_s


def share_of_floor(floor: float | None, seconds: float) -> float | None:
    """How near a step comes to its floor: 1 is no loss at all."""
    return None if floor is None else floor / seconds


def value_at(curve: Sequence[tuple[float, float]], x: float) -> float | None:
    """y at `x` on the straight lines between the points of a curve; None outside of it."""
    for (x0, y0), (x1, y1) in pairwise(curve):
        if x0 <= x <= x1:
            return y0 if x1 == x0 else y0 + (y1 - y0) * (x - x0) / (x1 - x0)
    return None


def shared_end(curves: Iterable[Sequence[tuple[float, float]]]) -> float:
    """The last x that every curve reaches."""
    return min(curve[-1][0] for curve in curves)


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; all columns but the first lean to the right."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def number(value: float | None, digits: int = 1) -> str:
    """A number with separators of thousands; a dash for None."""
    return "-" if value is None else f"{value:,.{digits}f}"


def percent(value: float | None) -> str:
    """A share in percent; a dash for None."""
    return "-" if value is None else f"{value:.0%}"
