"""Rules over the figures of a run's last steps, and their findings.

The rules are data: learning_rules.py and clip_rules.py have them. Each is a pure function of the figures that it names
and silent without them, so a terminal, a service and a report of an old log find the same.
"""

from __future__ import annotations

import math
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


def _always(_config: Config) -> bool:
    return True


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
    applies: Callable[[Config], bool] = _always
    is_measured: bool = False
    rollouts: str = "/rollouts?step={step}"

    def looked_at(self, steps: Steps, end: int) -> Steps:
        """The steps before index `end` that it looks at, oldest first; empty where there are too few to judge."""
        if self.is_measured:
            measured = [step for step in steps[:end] if self._is_there(step)]
            return measured if len(measured) >= self.steps else ()
        last = steps[max(0, end - self.steps) : end]
        return last if len(last) == self.steps and all(self._is_there(step) for step in last) else ()

    def _is_there(self, step: Mapping[str, float]) -> bool:
        return all(name in step for name in self.figures)


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
        """All of it in sentences."""
        causes = f" Likely: {'; or '.join(self.causes)}." if self.causes else ""
        tries = f" Try {', or '.join(self.tries)}." if self.tries else ""
        since = f", since step {self.since}" if self.since else ""
        rollouts = f" Rollouts: {self.rollouts}" if self.rollouts else ""
        return f"{self.rule}{since}: {self.seen}.{causes}{tries}{rollouts}"


def apply_rules(rules: Sequence[Rule], steps: Steps, config: Config) -> dict[str, Finding]:
    """The findings at the newest step by their rules; the steps are oldest first."""
    seen = (_finding(rule, steps, len(steps), config) for rule in rules if rule.applies(config))
    return {finding.rule: finding for finding in seen if finding}


def findings_of_run(rules: Sequence[Rule], steps: Steps, config: Config) -> list[tuple[Finding, list[int]]]:
    """Each finding that a run had, as of the last step that had it, and the numbers of all steps that had it."""
    findings = []
    for rule in rules:
        places = [end for end in range(1, len(steps) + 1) if rule.applies(config) and _holds(rule, steps, end, config)]
        if places and (finding := _finding(rule, steps, places[-1], config)):
            findings.append((finding, [_number(steps, end) for end in places]))
    return findings


def _finding(rule: Rule, steps: Steps, end: int, config: Config) -> Finding | None:
    """The finding of a rule at the step before index `end`; None if it does not hold."""
    if not _holds(rule, steps, end, config):
        return None
    words, first = rule.says(rule.looked_at(steps, end), config), end
    while first > 1 and _holds(rule, steps, first - 1, config):
        first -= 1
    rollouts = rule.rollouts.format(step=_number(steps, end))
    return Finding(rule.name, words.seen, words.causes, words.tries, _number(steps, first), rollouts)


def _holds(rule: Rule, steps: Steps, end: int, config: Config) -> bool:
    last = rule.looked_at(steps, end)
    return bool(last) and rule.holds(last, config)


def _number(steps: Steps, end: int) -> int:
    return int(steps[end - 1].get(NUMBER, 0))


def ends(values: Sequence[float], parts: int) -> tuple[float, float]:
    """Means of the first and the last one of so many parts of the values."""
    size = max(1, len(values) // parts)
    return fmean(values[:size]), fmean(values[-size:])


def moved(steps: Steps, figure: str) -> float:
    """How far a figure moved from the first third of the steps to the last, in standard errors of the difference.

    The errors come from the scatter within the thirds; a figure that moves without any scatter has moved infinitely.
    """
    values = [step[figure] for step in steps]
    size = len(values) // 3
    first, last = values[:size], values[-size:]
    error = math.sqrt((stdev(first) ** 2 + stdev(last) ** 2) / size)
    difference = fmean(last) - fmean(first)
    if error == 0:
        return math.copysign(math.inf, difference) if difference else 0.0
    return difference / error


def last_values(steps: Steps, figure: str, num: int) -> list[float]:
    """The last `num` values of a figure; empty where a step lacks it."""
    values = [step[figure] for step in steps[-num:] if figure in step]
    return values if len(values) == num else []


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
