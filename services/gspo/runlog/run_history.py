"""The history of a run: figures, evaluations, versions, settlements, counts.

It reads a run in any state: killed in the middle, without a step, with missing files. Unreadable files are listed in
`problems`.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from gspo.common.config.loading import CONFIG_NAME, ENVIRONMENT_NAME, read_config
from gspo.common.config.schema import Config
from gspo.common.errors import InputError
from gspo.runlog.run_log import EvaluationRecord, RunLog, SettledRecord, best_evaluated
from gspo.runlog.sentences.held_out import BestChoice, best_choice
from gspo.runlog.step_files import read_columns

TRAINED = "trained"
SETTLEMENTS = (TRAINED, "filtered", "stale", "failed", "unused")
SKIPS = ("failed", "truncated", "stale")


@dataclass
class Groups:
    """How the groups ended, by the step files and settled.jsonl.

    Group ids count from 0 without a gap, so the highest one is a lower bound of the issued groups. Only Redis knows
    later groups that have not ended.

    Attributes:
        counts: All five settlements.
        reasons: Numbers of those that were not trained, by settlement.
        twice: Groups that ended more than once; in a sound log there are none.
        dropped_lengths: Sampled tokens of each rollout of the groups that were too old.
    """

    counts: Counter[str] = field(default_factory=Counter)
    reasons: defaultdict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    twice: list[int] = field(default_factory=list)
    dropped_lengths: list[int] = field(default_factory=list)
    _ended: dict[int, str] = field(default_factory=dict)

    def add(self, group: int, settlement: str, reason: str = "") -> None:
        if group in self._ended:
            self.twice.append(group)
        self._ended[group] = settlement
        self.counts[settlement] += 1
        if reason:
            self.reasons[settlement][reason] += 1

    @property
    def issued(self) -> int:
        """Groups issued, as far as the log knows."""
        return max(self._ended, default=-1) + 1

    @property
    def open(self) -> int:
        """Groups issued that have not ended, as far as the log knows."""
        return self.issued - len(self._ended)


class RunHistory:
    """One run, from its directory. Missing and broken files are `problems`, and raise nothing.

    Attributes:
        problems: A sentence on each unreadable file, for the reader of the report.
        metrics: Figures of the trained steps, in order.
        evaluations: Figures of every held-out file, by policy version.
        versions: Records of the policy versions, in order.
        left_out: Steps that are left out of training, in order.
        step_files: Logged steps that are still on the disk, in order.
        rollouts: By step, how many were trained and skipped.
        config: None where it cannot be read.
        ledger: The token ledger; None where the log has none.
        pushes: Those of each policy version, in order.
        data_files: The starts that saw other contents of the data files than the one before.
        shortages: The steps that ran out of memory, each time, in order.
    """

    def __init__(self, run_dir: Path) -> None:
        log = RunLog(run_dir)
        self.run_dir, self.problems = run_dir, list[str]()
        self.metrics, self.evaluations, self.versions = log.steps(), log.evaluations(), log.versions()
        self.left_out = log.left_out()
        self.step_files, self.rollouts, self.groups = log.step_files(), dict[int, Counter[str]](), Groups()
        self._count(log.settled())
        self.ledger, self.pushes, self.shortages = log.ledger(), log.pushes(), log.shortages()
        self.data_files = log.data_files()
        self.config: Config | None = None
        try:
            self.config = read_config(run_dir / CONFIG_NAME)
        except InputError as error:
            self.problems.append(str(error))
        self.environment: dict[str, Any] = {}
        try:
            self.environment = dict(json.loads((run_dir / ENVIRONMENT_NAME).read_text()))
        except (OSError, ValueError) as error:
            self.problems.append(f"{ENVIRONMENT_NAME} cannot be read: {error}")
        self.problems += log.problems

    def _count(self, settled: Iterable[SettledRecord]) -> None:
        # A trained group has a line only where its step file was removed, or was about to be when a kill came.
        with_line = set()
        for record in settled:
            if record.settlement == TRAINED:
                with_line.add(record.group)
            self.groups.add(record.group, record.settlement, record.reason)
            self.groups.dropped_lengths += record.response_tokens
        for step, path in self.step_files.items():
            try:
                table = read_columns(path, ["group", "skipped"])
            except (OSError, ValueError) as error:
                self.problems.append(f"{path.name} cannot be read, and its groups are not counted: {error}")
                continue
            self.rollouts[step] = Counter(reason or TRAINED for reason in table.column("skipped").to_pylist())
            for group in sorted(set(table.column("group").to_pylist()) - with_line):
                self.groups.add(group, TRAINED)

    @property
    def version(self) -> int:
        """The newest policy version; 0, the original model, without any record."""
        return self.versions[-1].version if self.versions else self.step

    @property
    def step(self) -> int:
        """The last step that was trained."""
        steps = [record.step for record in self.versions[-1:]] + [record.step for record in self.metrics[-1:]]
        return max(steps, default=0)

    @cached_property
    def by_file(self) -> dict[str, list[EvaluationRecord]]:
        """The evaluations of each held-out file, in the user's order; the first is the headline's."""
        configured = self.config.evaluation.files if self.config else ()
        by_file: dict[str, list[EvaluationRecord]] = {name: [] for name in configured}
        for record in self.evaluations:
            by_file.setdefault(record.file, []).append(record)
        return {name: records for name, records in by_file.items() if records}

    @property
    def headline_name(self) -> str:
        """The name of the first held-out file: the configuration's, or that of the file; empty if neither is known."""
        files = self.config.evaluation.files if self.config else {}
        return next((name or path.name for name, path in files.items()), "")

    @property
    def headline(self) -> list[EvaluationRecord]:
        """The evaluations of the first held-out file."""
        return next(iter(self.by_file.values()), [])

    @cached_property
    def best(self) -> tuple[int, float] | None:
        """(version, score) of the best version by evaluation.keep_best; None where no version has a score."""
        compared = self.config.best_figure if self.config else None
        return best_evaluated(self.evaluations, compared.weights if compared else None)

    def held_out_prompts(self, record: EvaluationRecord) -> str:
        """A name for the prompts of an evaluation: equal if two are of the same ones."""
        key = self.config.evaluation.key_of(record.file) if self.config else ""
        digests = self.data_files[-1].digests.get(key, {}) if self.data_files else {}
        file = ",".join(digests.values()) or f"{self.run_dir}/{record.file}"
        return f"{file}:{record.figures.get('num_prompts', 0.0):.0f}"

    @cached_property
    def choice(self) -> BestChoice | None:
        """The best version by evaluation.keep_best, with its error; None where no version has a score."""
        return best_choice(self.evaluations, self.config) if self.config else None

    @cached_property
    def figures(self) -> list[dict[str, float]]:
        """The figures of every step, without values that were not finite."""
        return [record.figures for record in self.metrics]

    def series(self, name: str) -> dict[int, float | None]:
        """A figure by step; None where a step lacks it."""
        return {record.step: record.figures.get(name) for record in self.metrics}
