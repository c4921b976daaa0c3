"""Keeps the version with the best evaluation: `best/` in the run directory, and `candidates/` until it is known."""

import json
import shutil
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import structlog

from gspo.common.host.durable_write import fsync, replace_file
from gspo.learner.storage.candidates import CANDIDATES, candidate_folder
from gspo.learner.storage.durable_files import temporary
from gspo.runlog.run_log import best_of

BEST, FACTS = "best", "best.json"
log = structlog.get_logger()


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
        self._run_dir, self._folder, self._figure = run_dir, run_dir / BEST, figure
        self._scores = dict(scores)
        # A small file may be measured before a large model is written.
        self._lock = threading.Lock()
        self._tidy()

    @property
    def version(self) -> int | None:
        """The best version so far, the earliest of several; None before the first score."""
        best = best_of(self._scores)
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
        candidates = self._run_dir / CANDIDATES
        for unfinished in candidates.glob(".step-*"):
            shutil.rmtree(unfinished)
        for path in list(candidates.glob("step-*")):
            if (version := int(path.name.removeprefix("step-"))) in self._scores:
                self._settle(version)
        before = temporary(self._folder)
        if before.exists() and not self._folder.exists():
            before.rename(self._folder)
        shutil.rmtree(before, ignore_errors=True)

    def _path(self, version: int) -> Path:
        return candidate_folder(self._run_dir, version)

    def _kept(self) -> int | None:
        """The version in `best/`; None while there is none."""
        try:
            return int(json.loads((self._folder / FACTS).read_text())["version"])
        except FileNotFoundError:
            return None
