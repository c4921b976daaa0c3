"""Variables set before vLLM is imported: no threads that a fork would lose, no compilation for small models."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from gspo.common.config.loading import parse_config
from gspo.common.config.schema import Config
from gspo.generation.engine import process
from gspo.generation.engine.process import generation_threads, import_variables, threads


def config_of(folder: Path, model: dict[str, Any] | None, **generation: Any) -> Config:
    if model is not None:
        (folder / "config.json").write_text(json.dumps(model))
    return parse_config(
        {
            "name": "test",
            "model": {"path": str(folder)},
            "data": {"prompts": "prompts.jsonl"},
            "reward": {"functions": [{"path": "reward.py"}]},
            "generation": generation,
            "run": {"total_steps": 1},
        },
        folder,
    )


@pytest.mark.parametrize(
    ("model", "engine", "compiles"),
    [
        ({"vocab_size": 4096}, {}, False),
        ({"vocab_size": 4097}, {}, True),
        ({"text_config": {"vocab_size": 100}}, {}, False),
        ({"vocab_size": 100}, {"enforce_eager": False}, True),
        ({}, {}, True),
        (None, {}, True),
    ],
)
def test_only_a_small_vocabulary_compiles_nothing(
    tmp_path: Path, model: dict[str, Any] | None, engine: dict[str, Any], compiles: bool
) -> None:
    values = import_variables(config_of(tmp_path, model, engine=engine))
    assert ("TORCH_COMPILE_DISABLE" not in values) == compiles
    assert values["OPENBLAS_NUM_THREADS"] == "1"


def test_nothing_is_set_for_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "torch_is_for_cpus", lambda: False)
    assert import_variables(config_of(tmp_path, {"vocab_size": 100})) == {}


def test_the_number_of_threads_is_the_configured_one(tmp_path: Path) -> None:
    assert threads(config_of(tmp_path, None, threads=3)) == {"OMP_NUM_THREADS": "3"}


@pytest.mark.parametrize(
    ("configured", "cores", "num_threads"), [(0, 1, 1), (0, 2, 1), (0, 8, 7), (8, 8, 8), (3, 2, 3)]
)
def test_an_engine_leaves_a_core_free_unless_threads_are_configured(
    monkeypatch: pytest.MonkeyPatch, configured: int, cores: int, num_threads: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    assert generation_threads(configured) == num_threads
