"""`gspo init`: writes an example that runs: configuration, reward function, and prompts with sums of two numbers."""

from __future__ import annotations

import json
import random
import re
import shlex
from pathlib import Path

import yaml

from gspo.common.config.presets import fitting_clip
from gspo.common.errors import InputError

_TEMPLATES = Path(__file__).parent / "templates"
# Length of an answer to such a sum without an explanation.
_TYPICAL_TOKENS = 8
_NUM_PROMPTS, _NUM_HELD_OUT, _LIMIT = 1000, 100, 100
_FILES = ("config.yaml", "reward.py", "prompts.jsonl", "eval.jsonl")


def write_example(folder: Path, model: str) -> tuple[list[Path], list[str]]:
    """Write the four files of an example; returns their paths and notes for the user.

    Raises:
        InputError: One of the files exists already.
        OSError: `folder` cannot be created or written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / name for name in _FILES]
    if taken := [path for path in paths if path.exists()]:
        raise InputError(str(taken[0]), "exists already", "Name another folder; nothing is overwritten")
    config, reward, prompts, held_out = paths
    config.write_text(_config_text(folder, model))
    reward.write_text((_TEMPLATES / "example_reward.txt").read_text())
    problems = [(a, b) for a in range(_LIMIT) for b in range(_LIMIT)]
    random.Random(0).shuffle(problems)  # noqa: S311 - the same example for everyone, not a secret
    _write_problems(prompts, problems[:_NUM_PROMPTS])
    _write_problems(held_out, problems[_NUM_PROMPTS : _NUM_PROMPTS + _NUM_HELD_OUT])
    is_path = model.startswith(("/", ".", "~")) or model.count("/") > 1
    # The user may create the model later.
    notes = [f"\nNote: there is no model at {model} yet"] if is_path and not Path(model).exists() else []
    return paths, notes


def _config_text(folder: Path, model: str) -> str:
    """The template with name and model; the path of a model folder becomes absolute, valid in any directory."""
    local = Path(model)
    path = str(local.resolve()) if local.exists() else model
    text = (_TEMPLATES / "example_config.yaml").read_text()
    low, high = fitting_clip(_TYPICAL_TOKENS)
    return text.format(
        name=re.sub(r"[^A-Za-z0-9._-]", "-", folder.resolve().name).strip("._-")[:64] or "run",
        file=shlex.quote(str(folder / "config.yaml")),
        model=yaml.safe_dump(path).splitlines()[0],
        clip_low=f"{low:g}",
        clip_high=f"{high:g}",
    )


def _write_problems(path: Path, problems: list[tuple[int, int]]) -> None:
    rows = ({"prompt": [{"role": "user", "content": f"{a}+{b}="}], "answer": str(a + b)} for a, b in problems)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
