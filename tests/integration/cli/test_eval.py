"""`gspo init` and `gspo eval` with the real services and a random model: the example works unchanged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.tiny_model import make_tiny_model

ROOT = Path(__file__).parents[3]


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A folder for temporary files: vLLM's sockets lie in it, and their whole path has at most 107 characters."""
    with tempfile.TemporaryDirectory(prefix="gspo-") as folder:
        yield Path(folder)


def test_the_example_can_be_measured(tmp_path: Path, short_folder: Path) -> None:
    model = make_tiny_model(tmp_path / "model")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "proto"), str(ROOT / "services")]),
        "TMPDIR": str(short_folder),
    }
    gspo = (sys.executable, "-m", "gspo.cli")
    example, out = tmp_path / "example", tmp_path / "out.json"
    subprocess.run([*gspo, "init", str(example), "--model", str(model)], env=environment, check=True)

    words = [str(model), str(example / "eval.jsonl"), "--config", str(example / "config.yaml"), "--out", str(out)]
    words += ["--limit", "6", "--answers", "2", "--response-length", "8"]
    done = subprocess.run([*gspo, "eval", *words], env=environment, capture_output=True, text=True, timeout=400)

    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(out.read_text())
    assert (figures["num_prompts"], figures["num_answers"], figures["num_failed"]) == (6, 2, 0)
    assert 0.0 <= figures["sampled_mean"] <= 1.0
    assert {"sampled_stderr", "greedy_mean", "greedy_stderr"} <= figures.keys()
    assert "sampled mean reward" in done.stdout
    assert not list(short_folder.glob("gspo-eval-*")), "its run directory is temporary"
    assert not [
        process
        for process in psutil.process_iter(["cmdline"])
        if str(tmp_path) in " ".join(process.info["cmdline"] or [])
    ]
