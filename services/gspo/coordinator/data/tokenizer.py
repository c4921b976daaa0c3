"""Loads the model's tokenizer without torch."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from gspo.common.config.schema import ModelConfig
from gspo.common.errors import InputError
from gspo.common.model.files import model_folder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_tokenizer(model: ModelConfig) -> PreTrainedTokenizerBase:
    """The tokenizer in the model's folder.

    Raises:
        InputError: There is no such folder, or no tokenizer that loads from it.
    """
    folder = model_folder(model)
    _import_transformers()
    from transformers import AutoTokenizer

    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            folder, trust_remote_code=model.trust_remote_code
        )
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise _no_tokenizer(folder, reason) from error
    if not tokenizer.get_vocab().keys() - set(tokenizer.all_special_tokens):
        # Some kinds of model have a default tokenizer for a folder without one.
        raise _no_tokenizer(folder, "it holds no vocabulary")
    return tokenizer


def _no_tokenizer(folder: Path, reason: str) -> InputError:
    return InputError(
        "model.path",
        f"no tokenizer loads from {folder} ({reason})",
        "Save the tokenizer there with `save_pretrained`; set model.trust_remote_code where it is Python code",
    )


def _import_transformers() -> None:
    """Import transformers as if torch were not there: with it the import takes 3 s and 300 MB more, for nothing."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # it warns of the missing torch
    hide = "torch" not in sys.modules and importlib.util.find_spec("torch") is not None
    if hide:
        sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        from transformers import AutoTokenizer  # noqa: F401
    finally:
        if hide:
            del sys.modules["torch"]
