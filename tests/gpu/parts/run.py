"""`gspo run` of a model of published size, with every service: tokens a second, MFU, the share of each part of a step.

The model is random, so its rewards mean nothing; the work is that of a trained one.
"""

from __future__ import annotations

import contextlib
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml

from tests.gpu.part_run import PartRun
from tests.gpu.parts.demo import run_to_its_end, sandbox_level

# A reward that varies within a group, so that steps have a gradient.
_REWARD = """
def reward(prompts, completions, **columns):
    return [float(sum(map(ord, str(text))) % 2) for text in completions]
"""


def run(case: PartRun) -> None:
    """Train some steps with the defaults of this machine; then what the run's summary says of them."""
    folder = case.folder / f"{case.part}-{case.device}"
    folder.mkdir(parents=True, exist_ok=True)
    kills = _Kills(2) if case.part == "restart" else None
    _, summary = run_to_its_end(case, _config(case, folder), kills)
    case.require(summary["steps"] == case.sizes.run_steps, f"{summary['steps']} steps were trained")
    if kills:
        case.require(kills.num_kills == kills.planned, f"the generator was killed {kills.num_kills} times")
    case.note(
        steps=summary["steps"],
        tokens_per_s=summary["tokens_per_s"],
        **{name: value for name, value in summary["card_use"].items() if name in ("mfu", "learner_mfu")},
        **{name: value for name, value in summary["steps_s"].items() if value},
    )


@dataclass
class _Kills:
    """Kills the generator, its engine with it, after the first steps: once a step."""

    planned: int
    num_kills: int = 0

    def __call__(self, process: psutil.Process, run_dir: Path) -> None:
        if self.num_kills == self.planned or len(list(run_dir.glob("log/step-*.parquet"))) <= self.num_kills:
            return
        for child in process.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if "gspo.generation" in child.cmdline():
                    child.kill()
                    self.num_kills += 1
                    print(f"killed the generator, process {child.pid}", flush=True)
                    return


def _config(case: PartRun, folder: Path) -> Path:
    sizes, path = case.sizes, folder / "config.yaml"
    (folder / "reward.py").write_text(_REWARD)
    prompts = [{"prompt": str(number)} for number in range(256)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    config: dict[str, Any] = {
        "name": time.strftime("run-%H%M%S"),
        "model": {"path": str(case.model)},
        "data": {"prompts": "prompts.jsonl"},
        "reward": {"functions": [{"path": "reward.py"}], "sandbox_minimum": sandbox_level()},
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
    path.write_text(yaml.safe_dump(config, sort_keys=False))
    return path
