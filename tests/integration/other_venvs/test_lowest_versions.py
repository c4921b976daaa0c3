"""The lowest versions that pyproject.toml allows, all at once: the unit tests and a whole run pass with them.

What it is not: a test of each floor by itself, or of torch below the pinned one, which only GPU machines have.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]
ROOT = Path(__file__).parents[3]
# They ask whether the locked packages of the images suffice, which have other versions.
OTHERS = ("--ignore", "tests/unit/deploy/test_images.py")
_SETUP_S, _TESTS_S = 900, 2400


@pytest.fixture(scope="module")
def python() -> Path:
    """The program `python` of the environment, which is kept: making it anew takes a minute."""
    venv = ROOT / ".cache/lowest"
    variables = {**os.environ, "VENV": str(venv), "LOCK": "deploy/requirements-lowest.lock"}
    subprocess.run([ROOT / "deploy/setup.sh"], env=variables, check=True, timeout=_SETUP_S)
    return venv / "bin/python"


@pytest.mark.parametrize("tests", ["tests/unit", "tests/integration/run/test_whole_run.py"])
def test_the_tests_pass_with_the_lowest_versions(python: Path, tests: str) -> None:
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    variables["PATH"] = f"{python.parent}{os.pathsep}{os.environ['PATH']}"
    command: list[str | Path] = [
        python,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-n",
        "2",
        "--dist",
        "loadfile",
        tests,
        *OTHERS,
    ]
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=_TESTS_S)
    assert done.returncode == 0, done.stdout[-5000:]
