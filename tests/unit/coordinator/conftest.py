"""A tokenizer of one token a character, with a chat template."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from gspo.coordinator.data.prompts import PromptSet
from tests.support.tiny_model import make_tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer()


@pytest.fixture
def open_set(tokenizer: PreTrainedTokenizerFast) -> Callable[..., PromptSet]:
    """Opens a file with the defaults of these tests, each of which a test may change."""

    def opened(path: Path, **changes: Any) -> PromptSet:
        arguments = {"column": "prompt", "limit": None, "prompt_length": 64, "on_long_prompt": "error"} | changes
        return PromptSet("data.prompts", path, arguments.pop("tokenizer", tokenizer), **arguments)

    return opened
