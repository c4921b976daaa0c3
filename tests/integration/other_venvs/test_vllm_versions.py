"""vLLM's wheels for GPUs, of each version that pyproject.toml allows: their names and arguments are those that we take.

They lie before the installed vLLM on the path, without most of their dependencies. A machine without a GPU imports all
of their Python code, and none of their kernels.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[3]
pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]
# Version -> packages that it needs to be imported, and that the locked version does not.
VERSIONS = {"0.32.0": [], "0.33.0": ["orjson"]}
CHECKS = ("tests/unit/generation/test_vllm_names.py", "tests/unit/generation/engine/test_arguments.py")


def test_the_versions_are_those_that_are_allowed() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    allowed = next(it for it in map(Requirement, extras["cuda"]) if it.name == "vllm").specifier
    assert all(version in allowed for version in VERSIONS)
    first, last = (tuple(map(int, version.split("."))) for version in (min(VERSIONS), max(VERSIONS)))
    assert f"{first[0]}.{first[1] - 1}.9" not in allowed and f"{last[0]}.{last[1] + 1}.0" not in allowed


@pytest.mark.parametrize("version", VERSIONS)
def test_the_wheel_for_gpus_has_every_name_and_argument(tmp_path: Path, version: str) -> None:
    packages = [f"vllm=={version}", *VERSIONS[version]]
    installed = run(["uv", "pip", "install", "-q", "--no-deps", "--target", str(tmp_path), *packages], limit_s=600)
    assert installed.returncode == 0, installed.stderr[-3000:]
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    code = f"import vllm; assert vllm.__file__.startswith({str(tmp_path)!r}) and vllm.__version__ == {version!r}"
    checks = ["pytest", "-q", "-n", "0", "-m", "long or not long", *CHECKS, "-k", "vllm_has_every_name or vllm_is_ours"]
    for words in (["-c", code], ["-m", *checks]):
        done = run(["python", *words], limit_s=300, PYTHONPATH=path)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def run(words: list[str], limit_s: float, **variables: str) -> subprocess.CompletedProcess[str]:
    """A program of this environment."""
    program = Path(sys.executable).with_name(words[0])
    environment = os.environ | variables
    return subprocess.run(
        [program, *words[1:]], cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=limit_s
    )
