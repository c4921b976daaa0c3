"""`gspo export`: copies the newest exported policy, or the best version, out of a run directory.

The learner wrote `export/` and `best/` in the Hugging Face format, so nothing is converted.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from gspo.common.errors import InputError

_EXPORT, _BEST, _ADAPTER = "export", "best", "adapter"


def export(run_dir: Path, out: Path, *, best: bool = False, adapter: bool = False) -> Path:
    """Copy RUN_DIR/export, or RUN_DIR/best, to `out`, which appears whole or not at all.

    With `adapter` only the adapters of LoRA, in peft's format.

    Raises:
        InputError: There is no such policy, or `out` is taken.
    """
    if not run_dir.is_dir():
        raise InputError(str(run_dir), "is not a folder here", "Give a run directory")
    source = run_dir / (_BEST if best else _EXPORT)
    if not (source / "config.json").is_file() and best:
        raise InputError(
            str(run_dir),
            f"has no {_BEST}/config.json: no version was kept as the best",
            "Set evaluation.keep_best before the run, for example sampled_mean. "
            "Without --best you get the newest policy",
        )
    if not (source / "config.json").is_file():
        raise InputError(
            str(run_dir),
            f"has no {_EXPORT}/config.json: no policy was exported yet",
            "A run exports when it ends or is stopped; give a run directory after that",
        )
    if adapter:
        source = source / _ADAPTER
        if not source.is_dir():
            raise InputError(
                str(source),
                "is missing: this run trained all weights, and has no adapters",
                "Leave --adapter out; set learner.lora.rank before a run to train adapters",
            )
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(str(out), "exists and is not an empty folder", "Name a new one; nothing is overwritten")
    out.parent.mkdir(parents=True, exist_ok=True)
    scratch = out.parent / f".{out.name}.tmp"
    shutil.rmtree(scratch, ignore_errors=True)
    shutil.copytree(source, scratch)
    scratch.replace(out)
    return out
