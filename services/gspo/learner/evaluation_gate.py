"""Records evaluations, delays newer weights until those of a version are over, and keeps the best version.

consumes: EvaluationDone. waits for: the evaluations of a version, unblocked by the coordinator, given up at a deadline.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import structlog

from gspo.common.config.schema import Config
from gspo.common.host.durable_write import fsync, replace_file
from gspo.common.streams.keys import evaluation_label
from gspo.common.tasks import wait_until_set
from gspo.common.telemetry.activity import Activity
from gspo.learner.storage.durable_files import temporary
from gspo.learner.storage.run_directory import RunDir
from gspo.runlog.run_log import best_of
from gspo_proto.rollout_pb2 import EvaluationDone

BEST, CANDIDATES, FACTS = "best", "candidates", "best.json"
# A stop has no signal of its own.
_POLL_S = 0.25
log = structlog.get_logger()


class EvaluationGate:
    """The gate between a version's evaluations and the next version.

    Attributes:
        recorded_unix_s: When the last evaluation was recorded; 0 before the first.

    Args:
        activity: Shows the evaluations that it waits for.
    """

    def __init__(self, config: Config, run_dir: RunDir, activity: Activity) -> None:
        self._config, self._run_dir, self._activity = config, run_dir, activity
        self._figure = config.best_figure
        self._best = BestVersion(run_dir.path, self._figure.figure, run_dir.scores) if self._figure else None
        self._recorded = asyncio.Event()
        self.recorded_unix_s = 0.0

    @property
    def max_wait_s(self) -> float:
        """Longest that the evaluations of one version may take."""
        return self._config.evaluation.timeout_s * max(1, len(self._config.evaluation.files))

    async def record(self, done: EvaluationDone) -> None:
        """Record an evaluation, and keep its version if it is the best."""
        await asyncio.to_thread(self._run_dir.append_evaluation, done)
        if self._best is not None and self._figure is not None and done.file == self._figure.file:
            score = done.score if done.HasField("score") else None
            await asyncio.to_thread(self._best.record_score, done.version, score)
        self.recorded_unix_s = time.time()
        self._recorded.set()

    def save_candidate(self, version: int, write: Callable[[Path], None], *, last: bool = False) -> None:
        """Save a version that will be measured: that of the start, one between two steps, or the `last`."""
        if self._best is not None and (last or version == 0 or self._config.is_measured(version)):
            self._best.save_candidate(version, write)

    async def wait(self, version: int, stopped: Callable[[], bool]) -> None:
        """Wait until all evaluations of a version between two steps are recorded."""
        began = time.monotonic()
        while (missing := self._missing(version)) and not stopped():
            if time.monotonic() - began > self.max_wait_s + self._config.run.start_timeout_s:
                log.warning("evaluation_missing", labels=missing, reason="newer weights are published without it")
                return
            self._activity.set("waiting", "evaluation", ", ".join(missing))
            self._recorded.clear()
            await wait_until_set(self._recorded, _POLL_S)

    def _missing(self, version: int) -> list[str]:
        if not self._config.evaluation.hold_weights or not self._config.is_measured(version):
            return []
        labels = [evaluation_label(version, file) for file in self._config.evaluation.files]
        return [label for label in labels if label not in self._run_dir.evaluations]


class BestVersion:
    """Keeps the version with the best evaluation as a Hugging Face folder: `best/` in the run directory.

    The weights of a version are overwritten before its evaluation is over. So a version that will be measured is saved
    in `candidates/` as soon as it is trained; afterwards it becomes `best/` or is removed. The scores in
    log/evaluations.jsonl alone decide, and the next start completes a move that a kill interrupted. Calls may come from
    several threads.

    Args:
        figure: Name of the figure that is compared.
        scores: Version -> its score, of the versions measured so far. The first score of a version counts.
    """

    def __init__(self, run_dir: Path, figure: str, scores: Mapping[int, float]) -> None:
        self._folder, self._candidates, self._figure = run_dir / BEST, run_dir / CANDIDATES, figure
        self._scores = dict(scores)
        # A small file may be measured before a large model is written.
        self._lock = threading.Lock()
        self._tidy()

    @property
    def version(self) -> int | None:
        """The best version so far, the earliest of several; None before the first score."""
        best = best_of(self._scores.items())
        return None if best is None else best[0]

    def save_candidate(self, version: int, write: Callable[[Path], None]) -> None:
        """Keep the weights of a version until it is measured; `write` makes a model folder, whole or not at all."""
        with self._lock:
            measured = version in self._scores
            if self._path(version).exists() or (measured and (version != self.version or version == self._kept())):
                return
            write(self._path(version))
            if measured:
                self._settle(version)

    def record_score(self, version: int, score: float | None) -> None:
        """A version was measured, and its score is on the disk; None if it has none. The best moves to `best/`."""
        with self._lock:
            if score is not None:
                self._scores.setdefault(version, score)
            self._settle(version)

    def _settle(self, version: int) -> None:
        """Move a measured version to `best/`, or remove it."""
        if version != self.version or not self._path(version).exists():
            shutil.rmtree(self._path(version), ignore_errors=True)
            return
        facts = {"version": version, "step": version, "figure": self._figure, "score": self._scores[version]}
        replace_file(self._path(version) / FACTS, (json.dumps(facts, indent=2) + "\n").encode())
        before = temporary(self._folder)
        shutil.rmtree(before, ignore_errors=True)
        if self._folder.exists():
            self._folder.rename(before)
        self._path(version).rename(self._folder)
        fsync(self._folder.parent)
        shutil.rmtree(before, ignore_errors=True)
        log.info("best_version", **facts)

    def _tidy(self) -> None:
        """Complete an interrupted move: the best version is in `best/`, and no other measured version is kept."""
        for unfinished in self._candidates.glob(".step-*"):
            shutil.rmtree(unfinished)
        for path in list(self._candidates.glob("step-*")):
            if (version := int(path.name.removeprefix("step-"))) in self._scores:
                self._settle(version)
        before = temporary(self._folder)
        if before.exists() and not self._folder.exists():
            before.rename(self._folder)
        shutil.rmtree(before, ignore_errors=True)

    def _path(self, version: int) -> Path:
        # Step s makes version s.
        return self._candidates / f"step-{version:06d}"

    def _kept(self) -> int | None:
        """The version in `best/`; None while there is none."""
        try:
            return int(json.loads((self._folder / FACTS).read_text())["version"])
        except FileNotFoundError:
            return None
