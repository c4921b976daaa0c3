"""`gspo init`: writes an example of configuration, prompts and reward that runs as it stands.

The texts are in templates/; the problems are made here: sums of two numbers, some of them held out.
"""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import yaml

from services.common.errors import InputError

_TEMPLATES = Path(__file__).parent / "templates"
_NUM_PROMPTS, _NUM_HELD_OUT, _LIMIT = 1000, 100, 100
_FILES = ("config.yaml", "reward.py", "prompts.jsonl", "eval.jsonl")


def write_example(folder: Path, model: str) -> list[Path]:
    """Write the four files of an example; they appear in `folder`, which may exist.

    Raises:
        InputError: One of them is there already.
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
    return paths


def _config_text(folder: Path, model: str) -> str:
    """The template with name and model; a model folder is written as an absolute path, so that it stays found."""
    local = Path(model)
    path = str(local.resolve()) if local.exists() else model
    text = (_TEMPLATES / "example_config.yaml").read_text()
    return text.format(name=_run_name(folder), directory=folder, model=yaml.safe_dump(path).splitlines()[0])


def _run_name(folder: Path) -> str:
    name = re.sub(r"[^A-Za-z0-9._-]", "-", folder.resolve().name).lstrip("._-")[:64]
    return name or "run"


def _write_problems(path: Path, problems: list[tuple[int, int]]) -> None:
    rows = ({"prompt": [{"role": "user", "content": f"{a}+{b}="}], "answer": str(a + b)} for a, b in problems)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
