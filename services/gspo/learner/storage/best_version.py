"""The version that measured best, as a Hugging Face folder: `best/` in the run directory.

A version that will be measured is put aside in `candidates/` as soon as it is trained, for it is overwritten before its
figures are known; then it becomes `best/` or goes. Which one is best is told by log/evaluations.jsonl alone: a kill at
any moment is mended at the next start.
"""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import structlog

from gspo.learner.storage.durable_files import fsync, replace_whole, temporary

BEST, CANDIDATES, FACTS = "best", "candidates", "best.json"
log = structlog.get_logger()


class BestVersion:
    """Keeps the best of the versions that were measured. Its calls may come from several threads.

    Args:
        figure: Name of the figure that is compared.
        scores: Version -> its score, of what was measured before. A version's first score is the one that counts.
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
        return max(self._scores, key=lambda version: (self._scores[version], -version), default=None)

    def save_candidate(self, version: int, write: Callable[[Path], None]) -> None:
        """Keep the weights of a version until it is measured; `write` makes a model folder, whole or not at all."""
        with self._lock:
            known = version in self._scores
            if self._path(version).exists() or (known and (version != self.version or version == self._kept())):
                return
            write(self._path(version))
            if known:
                self._settle(version)

    def measured(self, version: int, score: float | None) -> None:
        """A version was measured, and its score is on the disk; None where it has none. The best moves to `best/`."""
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
        replace_whole(self._path(version) / FACTS, (json.dumps(facts, indent=2) + "\n").encode())
        before = temporary(self._folder)
        shutil.rmtree(before, ignore_errors=True)
        if self._folder.exists():
            self._folder.rename(before)
        self._path(version).rename(self._folder)
        fsync(self._folder.parent)
        shutil.rmtree(before, ignore_errors=True)
        log.info("best_version", **facts)

    def _tidy(self) -> None:
        """Finish what a kill left: the best of the scores is in `best/`, and no other measured version is kept."""
        for unfinished in self._candidates.glob(".step-*"):
            shutil.rmtree(unfinished)
        for path in list(self._candidates.glob("step-*")):
            if (version := int(path.name.removeprefix("step-"))) in self._scores:
                self._settle(version)
        left = temporary(self._folder)
        if left.exists() and not self._folder.exists():
            left.rename(self._folder)
        shutil.rmtree(left, ignore_errors=True)

    def _path(self, version: int) -> Path:
        # Step s makes version s.
        return self._candidates / f"step-{version:06d}"

    def _kept(self) -> int | None:
        """The version in `best/`; None while there is none."""
        try:
            return int(json.loads((self._folder / FACTS).read_text())["version"])
        except FileNotFoundError:
            return None
