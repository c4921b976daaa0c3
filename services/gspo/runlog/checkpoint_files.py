"""The checkpoints of a run directory as a reader sees them: whole ones, by the sizes in their manifests."""

import json
import re
from pathlib import Path

CHECKPOINTS, MANIFEST = "checkpoints", "manifest.json"
_NAME = re.compile(r"step-(\d{6,})")


def whole_checkpoints(run_dir: Path) -> dict[int, Path]:
    """The folders of the whole checkpoints by step, in order; reads no file's content but the manifests'."""
    folder = run_dir / CHECKPOINTS
    named = checkpoint_folders(folder) if folder.is_dir() else {}
    return {step: path for step, path in named.items() if is_whole(path)}


def checkpoint_folders(folder: Path) -> dict[int, Path]:
    """The checkpoints below a folder by step, in order, whole or not."""
    named = {int(match[1]): path for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))}
    return dict(sorted(named.items()))


def is_whole(checkpoint: Path) -> bool:
    """Whether every file of the manifest is there at its full size; a learner may remove the folder meanwhile."""
    try:
        files = json.loads((checkpoint / MANIFEST).read_text())["files"]
        return all((checkpoint / name).stat().st_size == entry["bytes"] for name, entry in files.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
