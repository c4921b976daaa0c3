"""Results of replays: each result.json in `replays/` of the run directory.

`gspo replay` computes the comparison; nothing is compared here.
"""

import json
import re
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gspo.view.picture.curves import BLUE, RED, Axis, Curve, Line

RESULT_NAME, REPLAYS = "result.json", "replays"
# Figure -> the curve's question, and whether it is a share.
FIGURES = {
    "loss": ("Is the loss the recorded one?", False),
    "clipped_sequences": ("Are as many sequences clipped?", True),
    "clipped_tokens": ("Are as many tokens clipped?", True),
    "grad_norm": ("Is the gradient as large?", False),
}
NAME = re.compile(r"[0-9A-Za-z][0-9A-Za-z._-]{0,127}")
_DIGEST = "digest"
Number = Annotated[float, Field(allow_inf_nan=True)]


class ReplayValue(BaseModel):
    """A figure or the digest of a step; `equal` is None where they were not compared."""

    recorded: Number | str | None
    replayed: Number | str | None
    difference: Number | None
    equal: bool | None


class ReplayStep(BaseModel):
    """A step with its compared values by name."""

    step: int
    values: dict[str, ReplayValue]

    @property
    def digest(self) -> ReplayValue | None:
        """The digests of the version that the step made."""
        return self.values.get(_DIGEST)

    @property
    def differing(self) -> list[str]:
        """The values that are not the recorded ones, without the digest."""
        return [name for name, value in self.values.items() if value.equal is False and name != _DIGEST]


class ReplayResult(BaseModel):
    """A result.json of `gspo replay`, as far as the page shows it."""

    model_config = ConfigDict(populate_by_name=True)

    first: int
    last: int
    start: int
    changes: dict[str, Any] = Field(alias="with")
    rounding: list[str]
    notes: list[str]
    equal: bool
    first_difference: dict[str, Any] | None
    steps: list[ReplayStep]

    @property
    def figures(self) -> list[str]:
        """The figures of FIGURES that a step has."""
        return [name for name in FIGURES if any(name in step.values for step in self.steps)]

    def curves(self) -> list[Curve]:
        """Recorded and replayed values of each figure."""
        return [self._curve(name) for name in self.figures]

    def _curve(self, name: str) -> Curve:
        question, is_share = FIGURES[name]
        having = {step.step: step.values[name] for step in self.steps if name in step.values}
        recorded = {step: _number(value.recorded) for step, value in having.items()}
        replayed = {step: _number(value.replayed) for step, value in having.items()}
        lines = Line("recorded", name, BLUE, recorded), Line("replayed", name, RED, replayed, "dashed")
        reading = "A single visible line means that both are equal."
        if self.changes and self.start + 1 < self.first:
            reading += f" The steps before {self.first} are made as recorded."
        return Curve(name, question, (), Axis(name.replace("_", " "), is_share), lines, reading)


def _number(value: float | str | None) -> float | None:
    return value if isinstance(value, float) else None


def replay_names(run_dir: Path) -> list[str]:
    """The finished replays in the run directory, the newest first."""
    results = [path for path in run_dir.glob(f"{REPLAYS}/*/{RESULT_NAME}") if NAME.fullmatch(path.parent.name)]
    return [path.parent.name for path in sorted(results, key=lambda path: path.stat().st_mtime, reverse=True)]


def read_result(run_dir: Path, name: str) -> ReplayResult:
    """A result by the name of its folder.

    Raises:
        OSError: There is none, or it cannot be read.
        ValueError: The content is invalid.
    """
    path = run_dir / REPLAYS / name / RESULT_NAME
    try:
        return ReplayResult.model_validate(json.loads(path.read_text()))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise ValueError(f"{REPLAYS}/{name}/{RESULT_NAME}: {place}: {first['msg']}; replay again") from error
