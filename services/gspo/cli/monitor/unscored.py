"""Answers without a score: their number and the reasons, from the step files of a run.

A reward function that raises on some answers does not stop the run, so its user has to be warned.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from gspo.runlog.run_log import LOG_FOLDER, StepRecord
from gspo.runlog.step_files import column, step_file

FIGURE = "skipped_failed"
_REASONS_SHOWN = 3
# Newest steps with such answers whose files are opened for their reasons.
_STEPS_READ = 10
_DETAIL = re.compile(r"'[^']*'|\"[^\"]*\"|\d+(\.\d+)?")


class Unscored:
    """Counts answers without a score by reason; numbers and quoted texts in a reason do not distinguish it."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._examples: dict[str, str] = {}

    def __len__(self) -> int:
        return self._counts.total()

    def add(self, reasons: Iterable[str | None]) -> list[str]:
        """Count reasons, None for an answer with a score; returns an example of each new reason."""
        new = []
        for reason in reasons:
            if reason is None:
                continue
            kind = _DETAIL.sub("...", reason)
            if kind not in self._examples:
                self._examples[kind] = reason
                new.append(reason)
            self._counts[kind] += 1
        return new

    def most_common(self) -> list[tuple[str, int]]:
        """An example of each reason with its count, the most frequent first."""
        return [(self._examples[kind], count) for kind, count in self._counts.most_common()]

    def in_words(self) -> str:
        """'3 times: r: raised ValueError: ... (r.py line 5); and 2 other reasons'."""
        reasons = self.most_common()
        shown = [f"{count} times: {reason}" if count > 1 else reason for reason, count in reasons[:_REASONS_SHOWN]]
        more = len(reasons) - len(shown)
        return "; ".join([*shown, f"and {more} other reasons"] if more > 0 else shown)


def reasons_of_step(run_dir: Path, step: int) -> list[str | None]:
    """For each answer of a logged step, why it has no score; empty if the file was removed."""
    try:
        return column(step_file(run_dir / LOG_FOLDER, step), "failure")
    except (OSError, ValueError):
        return []


def unscored_so_far(run_dir: Path, steps: Sequence[StepRecord]) -> str:
    """One sentence on the answers without a score in `steps`; empty if every answer has one."""
    with_some = {record.step: int(record.figures[FIGURE]) for record in steps if record.figures.get(FIGURE)}
    if not with_some:
        return ""
    unscored = Unscored()
    for step in sorted(with_some)[-_STEPS_READ:]:
        unscored.add(reasons_of_step(run_dir, step))
    where = f"{len(with_some)} of {len(steps)} steps, the last of them step {max(with_some)}"
    why = f". {unscored.in_words()}" if len(unscored) else ""
    return f"{sum(with_some.values())} answers without a score, left out of training, in {where}{why}"
