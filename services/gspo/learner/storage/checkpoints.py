"""The checkpoint folders: one gets its name when all of it is on the disk, with the digest of every file."""

import errno
import hashlib
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from gspo.common.host.durable_write import fsync, replace_file
from gspo.learner.storage.durable_files import temporary
from gspo.runlog.checkpoint_files import MANIFEST, checkpoint_folders, is_whole

_DAMAGED = ".damaged"


class _FileEntry(BaseModel):
    model_config = ConfigDict(extra="forbid")
    bytes: int
    sha256: str

    def __str__(self) -> str:
        return f"{self.bytes} bytes with SHA-256 {self.sha256[:12]}..."


class _Manifest(BaseModel):
    """Every file of a checkpoint with its size and digest."""

    model_config = ConfigDict(extra="forbid")
    step: int
    files: dict[str, _FileEntry]


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, step: int) -> Path:
        """The folder of the checkpoint after a step, also before it exists."""
        return self.folder / f"step-{step:06d}"

    def begin(self, step: int) -> Path:
        """An empty folder that every rank may fill; `finish` makes it the checkpoint after `step`.

        Raises:
            FileExistsError: There is a whole checkpoint of that step.
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
        for name in _sizes(unfinished):
            fsync(unfinished / name)
        for folder in filter(Path.is_dir, unfinished.rglob("*")):
            fsync(folder)
        replace_file(unfinished / MANIFEST, _manifest_of(step, unfinished).model_dump_json(indent=2).encode())
        unfinished.rename(self.path(step))
        fsync(self.folder)
        return self.path(step)

    def all_steps(self) -> list[int]:
        """The steps that have a checkpoint folder, damaged or not, in order."""
        return list(checkpoint_folders(self.folder))

    def steps(self) -> list[int]:
        """The steps that have a whole checkpoint, in order."""
        return [step for step in self.all_steps() if self.is_whole(step)]

    def newest(self) -> int | None:
        """The step of the newest whole checkpoint; None before the first."""
        return max(self.steps(), default=None)

    def is_whole(self, step: int) -> bool:
        """Whether the checkpoint after `step` has every file at its full size; reads no file's content."""
        return is_whole(self.path(step))

    def damage(self, step: int) -> str:
        """How the checkpoint has changed since it was written; empty if every byte is the same. Reads every file."""
        try:
            written = _Manifest.model_validate_json((self.path(step) / MANIFEST).read_bytes())
            present = _manifest_of(step, self.path(step))
        except (FileNotFoundError, ValueError):
            return f"{MANIFEST} is missing or unreadable"
        except OSError as error:
            if error.errno != errno.EIO:  # a missing permission, for one, damages nothing
                raise
            return f"a file cannot be read ({error.strerror}): the disk has lost a part of it"
        for name, entry in sorted(written.files.items()):
            if present.files.get(name) != entry:
                return f"{name}: expected {entry}, found {present.files.get(name, 'no such file')}"
        return "" if written == present else f"{MANIFEST} or the files beside it have changed"

    def move_damaged(self, step: int) -> Path:
        """Move a checkpoint out of the way, for its owner to look at; returns its new path."""
        damaged = self.path(step).with_name(self.path(step).name + _DAMAGED)
        if damaged.exists():
            shutil.rmtree(damaged)
        self.path(step).rename(damaged)
        fsync(self.folder)
        return damaged

    def remove(self, step: int) -> None:
        """Remove a checkpoint. It loses its name first: a reader never takes half of one for whole."""
        leaving = temporary(self.path(step))
        self.path(step).rename(leaving)
        shutil.rmtree(leaving)


def _manifest_of(step: int, folder: Path) -> _Manifest:
    """The manifest of a folder as it is; its files are read in parallel."""
    sizes = _sizes(folder)
    with ThreadPoolExecutor() as threads:  # hashlib lets other threads run
        digests = threads.map(lambda name: _sha256(folder / name), sizes)
        files = {
            name: _FileEntry(bytes=size, sha256=digest)
            for (name, size), digest in zip(sizes.items(), digests, strict=True)
        }
    return _Manifest(step=step, files=files)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sizes(folder: Path) -> dict[str, int]:
    files = sorted(file for file in folder.rglob("*") if file.is_file() and file != folder / MANIFEST)
    return {file.relative_to(folder).as_posix(): file.stat().st_size for file in files}
