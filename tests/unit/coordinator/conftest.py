"""A tokenizer of one token a character, with a chat template."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from gspo.common.config.loading import parse_config
from gspo.coordinator.data.prompts import PromptSet
from tests.support.tiny_model import make_tokenizer

DATA_KEYS = ("on_long_prompt", "on_assistant_end", "chat_template_kwargs")


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer()


@pytest.fixture
def open_set(tokenizer: PreTrainedTokenizerFast) -> Callable[..., PromptSet]:
    """Opens a file with the defaults of these tests, each of which a test may change."""

    def opened(path: Path, *, limit: int | None = None, **changes: Any) -> PromptSet:
        keys = {
            "name": "r",
            "model": {"path": "model"},
            "data": {"prompts": "p.jsonl", **{name: changes[name] for name in DATA_KEYS if name in changes}},
            "algorithm": {"prompt_length": changes.get("prompt_length", 64)},
            "reward": {"functions": [{"path": "reward.py"}]},
            "environment": changes.get("environment", {}),
            "run": {"total_steps": 3},
        }
        config = parse_config(keys, path.parent)
        return PromptSet(
            "data.prompts", [path], changes.get("tokenizer", tokenizer), config, config.sources[0], limit=limit
        )

    return opened
