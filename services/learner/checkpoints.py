"""The checkpoint folders: one appears under its name when all of it is on the disk, and a damaged one is passed over.

What is in them is the trainer's. Neighbours: rundir.py owns this, durable.py writes.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

from services.learner.durable import fsync, replace_whole, temporary

# Lists every file with its size: a folder that was copied or removed in part does not match it.
MANIFEST = "manifest.json"
_NAME = re.compile(r"step-(\d{6,})")


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, step: int) -> Path:
        """Where the checkpoint after a step is, or will be."""
        return self.folder / f"step-{step:06d}"

    def begin(self, step: int) -> Path:
        """An empty folder that every rank may fill; `finish` makes it the checkpoint after `step`.

        FileExistsError: there is a whole checkpoint of that step.
        """
        if self.is_whole(step):
            raise FileExistsError(f"{self.path(step)} is a whole checkpoint")
        unfinished = temporary(self.path(step))
        for leftover in (unfinished, self.path(step)):
            if leftover.exists():
                shutil.rmtree(leftover)
        unfinished.mkdir(parents=True)
        return unfinished

    def finish(self, step: int) -> Path:
        """Give the filled folder its name; all of it is on the disk when this returns. Called by one rank."""
        unfinished = temporary(self.path(step))
        sizes = _sizes(unfinished)
        for name in sizes:
            fsync(unfinished / name)
        for folder in filter(Path.is_dir, unfinished.rglob("*")):
            fsync(folder)
        replace_whole(unfinished / MANIFEST, json.dumps({"step": step, "files": sizes}, indent=2).encode())
        unfinished.rename(self.path(step))
        fsync(self.folder)
        return self.path(step)

    def steps(self) -> list[int]:
        """The steps that have a whole checkpoint, in order."""
        found = [int(match[1]) for folder in self.folder.iterdir() if (match := _NAME.fullmatch(folder.name))]
        return sorted(step for step in found if self.is_whole(step))

    def newest(self) -> int | None:
        """The step of the newest whole checkpoint; None while there is none."""
        return max(self.steps(), default=None)

    def is_whole(self, step: int) -> bool:
        """Whether the checkpoint after `step` is there with every file at its full size."""
        try:
            manifest = json.loads((self.path(step) / MANIFEST).read_bytes())
        except (FileNotFoundError, json.JSONDecodeError):
            return False
        return bool(manifest["files"] == _sizes(self.path(step)))

    def remove(self, step: int) -> None:
        """Remove a checkpoint. Its name goes first: half of one is never taken for whole."""
        leaving = temporary(self.path(step))
        self.path(step).rename(leaving)
        shutil.rmtree(leaving)


def _sizes(folder: Path) -> dict[str, int]:
    files = sorted(file for file in folder.rglob("*") if file.is_file() and file != folder / MANIFEST)
    return {file.relative_to(folder).as_posix(): file.stat().st_size for file in files}
