"""The reasoning example: its rows are disjoint, its reward is the package's own, its configurations read well."""

from __future__ import annotations

import importlib.util
import runpy
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from gspo.common.config.loading import read_config

EXAMPLE = Path(__file__).parents[3] / "examples/reasoning"


@pytest.fixture(scope="module")
def tasks() -> ModuleType:
    spec = importlib.util.spec_from_file_location("reasoning_tasks", EXAMPLE / "tasks.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["reasoning_tasks"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def score(text: str, row: dict[str, Any]) -> float:
    reward = runpy.run_path(str(EXAMPLE / "reward.py"))["reward"]
    (value,) = reward([[{"role": "assistant", "content": text}]], [row["answer"]], metadata=[row["metadata"]], task=[0])
    return float(value)


def test_the_next_seed_has_the_rows_of_this_one(tasks: ModuleType) -> None:
    """So rows of two seeds are apart only if the seeds are."""
    for task in tasks.TASKS:
        here, after = (list(map(tasks.exercise, tasks.rows(task, seed, 5))) for seed in (7, 8))
        assert here[1:] == after[:-1]


@pytest.mark.parametrize("seed", [0, 1])
def test_no_held_out_sum_or_word_is_trained_in_any_task(tasks: ModuleType, seed: int) -> None:
    splits = tasks.splits(seed)
    assert [*splits] == ["chain_sum", "spell_backward", "basic_arithmetic"]
    held_out = {tasks.exercise(row) for _, rows in splits.values() for row in rows}
    for trained, kept in splits.values():
        texts = [tasks.exercise(row) for row in trained]
        assert len(texts) == len({*texts}) > 5000
        assert not held_out.intersection(texts)
        assert 190 < len(kept) <= tasks.NUM_HELD_OUT


def test_questions_have_the_frame_that_is_one_token(tasks: ModuleType) -> None:
    for task in tasks.TASKS:
        (row,) = tasks.rows(task, 0, 1)
        assert all(text in row["prompt"][0]["content"] for text in task.frame)


def test_the_reward_is_the_score_of_the_package(tasks: ModuleType) -> None:
    sums, words, calculations = (tasks.rows(task, 0, 1)[0] for task in tasks.TASKS)
    for row in (sums, words, calculations):
        assert score(row["answer"], row) == 1.0
    assert score("x", sums) == 0.0 == score("", words)
    half = words["answer"][: len(words["answer"]) // 2]
    assert score(half, words) == pytest.approx(len(half) / len(words["answer"]))
    assert score(f"Backwards that is <answer>{words['answer']}</answer>", words) == 1.0
    # A right result among other text is worth its share of the text.
    assert 0 < score(f"{calculations['answer']} or so", calculations) < 1


@pytest.mark.parametrize("name", ["config.yaml", "qwen3.yaml"])
def test_a_configuration_reads_the_files_that_are_written(tasks: ModuleType, name: str) -> None:
    config = read_config(EXAMPLE / name)
    written = tasks.files_of({task.name: ([], []) for task in tasks.TASKS})
    assert isinstance(config.evaluation.prompts, dict)
    named = [*(source.prompts for source in config.data.sources), *config.evaluation.prompts.values()]
    assert {Path(str(path)).name for path in named} == {*written}
    assert config.data.curriculum == "spread"
    assert config.reward.functions[0].path == EXAMPLE / "reward.py"
