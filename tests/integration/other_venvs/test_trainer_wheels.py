"""The page on migration against the configurations in the wheels of verl and OpenRLHF: names, defaults, meanings.

Their dependencies are not installed, and nothing of theirs is run: the wheels are read.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.documents.trainer_keys import expected_keys, openrlhf_keys, verl_keys

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]
WHEELS = {"verl": ("verl==0.9.1", verl_keys), "openrlhf": ("openrlhf==0.11.2", openrlhf_keys)}
_INSTALL_S = 240


@pytest.mark.parametrize("trainer", list(WHEELS))
def test_the_keys_of_the_page_are_those_of_the_wheel(tmp_path: Path, trainer: str) -> None:
    wheel, keys_of = WHEELS[trainer]
    words: list[str | Path] = ["pip", "install", "-q", "--no-deps", "--target", tmp_path, wheel]
    uv = Path(sys.executable).with_name("uv")
    done = subprocess.run([uv, *words], capture_output=True, text=True, check=False, timeout=_INSTALL_S)
    assert done.returncode == 0, done.stderr[-3000:]
    keys = keys_of(tmp_path / trainer)
    for name, (default, word) in expected_keys(trainer).items():
        assert name in keys, name
        assert keys[name].default == default, name
        assert word in keys[name].description, (name, keys[name].description)
    # Keys of which the page says that nothing reads them.
    assert trainer != "verl" or not [
        path for path in (tmp_path / "verl/workers/engine").rglob("*.py") if "grad_clip" in path.read_text()
    ]
