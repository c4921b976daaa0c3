"""The folder of the model's files: the configured one, or a hub's copy on this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gspo.common.config.schema import ModelConfig
from gspo.common.errors import InputError

_FILES = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]
_PICKLES = ["*.bin"]


def model_folder(model: ModelConfig) -> Path:
    """The folder of the model's files; fetches a hub model once.

    Raises:
        InputError: `model.path` is neither a folder with a sound config.json nor a model that a hub has.
    """
    folder = Path(model.path)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise InputError(
                "model.path",
                f"{folder} has no config.json",
                "Give a folder that `save_pretrained` wrote, with its tokenizer",
            )
        _check_config(folder / "config.json")
        return folder
    if folder.is_absolute() or model.path.startswith(".") or model.path.count("/") > 1:
        raise InputError("model.path", f"{model.path} is not a folder", "Correct the path, or give a hub model's name")
    return _from_hub(model)


def read_model_config(folder: Path) -> dict[str, Any]:
    """The mapping in a model's config.json; an empty one where it cannot be read."""
    try:
        content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def max_positions(folder: Path) -> int | None:
    """Tokens that the model of a folder reads, prompt and answer together; None where its config.json names none."""
    facts = read_model_config(folder)
    # Models of several modalities keep the language model's settings one level down.
    inner = facts.get("text_config")
    positions = facts.get("max_position_embeddings")
    if not positions and isinstance(inner, dict):
        positions = inner.get("max_position_embeddings")
    return positions if isinstance(positions, int) else None


def _check_config(path: Path) -> None:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError("model.path", f"{path} cannot be read ({error})", "Copy it again") from error
    if not isinstance(content, dict) or not isinstance(content.get("model_type"), str):
        raise InputError(
            "model.path", f"{path} does not say what model it is (model_type)", "Copy it again from the model's source"
        )


def _from_hub(model: ModelConfig) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        patterns = _FILES + (_PICKLES if model.allow_pickle else [])
        return Path(snapshot_download(model.path, allow_patterns=patterns))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise InputError(
            "model.path",
            f"{model.path} is not a folder here, and no hub gave it ({reason})",
            "Give a folder that `save_pretrained` wrote, or a hub name where a hub can be reached",
        ) from error
