"""A configuration that reads well, as a mapping that a test may change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gspo.common.config.loading import parse_config
from gspo.common.config.schema import Config


@pytest.fixture
def raw_config() -> dict[str, Any]:
    """The smallest configuration."""
    return {
        "name": "small",
        "model": {"path": "."},
        "data": {"prompts": "p.jsonl"},
        "reward": {"functions": [{"path": "r.py"}]},
        "run": {"total_steps": 10},
    }


@pytest.fixture
def config(raw_config: dict[str, Any], tmp_path: Path) -> Config:
    """The same, read."""
    return parse_config(raw_config, tmp_path)
