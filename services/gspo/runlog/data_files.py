"""The contents of a run's data files: `data_files.jsonl` in the run directory, a line for each start with others."""

import hashlib
from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel, ConfigDict

DATA_FILES = "data_files.jsonl"
# Key of the configuration -> path -> SHA-256 of the content; empty where there was none.
Digests = Mapping[str, Mapping[str, str]]


class DataFilesRecord(BaseModel):
    """A start of the run.

    Attributes:
        step: The last one that was logged before.
        digests: Digest of every data file.
        changes: A sentence on each file whose content differs from the record before.
    """

    model_config = ConfigDict(frozen=True)

    unix_s: float
    step: int
    digests: Digests
    changes: tuple[str, ...] = ()


def digest_of(path: Path) -> str:
    """SHA-256 of a file, or of a folder's files with their names; empty where there is none."""
    if path.is_file():
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    whole = hashlib.sha256()
    files = sorted(inner for inner in path.rglob("*") if inner.is_file())
    for inner in files:
        whole.update(f"{inner.relative_to(path)}\0{digest_of(inner)}\n".encode(errors="surrogateescape"))
    return whole.hexdigest() if files else ""


def differences(before: Digests, now: Digests) -> dict[str, str]:
    """Key -> a sentence, of every file that is in both under one name and has another content."""
    return {
        key: f"{path} has another content than before (SHA-256 {old[:12]}, now {files[path][:12] or 'missing'})"
        for key, files in now.items()
        for path, old in before.get(key, {}).items()
        if path in files and files[path] != old
    }
