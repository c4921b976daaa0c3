"""`make setup` again, with other locked versions: packages that a user installed into the environment stay.

What it is not: an installation. Every program that deploy/setup.sh starts is a stand-in that writes down its words.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[3]
STAND_IN = '#!/bin/sh\necho "$(basename "$0") $*" >> "$WORDS"\n'
TOOLS = ("python3", "c++", "bwrap", "ip", "promtool")


def test_setup_installs_and_removes_nothing(tmp_path: Path) -> None:
    venv, tools, words = tmp_path / "venv", tmp_path / "tools", tmp_path / "words"
    package = venv / "lib/python3.11/site-packages/users_own.py"
    for program in (*(tools / name for name in TOOLS), venv / "bin/python", venv / "bin/uv"):
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_text(STAND_IN)
        program.chmod(0o755)
    package.parent.mkdir(parents=True)
    package.touch()
    (venv / ".gspo-of-an-earlier-lock").touch()
    environment = {"PATH": f"{tools}{os.pathsep}{os.defpath}", "VENV": str(venv), "WORDS": str(words)}
    subprocess.run([ROOT / "deploy/setup.sh"], env=environment, check=True, timeout=30, capture_output=True)
    installs = [line for line in words.read_text().splitlines() if line.startswith(("python -m pip", "uv "))]
    assert len(installs) == 3
    assert all(" install " in line for line in installs), installs
    # `uv pip sync`, `install --exact` and a new environment would remove the package.
    assert not [line for line in words.read_text().splitlines() if {"sync", "--exact", "--clear"} & {*line.split()}]
    assert package.exists()
