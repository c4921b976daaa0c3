"""`gspo init`: writes an example that runs: configuration, reward function, prompts with sums, and a model.

Containers mount the folder alone, so a model on this disk is linked into it. `tiny` makes that of examples/arithmetic.
"""

import json
import os
import random
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import yaml

from gspo.common.config.presets import fitting_clip
from gspo.common.errors import InputError
from gspo.common.model.files import is_path, other_folder

TINY = "tiny"
_TEMPLATES = Path(__file__).parent / "templates"
_ROOT = Path(__file__).resolve().parents[3]
_COLD_START, _CACHE = _ROOT / "examples/arithmetic/cold_start.py", _ROOT / ".cache/arithmetic/seed-0"
# Length of an answer to such a sum without an explanation.
_TYPICAL_TOKENS = 8
_NUM_PROMPTS, _NUM_HELD_OUT, _LIMIT = 1000, 100, 100
_FILES = ("config.yaml", "reward.py", "prompts.jsonl", "eval.jsonl")
_MODEL = "model"
_OTHER_MODEL = "Name a folder written by save_pretrained, a name on a hub such as Qwen/Qwen3-0.6B, or tiny"


@dataclass(frozen=True)
class ExampleSizes:
    """Keys that follow from the model.

    Attributes:
        clip: Both sides.
        answers: Those that the clip fits, in words.
    """

    learning_rate: str
    clip: tuple[float, float]
    answers: str


_SIZES = ExampleSizes("1.0e-6", fitting_clip(_TYPICAL_TOKENS), f"about {_TYPICAL_TOKENS} tokens")
# As examples/arithmetic/config.yaml: few tokens and a high rate move a ratio far.
_TINY_SIZES = ExampleSizes("2.0e-4", (0.1, 0.1), "three tokens at so high a rate")


def write_example(folder: Path, model: str) -> tuple[list[Path], list[str]]:
    """Write the files of an example; returns the paths of the four that users edit, and notes for the user.

    Args:
        model: A model's folder, its name on a hub, or TINY.

    Raises:
        InputError: One of the files exists already, or there is no model of this path or name.
        OSError: `folder` cannot be created or written.
    """
    local = _local_model(model)
    hub_notes = _ask_hub(model) if local is None and model != TINY else []
    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / name for name in _FILES]
    linked = [folder / _MODEL] if local or model == TINY else []
    if taken := [path for path in (*paths, *linked) if path.exists() and path.resolve() != local]:
        raise InputError(str(taken[0]), "exists already", "Name another folder; nothing is overwritten")
    try:
        return paths, _write_files(folder, model, local) + hub_notes
    except BaseException:  # a full disk or Ctrl-C: half an example would be in the next one's way
        for path in (folder,) if is_new else (*paths, *linked):
            if path.is_dir() and path.resolve() != local:
                shutil.rmtree(path, ignore_errors=True)
            elif path.is_file():
                path.unlink()
        raise


def _write_files(folder: Path, model: str, local: Path | None) -> list[str]:
    """Write the files, and return notes for the user."""
    config, reward, prompts, held_out = (folder / name for name in _FILES)
    if model == TINY:
        _copy_cold_start(folder)
        path, notes = _MODEL, [f"\n{folder / _MODEL}: adds two numbers below 50, and three of ten answers are right"]
    else:
        path, notes = _beside(folder, local) if local else (model, [])
        problems = [(a, b) for a in range(_LIMIT) for b in range(_LIMIT)]
        random.Random(0).shuffle(problems)  # noqa: S311 - the same example for everyone, not a secret
        _write_problems(prompts, problems[:_NUM_PROMPTS])
        _write_problems(held_out, problems[_NUM_PROMPTS : _NUM_PROMPTS + _NUM_HELD_OUT])
    config.write_text(_config_text(folder, path, _TINY_SIZES if model == TINY else _SIZES))
    reward.write_text((_TEMPLATES / "example_reward.txt").read_text())
    return notes


def _local_model(model: str) -> Path | None:
    """The folder that `model` names; None for TINY and a name on a hub.

    Raises:
        InputError: It is a path, and no model is there.
    """
    path = Path(os.path.expanduser(model))  # noqa: PTH111 - Path.expanduser raises for a user who has no home
    if model == TINY or not (is_path(model) or model.startswith("~") or path.exists()):
        return None
    if not (path / "config.json").is_file():
        rule = f"there is no model at {path}: it has no config.json"
        raise InputError("--model", rule, other_folder(path, _OTHER_MODEL))
    return path.resolve()


def _ask_hub(model: str) -> list[str]:
    """Ask a hub once for a model by its name; a note where it does not answer or wants a token.

    Raises:
        InputError: The hub has no such model.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        HFValidationError,
        RepositoryNotFoundError,
    )

    try:
        get_hf_file_metadata(hf_hub_url(model, "config.json"))
    except GatedRepoError:
        why = "its hub wants a token for it"
    except (RepositoryNotFoundError, EntryNotFoundError, HFValidationError) as error:
        text = f"there is no model {model}, neither a folder here nor on the hub"
        raise InputError("--model", text, _OTHER_MODEL) from error
    except Exception as error:  # noqa: BLE001 - of a network: its class is another in each version of the library
        why = f"its hub does not answer ({error})"
    else:
        return []
    return [f"\n{model}: it is not a folder here, and {why}. The first start fetches it"]


def _copy_cold_start(folder: Path) -> None:
    """Model, prompts and held-out prompts of `make demo`, which are made once."""
    if not (_COLD_START.is_file() and find_spec("torch")):
        raise InputError(
            "--model",
            f"{TINY} is made by examples/arithmetic with torch, and one of them is missing here",
            "Call `gspo init` in the environment of `make setup`, or name a model",
        )
    if done := subprocess.run([sys.executable, _COLD_START, _CACHE], check=False).returncode:
        raise InputError("--model", f"{_COLD_START} ended with exit code {done}", "Its output is above")
    shutil.copytree(_CACHE / "model", folder / _MODEL)
    for name in ("prompts.jsonl", "eval.jsonl"):
        shutil.copy(_CACHE / name, folder / name)


def _beside(folder: Path, model: Path) -> tuple[str, list[str]]:
    """`model.path` of a model that is linked into the folder; where disks forbid it, its own path and a note."""
    inside = folder.resolve()
    if model.is_relative_to(inside):
        return str(model.relative_to(inside)), []
    try:
        shutil.copytree(
            model,
            folder / _MODEL,
            copy_function=lambda source, target: os.link(os.path.realpath(source), target),
            ignore=lambda parent, names: [name for name in names if Path(parent, name).resolve() == inside],
        )
    except (OSError, shutil.Error):
        shutil.rmtree(folder / _MODEL, ignore_errors=True)
        where = f"the model stays at {model}; containers see {folder} alone"
        return str(model), [f"\nNote: {where}: for them, copy it to {folder / _MODEL} and set model.path: {_MODEL}"]
    return _MODEL, [f"\n{folder / _MODEL}: the files of {model}, linked without a copy"]


def _config_text(folder: Path, model: str, sizes: ExampleSizes) -> str:
    text = (_TEMPLATES / "example_config.yaml").read_text()
    low, high = sizes.clip
    return text.format(
        name=re.sub(r"[^A-Za-z0-9._-]", "-", folder.resolve().name).strip("._-")[:64] or "run",
        file=shlex.quote(str(folder / "config.yaml")),
        model=yaml.safe_dump(model).splitlines()[0],
        clip_low=f"{low:g}",
        clip_high=f"{high:g}",
        answers=sizes.answers,
        learning_rate=sizes.learning_rate,
    )


def _write_problems(path: Path, problems: list[tuple[int, int]]) -> None:
    rows = ({"prompt": [{"role": "user", "content": f"{a}+{b}="}], "answer": str(a + b)} for a, b in problems)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
