"""The smallest configuration that is complete."""

from __future__ import annotations

from typing import Any

import pytest

from gspo.common.config.schema import Config


@pytest.fixture
def minimal() -> dict[str, Any]:
    """A mapping as it is read from YAML: the keys without a default, and an end of the run."""
    return {
        "name": "r",
        "model": {"path": "model"},
        "data": {"prompts": "prompts.jsonl"},
        "reward": {"functions": [{"path": "reward.py"}]},
        "run": {"total_steps": 3},
    }


@pytest.fixture
def config(minimal: dict[str, Any]) -> Config:
    """The same, validated."""
    return Config.model_validate(minimal)
