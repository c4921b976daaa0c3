"""The answers without a score, by reason, from the step files: a reward function that raises does not stop a run."""

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from gspo.runlog.run_log import LOG_FOLDER, StepRecord
from gspo.runlog.step_files import column, step_file

# The figure of a step that counts them.
UNSCORED = "skipped_failed"
_REASONS_SHOWN = 3
# Newest steps with such answers whose files are opened for the reasons.
_STEPS_READ = 10
_DETAIL = re.compile(r"'[^']*'|\"[^\"]*\"|\d+(\.\d+)?")


class Unscored:
    """Counts answers without a score by reason; numbers and quoted texts in a reason do not distinguish it."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._examples: dict[str, str] = {}

    def add_step(self, run_dir: Path, step: int) -> bool:
        """Count the reasons of a logged step, if its file is there; whether one of them is new."""
        try:
            reasons = column(step_file(run_dir / LOG_FOLDER, step), "failure")
        except (OSError, ValueError):
            return False
        num_known = len(self._examples)
        for reason in filter(None, reasons):
            kind = _DETAIL.sub("...", reason)
            self._examples.setdefault(kind, reason)
            self.counts[kind] += 1
        return len(self._examples) > num_known

    def in_words(self) -> str:
        """'3 times: r: raised ValueError: ... (r.py line 5); and 2 other reasons'."""
        shown = [
            f"{count} times: {self._examples[kind]}" if count > 1 else self._examples[kind]
            for kind, count in self.counts.most_common(_REASONS_SHOWN)
        ]
        more = len(self.counts) - len(shown)
        return "; ".join([*shown, f"and {more} other reasons"] if more > 0 else shown)


def unscored_so_far(run_dir: Path, steps: Sequence[StepRecord]) -> str:
    """One sentence on the answers without a score in `steps`; empty if every answer has one."""
    with_some = {record.step: int(record.figures[UNSCORED]) for record in steps if record.figures.get(UNSCORED)}
    if not with_some:
        return ""
    unscored = Unscored()
    for step in sorted(with_some)[-_STEPS_READ:]:
        unscored.add_step(run_dir, step)
    where = f"{len(with_some)} of {len(steps)} steps, the last of them step {max(with_some)}"
    why = f". {unscored.in_words()}" if unscored.counts else ""
    return f"{sum(with_some.values())} answers without a score, left out of training, in {where}{why}"
