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
import yaml

from tests.support.tiny_model import make_tiny_model

ROOT = Path(__file__).parents[3]


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A folder for temporary files: vLLM's sockets lie in it, and their whole path has at most 107 characters."""
    with tempfile.TemporaryDirectory(prefix="gspo-") as folder:
        yield Path(folder)


@pytest.fixture
def environment(short_folder: Path) -> dict[str, str]:
    folders = [str(ROOT), str(ROOT / "proto"), str(ROOT / "services")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(folders), "TMPDIR": str(short_folder)}


@pytest.mark.long
def test_the_example_can_be_measured(tmp_path: Path, short_folder: Path, environment: dict[str, str]) -> None:
    model, gspo = make_tiny_model(tmp_path / "model"), (sys.executable, "-m", "gspo.cli")
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
    assert "sampled mean reward" in done.stdout and "warning" not in done.stdout
    assert not list(short_folder.glob("gspo-eval-*")), "its run directory is temporary"
    assert not [
        process
        for process in psutil.process_iter(["cmdline"])
        if str(tmp_path) in " ".join(process.info["cmdline"] or [])
    ]


AGENT = """
from openai import AsyncOpenAI

async def play(task):
    async with AsyncOpenAI(base_url=task.base_url, api_key=task.api_key) as client:
        await client.chat.completions.create(model=task.model, messages=task.messages)
    return float(task.columns["answer"])
"""


@pytest.mark.long
def test_an_agent_can_be_measured(tmp_path: Path, environment: dict[str, str]) -> None:
    model, out = make_tiny_model(tmp_path / "model"), tmp_path / "out.json"
    (tmp_path / "agent.py").write_text(AGENT)
    rows = [{"prompt": [{"role": "user", "content": f"{n}="}], "answer": str(n)} for n in range(4)]
    (tmp_path / "eval.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {
        "name": "base",
        "model": {"path": str(model)},
        "data": {"prompts": "eval.jsonl"},
        "agent": {"path": "agent.py", "workers": 2},
        "gateway": {"replicas": 1},
        "algorithm": {"prompt_length": 64, "response_length": 16},
        "generation": {"kv_cache_gb": 0.25},
        "run": {"total_steps": 1},
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    words = [str(model), str(tmp_path / "eval.jsonl"), "--config", str(tmp_path / "config.yaml"), "--out", str(out)]
    gspo = (sys.executable, "-m", "gspo.cli")
    done = subprocess.run(
        [*gspo, "eval", *words, "--answers", "2"], env=environment, capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(out.read_text())
    assert (figures["num_prompts"], figures["num_answers"], figures["num_failed"]) == (4, 2, 0)
    assert figures["sampled_mean"] == 1.5
