"""Held-out results with their standard errors, in words: a difference within two of them is none.

The errors are over prompts, since answers to one prompt are not independent. That of a difference is of independent
prompts, an upper bound for the same ones.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from gspo.common.config.evaluation import BestFigure
from gspo.common.config.schema import Config
from gspo.runlog.run_log import EvaluationRecord, best_of, version_scores

# Standard errors within which two results are no different.
SAME_WITHIN = 2.0
NO_DIFFERENCE = "no difference beyond two standard errors"


def error_of(figures: Mapping[str, float], name: str) -> float | None:
    """The standard error of a figure of an evaluation; None where it has none."""
    return figures.get(f"{name.removesuffix('_mean')}_stderr")


def in_words(value: float, error: float | None) -> str:
    """'0.852 ± 0.012'."""
    return f"{value:.3f}" if error is None else f"{value:.3f} ± {error:.3f}"


def change_in_words(change: float, error: float | None) -> str:
    """'+0.120 ± 0.030', or that there is no difference; empty without an error, which leaves it open."""
    if error is None:
        return ""
    return NO_DIFFERENCE if abs(change) <= SAME_WITHIN * error else f"{change:+.3f} ± {error:.3f}"


def stated_change(change: tuple[float, float | None]) -> str:
    """As `change_in_words`; a change without an error is stated as such."""
    return change_in_words(*change) or f"{change[0]:+.3f}, without a standard error"


def difference(
    before: Mapping[str, float], after: Mapping[str, float], name: str = "sampled_mean"
) -> tuple[float, float | None] | None:
    """After minus before of a figure, and its standard error; None where one of them lacks the figure."""
    if name not in before or name not in after:
        return None
    errors = [error_of(figures, name) for figures in (before, after)]
    known = [error for error in errors if error is not None]
    return after[name] - before[name], math.hypot(*known) if len(known) == 2 else None


@dataclass(frozen=True)
class BestChoice:
    """The version that evaluation.keep_best kept.

    Attributes:
        figure: As evaluation.keep_best names it.
        error: Standard error of its score; None where the figure has none.
        rivals: Other versions whose scores are within two standard errors of it.
        basis: The prompts that its score is of; empty where they are those of the evaluation.
    """

    version: int
    figure: str
    score: float
    error: float | None
    rivals: tuple[int, ...]
    basis: str

    @property
    def line(self) -> str:
        basis = f", {self.basis}" if self.basis else ""
        return f"{self.version} ({self.figure} {in_words(self.score, self.error)}{basis}){self.by_noise}"

    @property
    def by_noise(self) -> str:
        """That noise chose it, where it did, as the end of a sentence; empty otherwise."""
        if not self.rivals:
            return ""
        shown = ", ".join(map(str, self.rivals[:5])) + (", ..." if len(self.rivals) > 5 else "")
        others = f"versions {shown} are" if len(self.rivals) > 1 else f"version {shown} is"
        return f"; chosen by noise, for {others} within two standard errors"


def best_choice(evaluations: Iterable[EvaluationRecord], config: Config) -> BestChoice | None:
    """The best version by evaluation.keep_best, and whether noise chose it; None without a score."""
    compared, scored = config.best_figure, [record for record in evaluations if record.score is not None]
    if compared is None:
        return None
    records = [(record.version, record.file, record.score) for record in scored]
    scores = version_scores(records, compared.weights)
    if (best := best_of(scores)) is None:
        return None
    limit = config.evaluation.limit_between
    squares = [
        (record.version, record.file, None if error is None else error**2)
        for record in scored
        for error in [_score_error(record, compared.figure, limit)]
    ]
    total = math.fsum(compared.weights.values())
    # The variance of a weighted mean: each file's by the square of its weight.
    weights = {file: weight**2 for file, weight in compared.weights.items()}
    variances = {
        version: mean * math.fsum(weights.values()) / total**2
        for version, mean in version_scores(squares, weights).items()
    }
    version, score = best
    rivals = tuple(
        other
        for other in sorted(scores)
        if other != version
        and {other, version} <= variances.keys()
        and score - scores[other] <= SAME_WITHIN * math.sqrt(variances[other] + variances[version])
    )
    error = math.sqrt(variances[version]) if version in variances else None
    figure = config.evaluation.keep_best or compared.figure
    basis = _basis([record for record in scored if record.version == version], compared, figure, limit)
    return BestChoice(version, figure, score, error, rivals, basis)


def _score_error(record: EvaluationRecord, figure: str, limit: int | None) -> float | None:
    """The standard error of a score; over fewer prompts than the figure's where only the first ones are compared."""
    error, num_prompts = error_of(record.figures, figure), record.figures.get("num_prompts", 0.0)
    if error is None or not num_prompts:
        return error
    return error * math.sqrt(num_prompts / min(num_prompts, limit or num_prompts))


def _basis(of_best: Iterable[EvaluationRecord], compared: BestFigure, figure: str, limit: int | None) -> str:
    """The prompts of a score: its files, where the figure does not name them, and the first ones alone."""
    parts, files = [], list(compared.weights)
    if len(files) > 1:
        parts.append(f"the weighted mean of {' and '.join(files)}")
    elif files[0] and "/" not in figure:
        parts.append(f"of {files[0]}")
    if limit is not None and any(record.figures.get("num_prompts", 0.0) > limit for record in of_best):
        parts.append(f"of the first {limit} prompts alone (evaluation.limit_between)")
    return ", ".join(parts)
