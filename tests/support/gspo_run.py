"""`gspo run` as a user starts it, on a tiny model, to its end; and what it left.

What it is not: a benchmark, or a run that learns.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import yaml

# Rewards spread in most groups of a random model: whether the first character is in the first half of the alphabet.
REWARD = """
def reward(prompts, completions, answer, **columns):
    return [float(c[0]["content"][:1] < "P") for c in completions]
"""
EXAMPLES = Path(__file__).parents[2] / "examples"
_TIMEOUT_S = 500


@dataclass(frozen=True)
class WholeRun:
    """A finished run and what it left."""

    folder: Path
    run_dir: Path
    printed: str

    def lines(self, name: str) -> list[dict[str, Any]]:
        """The records of a file in the log."""
        return [json.loads(line) for line in (self.run_dir / "log" / name).read_text().splitlines()]

    def rows(self, step: int) -> list[dict[str, Any]]:
        """The rollouts of a step, in training order."""
        rows: list[dict[str, Any]] = pq.read_table(self.run_dir / "log" / f"step-{step:06d}.parquet").to_pylist()
        return rows


def example_copy(name: str, folder: Path, file: str = "config.yaml", **sections: dict[str, Any]) -> Path:
    """A user's copy of an example, with these keys in sections of its configuration `file`."""
    for shared in ("conversations.py", "small_model.py"):
        shutil.copy(EXAMPLES / shared, folder)
    example = shutil.copytree(EXAMPLES / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    config = yaml.safe_load((example / file).read_text())
    for section, keys in sections.items():
        config[section] |= keys
    (example / file).write_text(yaml.safe_dump(config))
    return example


def example_run(
    example: Path,
    folder: Path,
    lessons: int,
    *options: str,
    program: str = "demo.py",
    watch: Callable[[Path], None] = lambda _: None,
) -> WholeRun:
    """An example as a user starts it, with its cold start, both cut short.

    Args:
        watch: Called with the run directory once it is there.
    """
    command: list[str | Path] = [sys.executable, example / program, "--cold-start-steps", str(lessons)]
    command += ["--runs", folder / "runs", "--cache", folder / "cache", *options]

    def meanwhile(process: subprocess.Popen[bytes]) -> None:
        while process.poll() is None and not list(folder.glob("runs/*/services/supervisor.json")):
            time.sleep(0.1)
        for file in folder.glob("runs/*/services/supervisor.json"):
            watch(file.parents[1])

    printed = run_to_end(command, meanwhile)
    (run_dir,) = (path.parent for path in folder.glob("runs/*/summary.json"))
    return WholeRun(folder, run_dir, printed)


def whole_run(
    folder: Path,
    model: Path,
    meanwhile: Callable[[subprocess.Popen[bytes], Path], None] | None = None,
    **sections: Any,
) -> WholeRun:
    """A synchronous run in float32 with two mini-batches a step; `sections` go over these keys.

    `meanwhile` is called with the process and its run directory once it is started.
    """
    for name, numbers in (("prompts.jsonl", range(20)), ("eval.jsonl", range(20, 26))):
        records = [{"prompt": [{"role": "user", "content": f"{n}+{n}="}], "answer": str(2 * n)} for n in numbers]
        (folder / name).write_text("".join(json.dumps(record) + "\n" for record in records))
    (folder / "reward.py").write_text(REWARD)
    config: dict[str, Any] = {
        "name": "whole",
        "model": {"path": str(model)},
        "data": {"prompts": "prompts.jsonl"},
        "reward": {"functions": [{"path": "reward.py"}]},
        "algorithm": {"prompt_length": 64, "response_length": 24, "num_mini_batches": 2},
        "staleness": {"max_lag": 0},
        "generation": {"kv_cache_gb": 0.25, "max_rollouts": 64},
        "learner": {"threads": 1},
    }
    for name, section in sections.items():
        config[name] = {**config.get(name, {}), **section} if isinstance(section, dict) else section
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    command: list[str | Path] = [sys.executable, "-P", "-m", "gspo.cli", "run", str(folder / "config.yaml"), "--plain"]
    run_dir = folder / "runs" / "whole"
    watch = None if meanwhile is None else lambda process: meanwhile(process, run_dir)
    return WholeRun(folder, run_dir, run_to_end(command, watch, stray_modules(folder)))


def stray_modules(folder: Path) -> Path:
    """A working directory of a user, with files that have the names of standard modules; no process may import one."""
    stray = folder / "stray"
    stray.mkdir()
    for name in ("inspect", "ast", "queue"):
        (stray / f"{name}.py").write_text("raise FileNotFoundError('a file of the working directory was imported')\n")
    return stray


def run_to_end(
    command: list[str | Path],
    meanwhile: Callable[[subprocess.Popen[bytes]], None] | None = None,
    working_dir: Path | None = None,
) -> str:
    """Run a command that must succeed, with all that it starts; what it printed."""
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True, cwd=working_dir
    )
    try:
        if meanwhile is not None:
            meanwhile(process)
        printed = process.communicate(timeout=_TIMEOUT_S)[0].decode()
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)
    assert process.returncode == 0, printed
    return printed
