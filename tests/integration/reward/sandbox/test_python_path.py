"""The sandbox where nothing is installed and all packages lie in a folder on PYTHONPATH, as on a bare GPU machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

from gspo.reward.sandbox.launch import LEVEL_NAMES

ROOT = Path(__file__).parents[4]


def test_the_sandbox_finds_packages_on_pythonpath(tmp_path: Path) -> None:
    paths = [str(ROOT), str(ROOT / "proto"), str(ROOT / "services"), sysconfig.get_path("purelib")]
    done = subprocess.run(
        # The interpreter behind the virtual environment: without it, none of our packages are importable.
        [sys._base_executable, "-m", "gspo.reward.sandbox"],  # type: ignore[attr-defined]
        env={"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(paths)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["level"] in LEVEL_NAMES
    assert "ModuleNotFoundError" not in str(report["lacks"])
