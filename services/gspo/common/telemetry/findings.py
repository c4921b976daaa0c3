"""Rules over the figures of a run's last steps, and their findings.

The rules are data: learning_rules.py and clip_rules.py have them. Each is a pure function of the figures that it names
and silent without them, so a terminal, a service and a report of an old log find the same.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from gspo.common.config.schema import Config

# A step's figures with the step's number under NUMBER, and those of an evaluation of the version that it trained.
Steps = Sequence[Mapping[str, float]]
NUMBER = "step"
HELD_OUT, HELD_OUT_ERROR = "held_out_mean", "held_out_stderr"
# Newest steps that the running services keep. Rules look at 50 at most, and the rest says since when one holds.
KEPT_STEPS = 200
# Of the peak: a schedule below it has nearly ended the updates, so a policy that moves little is as expected.
_ANNEALED = 0.5


@dataclass(frozen=True)
class Said:
    """The words of a finding.

    Attributes:
        seen: What the figures show: a sentence without its end.
        causes: Likely ones in order.
        tries: What to try, in order.
    """

    seen: str
    causes: tuple[str, ...] = ()
    tries: tuple[str, ...] = ()


@dataclass(frozen=True)
class Rule:
    """One rule.

    Attributes:
        figures: Those that it reads.
        steps: Number of steps that it looks at, up to the newest.
        holds: Whether the finding is there in these steps.
        says: Its words.
        applies: Whether runs of a configuration are judged by it.
        is_measured: Whether its figures are not measured in each step. It looks at all steps that have them, `steps` or
            more.
        rollouts: Where the page of the run shows rollouts of it.
    """

    name: str
    figures: tuple[str, ...]
    steps: int
    holds: Callable[[Steps, Config], bool]
    says: Callable[[Steps, Config], Said]
    applies: Callable[[Config], bool] = lambda _config: True
    is_measured: bool = False
    rollouts: str = "/rollouts?step={step}"

    def has_figures(self, step: Mapping[str, float]) -> bool:
        return all(name in step for name in self.figures)

    def finding(self, steps: Steps, config: Config, since: int = 0, rollouts: str = "") -> Finding:
        """The finding in these steps, in which the rule holds."""
        words = self.says(steps, config)
        return Finding(self.name, words.seen, words.causes, words.tries, since, rollouts)


@dataclass(frozen=True)
class Finding:
    """The finding of a rule at the newest step, or of a check at the start.

    Attributes:
        seen, causes, tries: As in Said.
        since: The step since which it holds in each one; 0 for a check.
        rollouts: Path on the page of the run; empty where no rollout shows it.
    """

    rule: str
    seen: str
    causes: tuple[str, ...] = ()
    tries: tuple[str, ...] = ()
    since: int = 0
    rollouts: str = ""

    @property
    def text(self) -> str:
        causes = f" Likely: {'; or '.join(self.causes)}." if self.causes else ""
        tries = f" Try {', or '.join(self.tries)}." if self.tries else ""
        since = f", since step {self.since}" if self.since else ""
        rollouts = f" Rollouts: {self.rollouts}" if self.rollouts else ""
        return f"{self.rule}{since}: {self.seen}.{causes}{tries}{rollouts}"


def is_annealed(steps: Steps, config: Config) -> bool:
    """Whether the schedule has the learning rate below half of its peak in one of the steps."""
    peak = config.learner.learning_rate
    return min(step.get("learning_rate", peak) for step in steps) < _ANNEALED * peak


def apply_rules(rules: Sequence[Rule], steps: Steps, config: Config) -> dict[str, Finding]:
    """The findings at the newest step by their rules; the steps are oldest first."""
    looks = (_Look(rule, steps, config) for rule in rules if rule.applies(config))
    return {look.rule.name: look.finding(len(steps)) for look in looks if look.holds(len(steps))}


def findings_of_run(rules: Sequence[Rule], steps: Steps, config: Config) -> list[tuple[Finding, list[int]]]:
    """Each finding that a run had, as of the last step that had it, and the numbers of all steps that had it."""
    looks = [_Look(rule, steps, config) for rule in rules if rule.applies(config)]
    places = [[end for end in range(1, len(steps) + 1) if look.holds(end)] for look in looks]
    return [
        (look.finding(of_rule[-1]), [look.number(end) for end in of_rule])
        for look, of_rule in zip(looks, places, strict=True)
        if of_rule
    ]


class _Look:
    """A look of a rule at the steps of a run, of which it judges those before any index `end`."""

    def __init__(self, rule: Rule, steps: Steps, config: Config) -> None:
        self.rule, self._steps, self._config = rule, steps, config
        self._measured = [place for place, step in enumerate(steps) if rule.is_measured and rule.has_figures(step)]

    def holds(self, end: int) -> bool:
        """Whether there are enough steps, and the rule holds in them."""
        window = self._window(end)
        return bool(window) and self.rule.holds(window, self._config)

    def finding(self, end: int) -> Finding:
        """The finding, where the rule holds, with the first of the steps in a row that have it."""
        first = end
        while first > 1 and self.holds(first - 1):
            first -= 1
        rollouts = self.rule.rollouts.format(step=self.number(end))
        return self.rule.finding(self._window(end), self._config, self.number(first), rollouts)

    def number(self, end: int) -> int:
        """The number of the step before `end`."""
        return int(self._steps[end - 1].get(NUMBER, 0))

    def _window(self, end: int) -> Steps:
        """The steps that the rule looks at, oldest first; empty where there are too few to judge."""
        if self.rule.is_measured:
            measured = self._measured[: bisect_left(self._measured, end)]
            return [self._steps[place] for place in measured] if len(measured) >= self.rule.steps else ()
        last = self._steps[max(0, end - self.rule.steps) : end]
        return last if len(last) == self.rule.steps and all(map(self.rule.has_figures, last)) else ()


def ends(values: Sequence[float], parts: int) -> tuple[float, float]:
    """Means of the first and the last one of so many parts of the values."""
    size = max(1, len(values) // parts)
    return fmean(values[:size]), fmean(values[-size:])


def in_errors(difference: float, error: float) -> float:
    """A difference in standard errors; infinite where there is no error, and 0 without any difference."""
    return difference / error if error else math.copysign(math.inf, difference) if difference else 0.0


def moved(steps: Steps, figure: str) -> float:
    """How far a figure moved from the first third of the steps to the last, in standard errors of the difference.

    The errors come from the scatter within the thirds.
    """
    values = [step[figure] for step in steps]
    size = len(values) // 3
    first, last = values[:size], values[-size:]
    return in_errors(fmean(last) - fmean(first), math.sqrt((stdev(first) ** 2 + stdev(last) ** 2) / size))


class RecentSteps:
    """The newest steps of a run, and the evaluations on its first held-out file.

    Args:
        file: That file's name; empty where it has none.
    """

    def __init__(self, file: str = "", kept: int | None = KEPT_STEPS) -> None:
        self._file = file
        self.steps: deque[dict[str, float]] = deque(maxlen=kept)
        self._held_out: dict[int, dict[str, float]] = {}

    def add(self, number: int, figures: Mapping[str, float]) -> None:
        """Take the next step."""
        self.steps.append({**figures, NUMBER: float(number)})

    def add_evaluation(self, file: str, version: int, figures: Mapping[str, float]) -> None:
        """Take an evaluation of the version that a step of this number trained; 0 is the model before training."""
        for kind in ("sampled", "greedy") if file == self._file else ():
            if f"{kind}_mean" in figures and f"{kind}_stderr" in figures:
                self._held_out[version] = {
                    HELD_OUT: figures[f"{kind}_mean"],
                    HELD_OUT_ERROR: figures[f"{kind}_stderr"],
                }
                return

    def judged(self) -> list[Mapping[str, float]]:
        """The steps with their evaluations, for rules: oldest first, and before them an evaluation of the model."""
        first = [{NUMBER: 0.0, **self._held_out[0]}] if 0 in self._held_out and self.steps else []
        return [*first, *({**step, **self._held_out.get(int(step[NUMBER]), {})} for step in self.steps)]
