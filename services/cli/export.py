"""`gspo export`: copies the newest exported policy out of a run directory.

It converts nothing: the learner writes `export/` in the Hugging Face format. Neighbour: rundir.py.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from services.common.errors import InputError

_EXPORT = "export"


def export(run_dir: Path, out: Path) -> Path:
    """Copy RUN_DIR/export to `out`, which appears whole or not at all.

    Raises:
        InputError: There is no export, or `out` is taken.
    """
    source = run_dir / _EXPORT
    if not (source / "config.json").is_file():
        raise InputError(
            str(run_dir),
            f"has no {_EXPORT}/config.json: no policy was exported yet",
            "A run exports when it ends or is stopped; give a run directory that has come so far",
        )
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(str(out), "exists and is not an empty folder", "Name a new one; nothing is overwritten")
    out.parent.mkdir(parents=True, exist_ok=True)
    scratch = out.parent / f".{out.name}.tmp"
    shutil.rmtree(scratch, ignore_errors=True)
    shutil.copytree(source, scratch)
    scratch.replace(out)
    return out
