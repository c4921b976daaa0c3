"""`gspo run` with every service: of the arithmetic example, which learns, and of a random model of published size.

The random model's rewards mean nothing; the work is that of a trained one.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import yaml
from redis import Redis
from redis.exceptions import RedisError

from gspo.common.host.machine import CACHE_ARGUMENT, GIB
from gspo.common.streams.keys import Keys
from gspo.common.telemetry.step_time import shares
from tests.gpu.machine_facts import ROOT
from tests.gpu.part_run import PartRun

_EXAMPLE = ROOT / "examples/arithmetic"
_ENGINE = {"gpu_memory_utilization": 0.1, CACHE_ARGUMENT: 4 * GIB, "enforce_eager": True}
# A reward that varies within a group, so that steps have a gradient.
_REWARD = """
def reward(prompts, completions, **columns):
    return [float(sum(map(ord, str(text))) % 2) for text in completions]
"""


def run(case: PartRun) -> None:
    """The example of the part `demo`, or some steps of the random model."""
    if case.part == "demo":
        _run_example(case)
    else:
        _run_random_model(case)


def _run_example(case: PartRun) -> None:
    """Cold start, run, and look at its summary."""
    folder = case.folder / f"demo-{case.device}"
    words = ["--steps", str(case.sizes.cold_start_steps)] if case.sizes.cold_start_steps else []
    began = time.monotonic()
    subprocess.run([sys.executable, str(_EXAMPLE / "cold_start.py"), str(folder), *words], check=True)
    case.note(cold_start_s=time.monotonic() - began)
    run_dir, summary = _run_to_its_end(case, _config_of_example(case, folder))
    case.note(
        steps=summary["steps"], accuracy_before=summary["accuracy_before"], accuracy_after=summary["accuracy_after"]
    )
    case.require(summary["steps"] == case.sizes.demo_steps, f"{summary['steps']} steps were trained")
    case.require((run_dir / "report.html").exists(), "there is no report")
    gained = summary["accuracy_after"] - summary["accuracy_before"]
    case.judge("accuracy gained", gained, at_least=0.05)
    if case.on_gpu:
        case.require(gained > 0, "the model has not learned")
    _note_use(case, run_dir, summary)


def _run_random_model(case: PartRun) -> None:
    """Train some steps with the defaults of this machine; in the part `restart` between two kills of the generator."""
    folder = case.folder / f"{case.part}-{case.device}"
    folder.mkdir(parents=True, exist_ok=True)
    kills = _Kills(2) if case.part == "restart" else None
    run_dir, summary = _run_to_its_end(case, _config(case, folder), kills)
    case.require(summary["steps"] == case.sizes.run_steps, f"{summary['steps']} steps were trained")
    if kills:
        case.note(starts=len(kills.started))
        case.require(len(kills.started) == kills.planned + 1, f"{len(kills.started)} generators have started")
    _note_use(case, run_dir, summary)


def _note_use(case: PartRun, run_dir: Path, summary: dict[str, Any]) -> None:
    """Tokens a second, MFU, and the share of the steps' time by cause."""
    steps = [json.loads(line)["figures"] for line in (run_dir / "log/metrics.jsonl").read_text().splitlines()]
    case.note(
        steps=summary["steps"],
        tokens_per_s=summary["tokens_per_s"],
        **{name: value for name, value in summary["card_use"].items() if name in ("mfu", "learner_mfu")},
        **{f"{it.cause}_share": it.share for it in shares(*steps)},
    )


def _run_to_its_end(
    case: PartRun, config: Path, disturb: Callable[[psutil.Process, Path], None] | None = None
) -> tuple[Path, dict[str, Any]]:
    """`gspo run` of a configuration: the run's directory and its summary. `run_s` is noted.

    Args:
        disturb: Called each 100 ms with the run's process and directory.
    """
    run_dir = config.parent / "runs" / yaml.safe_load(config.read_text())["name"]
    began = time.monotonic()
    with psutil.Popen([sys.executable, "-m", "gspo.cli", "run", str(config)]) as process:
        while process.poll() is None:
            time.sleep(0.1)
            if disturb is not None:
                disturb(process, run_dir)
    case.note(run_s=time.monotonic() - began)
    code = process.returncode
    case.require(code == 0, f"gspo run ended with exit code {code}; its output is in the log")
    return run_dir, json.loads((run_dir / "summary.json").read_text())


@dataclass
class _Kills:
    """Kills the generator, its engine with it: each time once it serves a version that the learner has pushed to it.

    Attributes:
        planned: The number of kills.
        victims: The processes that were killed.
        started: The generators that have started.
    """

    planned: int
    victims: set[int] = field(default_factory=set)
    started: set[int] = field(default_factory=set)

    def __call__(self, process: psutil.Process, run_dir: Path) -> None:
        for generator in _generators(run_dir):
            pid = int(generator["pid"])
            self.started.add(pid)
            if pid not in self.victims and len(self.victims) < self.planned and generator["facts"]["version"]:
                self.victims.add(pid)
                next(it for it in process.children(recursive=True) if it.pid == pid).kill()
                print(f"killed the generator, process {pid}", flush=True)


def _generators(run_dir: Path) -> list[dict[str, Any]]:
    """The generators of a run that can be called; none before it has a Redis."""
    keys = Keys(run_dir.name)
    # While the run starts, its address may be half written.
    with contextlib.suppress(RedisError, OSError, ValueError):
        address = json.loads((run_dir / "services/supervisor.json").read_text())["redis_url"]
        with Redis.from_url(address) as redis:
            entries = [entry.decode().split(":", 1) for entry in redis.smembers(keys.instances)]
            texts = [redis.get(keys.instance(*entry)) for entry in entries if entry[0] == "generation"]
        return [it for text in texts if text and (it := json.loads(text))["grpc"]]
    return []


def _config_of_example(case: PartRun, folder: Path) -> Path:
    """The example's configuration, cut to the sizes, with as much of the sandbox as this machine has."""
    config: dict[str, Any] = yaml.safe_load((_EXAMPLE / "config.yaml").read_text())
    config["name"] = time.strftime("demo-%H%M%S")
    config["run"] = {"directory": str(folder / "runs"), "total_steps": case.sizes.demo_steps}
    config["evaluation"] |= {"every": 30, "num_answers": 1}
    config["reward"]["functions"][0]["path"] = str(_EXAMPLE / "reward.py")
    level = _sandbox_level()
    case.note(sandbox=level)
    config["reward"]["sandbox_minimum"] = level
    if case.device == "cuda":
        config["generation"]["engine"] = {**_ENGINE, **case.engine}
    return _written(folder, config)


def _config(case: PartRun, folder: Path) -> Path:
    sizes = case.sizes
    (folder / "reward.py").write_text(_REWARD)
    prompts = [{"prompt": str(number)} for number in range(256)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    config: dict[str, Any] = {
        "name": time.strftime("run-%H%M%S"),
        "model": {"path": str(case.model)},
        "data": {"prompts": "prompts.jsonl"},
        "reward": {"functions": [{"path": "reward.py"}], "sandbox_minimum": _sandbox_level()},
        "algorithm": {
            "rollout_batch_size": sizes.num_requests // 8,
            "num_return_sequences_in_group": 8,
            "prompt_length": sizes.prompt_tokens,
            "response_length": sizes.answer_tokens,
        },
        "staleness": {"max_lag": 1},
        "generation": {"max_rollouts": sizes.num_requests},
        "run": {"directory": str(folder / "runs"), "total_steps": sizes.run_steps},
    }
    if case.on_gpu:
        config["generation"]["engine"] = {"enforce_eager": False, **case.engine}
    return _written(folder, config)


def _written(folder: Path, config: dict[str, Any]) -> Path:
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config, sort_keys=False))
    return path


def _sandbox_level() -> str:
    """How far this machine can confine a reward function."""
    command = [sys.executable, "-m", "gspo.reward.sandbox"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=120, check=True)
    return str(json.loads(done.stdout)["level"])
