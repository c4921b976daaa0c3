"""Atomic writes: a file has its old content or its new one, and the new one is on the disk. And the mode of a file."""

import os
import shutil
import uuid
from pathlib import Path

# A file whose name ends so is unfinished: no reader opens it.
TEMPORARY = ".tmp"


def fsync(path: Path) -> None:
    """Force a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def apply_umask(path: Path) -> None:
    """Give a file the mode of any new file beside it: safetensors lets the owner alone read its files."""
    probe = path.with_name(f"{path.name}.{uuid.uuid4().hex}{TEMPORARY}")
    probe.touch()
    try:
        shutil.copymode(probe, path)
    finally:
        probe.unlink()


def replace_file(path: Path, content: bytes) -> None:
    """Make `content` the content of a file, whose folder is created where it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # A name of its own: replicas that share the folder may write the file at once.
    unfinished = path.with_name(f"{path.name}.{uuid.uuid4().hex}{TEMPORARY}")
    try:
        unfinished.write_bytes(content)
        fsync(unfinished)
        unfinished.replace(path)
    except BaseException:
        # No later try knows the name, and a caller that finds the disk full may try for hours.
        unfinished.unlink(missing_ok=True)
        raise
    fsync(path.parent)
