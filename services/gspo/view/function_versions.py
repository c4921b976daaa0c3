"""The reward functions of a run by version: their source, scores over steps, calls, failures and printed output.

Scores come from the step files, everything else from the files that gspo.runlog.function_files describes. Names,
sources and outputs are texts of users and models: the templates escape them.
"""

import difflib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock

from gspo.runlog.function_files import FunctionCalls, FunctionSource, read_calls, read_sources
from gspo.view.log_query import LogQuery
from gspo.view.picture.curves import COLOURS, Axis, Curve, Line

# Unchanged lines around a change.
_CONTEXT = 5
_SHAPE = '[{"name": "VARCHAR", "value": "DOUBLE", "weight": "DOUBLE", "version": "VARCHAR"}]'
_PARTS = f"""SELECT step, "group", number, unnest(from_json(nullif(parts_json, ''), '{_SHAPE}')) AS part FROM log"""
# Part names are FUNCTION or FUNCTION/PART.
_SUMS = f"""SELECT step, split_part(part.name, '/', 1) AS name, part.version AS version,
    sum(part.value * part.weight) AS score
    FROM ({_PARTS}) WHERE part.version <> '' GROUP BY step, name, version, "group", number"""
_SCORES = f"SELECT name, version, step, count(*) AS answers, sum(score) AS score FROM ({_SUMS}) GROUP BY ALL"
_IS_OF = "(starts_with(failure, known.name || ': ') OR contains(failure, '; ' || known.name || ': '))"


@dataclass
class FunctionVersion:
    """One version of a function under one name.

    Attributes:
        source: None where the log has none: it is of an earlier gspo, or only the environment of a rollout.
        calls: None where no reward service has written any.
        scores: By step: the number of scored rollouts, and the sum of their scores with the weight in the reward.
        failed: By step: the rollouts that it gave no score.
    """

    name: str
    version: str
    source: FunctionSource | None = None
    calls: FunctionCalls | None = None
    scores: dict[int, tuple[int, float]] = field(default_factory=dict)
    failed: dict[int, int] = field(default_factory=dict)

    @property
    def steps(self) -> list[int]:
        """The steps whose rollouts it scored, or failed to."""
        return sorted({*self.scores, *self.failed})

    @property
    def answers(self) -> int:
        """Rollouts of the log that it scored."""
        return sum(number for number, _ in self.scores.values())

    @property
    def num_failed(self) -> int:
        """Rollouts of the log that it gave no score."""
        return sum(self.failed.values())

    @property
    def mean(self) -> float | None:
        """Mean score with its weight."""
        return sum(total for _, total in self.scores.values()) / self.answers if self.answers else None

    @property
    def seconds(self) -> float | None:
        """Mean seconds of an answer, over its calls."""
        return self.calls.seconds / self.calls.answers if self.calls and self.calls.answers else None


class RunFunctions:
    """The functions of one run. Each step file is read once. Any thread may ask."""

    def __init__(self, log: LogQuery, log_folder: Path) -> None:
        self._log, self._folder, self._lock = log, log_folder, Lock()
        self._counted: set[int] = set()  # steps whose rollouts are in `_known`
        self._known: dict[tuple[str, str], FunctionVersion] = {}

    def versions(self) -> list[FunctionVersion]:
        """Every version by name, the first used first.

        Raises:
            duckdb.Error: A step file cannot be read.
        """
        calls = read_calls(self._folder)
        versions = {(known.name, known.version): known for known in self._scores()}
        for source in read_sources(self._folder):
            names = [name for name, version in versions if version == source.version] or [source.name]
            for name in names:
                versions.setdefault((name, source.version), FunctionVersion(name, source.version)).source = source
        for key, known in versions.items():
            known.calls = calls.get(key)
        return sorted(versions.values(), key=lambda known: (known.name, _first_use(known), known.version))

    def _scores(self) -> list[FunctionVersion]:
        """The versions in the step files, as new objects."""
        with self._lock:
            steps = set(self._log.steps())
            for known in self._known.values():
                for step in self._counted - steps:
                    known.scores.pop(step, None)
                    known.failed.pop(step, None)
            if new := sorted(steps - self._counted):
                self._count(new)
            self._counted = steps
            return [
                FunctionVersion(known.name, known.version, scores=dict(known.scores), failed=dict(known.failed))
                for known in self._known.values()
                if known.steps
            ]

    def _count(self, steps: list[int]) -> None:
        """Add the rollouts of further steps."""
        for row in self._log.of_steps(steps, _SCORES):
            known = self._version(row["name"], row["version"])
            known.scores[row["step"]] = (row["answers"], row["score"] or 0.0)
        keys = {*self._known, *((source.name, source.version) for source in read_sources(self._folder))}
        if keys:
            places = ", ".join(["(?, ?)"] * len(keys))
            sql = f"""SELECT known.name, known.version, step, count(*) AS failed
                FROM log, (VALUES {places}) AS known(name, version)
                WHERE failure IS NOT NULL AND contains(reward_version, known.version) AND {_IS_OF} GROUP BY ALL"""
            for row in self._log.of_steps(steps, sql, [text for key in keys for text in key]):
                self._version(row["name"], row["version"]).failed[row["step"]] = row["failed"]

    def _version(self, name: str, version: str) -> FunctionVersion:
        return self._known.setdefault((name, version), FunctionVersion(name, version))

    def named(self, version: str) -> list[FunctionVersion]:
        """The functions of a version: one, unless several names have the same content."""
        return [known for known in self.versions() if known.version == version]


def _first_use(known: FunctionVersion) -> tuple[float, int]:
    return known.source.used_unix_s if known.source else 0.0, known.steps[0] if known.steps else 0


def function_curves(versions: Sequence[FunctionVersion]) -> list[Curve]:
    """Score and failures of each function over steps, a line for each of its newest versions."""
    by_name: defaultdict[str, list[FunctionVersion]] = defaultdict(list)
    for known in versions:
        if known.steps:
            by_name[known.name].append(known)
    curves = []
    for name, all_of_one in by_name.items():
        newest = list(zip(all_of_one[-len(COLOURS) :], COLOURS, strict=False))
        means = [Line(known.version[:12], "parts_json", colour, _mean_scores(known)) for known, colour in newest]
        question, reading = f"What does {name} give?", "Each version's mean, with its weight in the reward."
        curves.append(Curve(f"score {name}", question, (), Axis("mean score"), means, reading))
        if any(known.failed for known, _ in newest):
            shares = [Line(known.version[:12], "failure", colour, _failed_shares(known)) for known, colour in newest]
            question, reading = f"How often does {name} fail?", "Rollouts that it gave no score."
            curves.append(Curve(f"failures {name}", question, (), Axis("failed", is_share=True), shares, reading))
    return curves


def _mean_scores(known: FunctionVersion) -> dict[int, float | None]:
    """By step, the mean score with its weight."""
    return {step: total / num for step, (num, total) in known.scores.items()}


def _failed_shares(known: FunctionVersion) -> dict[int, float | None]:
    """By step, the share of the rollouts that it could not score."""
    tried = {step: known.scores.get(step, (0, 0.0))[0] + known.failed.get(step, 0) for step in known.steps}
    return {step: known.failed.get(step, 0) / num for step, num in tried.items()}


@dataclass(frozen=True)
class DifferenceLine:
    """A line of a difference.

    Attributes:
        sign: `+`, `-`, a space for an unchanged line, or `…` for lines that are left out.
        old, new: Its numbers in the two texts, from 1; None where it is not in that one.
    """

    sign: str
    old: int | None
    new: int | None
    text: str


def difference_of(old: str, new: str) -> list[DifferenceLine]:
    """The changed lines between two sources, with unchanged ones around them; empty where they are equal."""
    before, after = old.splitlines(), new.splitlines()
    matcher = difflib.SequenceMatcher(None, before, after, autojunk=len(before) + len(after) > 2000)
    lines: list[DifferenceLine] = []
    for number, group in enumerate(matcher.get_grouped_opcodes(_CONTEXT)):
        if number:
            lines.append(DifferenceLine("…", None, None, ""))
        for tag, old_start, old_end, new_start, new_end in group:
            if tag == "equal":
                pairs = zip(range(old_start, old_end), range(new_start, new_end), strict=True)
                lines += [DifferenceLine(" ", was + 1, now + 1, before[was]) for was, now in pairs]
                continue
            lines += [DifferenceLine("-", was + 1, None, before[was]) for was in range(old_start, old_end)]
            lines += [DifferenceLine("+", None, now + 1, after[now]) for now in range(new_start, new_end)]
    return lines
