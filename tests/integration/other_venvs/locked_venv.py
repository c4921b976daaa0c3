"""Virtual environments for packages that want other versions than gspo's, with the locked ones of an example."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

_INSTALL_S = 300


def locked_venv(folder: Path, lock: Path) -> Path:
    """The program `python` of a new environment with exactly the packages of a lock file, made by uv as READMEs say."""
    uv = Path(sys.executable).with_name("uv")
    calls: list[list[str | Path]] = [
        ["venv", "-q", "--python", sys.executable, folder],
        ["pip", "install", "-q", "--python", folder / "bin/python", "--no-deps", "-r", lock],
        ["pip", "check", "-q", "--python", folder / "bin/python"],
    ]
    for words in calls:
        done = subprocess.run([uv, *words], capture_output=True, text=True, check=False, timeout=_INSTALL_S)
        assert done.returncode == 0, f"uv {words[0]} {words[1]}: {done.stderr[-3000:]}"
    return folder / "bin/python"
