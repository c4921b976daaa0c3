"""docs/start.md, executed block by block as a reader does: installation, demo, and a run of one's own.

The reader's own run has the model of the demo, and two steps.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import httpx
import pytest

from tests.support.documents.documented_commands import blocks
from tests.support.repository.source_files import ROOT

_BLOCK_S, _VIEW_S = 900, 60
_ENVIRONMENT = {**os.environ, "PATH": f"{ROOT / '.venv' / 'bin'}:{os.environ['PATH']}"}


def run(text: str, folder: Path) -> str:
    """Execute a block in a shell; its output."""
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", text], cwd=folder, env=_ENVIRONMENT, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=_BLOCK_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{text}\n{done.stdout[-4000:]}"
    return done.stdout


@pytest.mark.long
def test_the_page_for_the_first_ten_minutes_works(tmp_path: Path) -> None:
    setup, demo, init, doctor, own = (text for name, text in blocks() if name.startswith("docs/start.md:"))
    run(setup, ROOT)
    report = re.findall(r"\S+report\.html", run(demo, ROOT))
    assert report
    run(init, tmp_path)
    config = tmp_path / "my-run" / "config.yaml"
    config.write_text(re.sub(r"total_steps: \d+", "total_steps: 2", config.read_text()))
    run(doctor, tmp_path)
    training, status, view = own.splitlines()
    run(training, tmp_path)
    assert "step 2/2" in run(status, tmp_path)
    with subprocess.Popen(
        ["bash", "-c", f"exec {view.partition('#')[0]} --port 0"],
        cwd=tmp_path, env=_ENVIRONMENT, stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        try:
            assert process.stdout is not None
            url = process.stdout.readline().strip()
            assert "rollouts" in httpx.get(f"{url}rollouts", timeout=_VIEW_S).text
        finally:
            process.terminate()
