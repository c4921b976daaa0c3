"""The section `evaluation`: the figure of keep_best, held-out files, and the steps that are measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gspo.common.config.evaluation import BestFigure
from gspo.common.config.loading import parse_config
from gspo.common.config.schema import Config
from gspo.common.errors import InputError

FILES = {"easy": "e.jsonl", "hard": "h.jsonl"}


def read(folder: Path, **evaluation: Any) -> Config:
    functions = [{"path": "right.py"}, {"path": "form.py"}]
    settings = {"name": "a", "model": {"path": "."}, "data": {"prompts": "p.jsonl"}, "run": {"total_steps": 9}}
    return parse_config({**settings, "reward": {"functions": functions}, "evaluation": evaluation}, folder)


@pytest.mark.parametrize(
    ("prompts", "keep_best", "expected"),
    [
        ("e.jsonl", "sampled_mean", BestFigure({"": 1.0}, "sampled_mean")),
        (FILES, "greedy_mean", BestFigure({"easy": 1.0}, "greedy_mean")),
        (FILES, "hard/pass_at_2", BestFigure({"hard": 1.0}, "pass_at_2")),
        (FILES, "hard/part_form_mean", BestFigure({"hard": 1.0}, "part_form_mean")),
        (FILES, "part_form/tags_mean", BestFigure({"easy": 1.0}, "part_form/tags_mean")),
        ("e.jsonl", None, None),
    ],
)
def test_a_figure_of_a_file(tmp_path: Path, prompts: Any, keep_best: str, expected: BestFigure) -> None:
    assert read(tmp_path, prompts=prompts, keep_best=keep_best).best_figure == expected


@pytest.mark.parametrize(
    ("own", "other", "rule"),
    [
        ({"top_p": 0.9}, {"generation": {"draft_tokens": 4}}, "drafts .* are checked against the whole one"),
        ({"top_p": 0.0}, {}, "0.0 is not allowed"),
        ({"temperature": 0.0}, {}, "0.0 is not allowed"),
        (
            {"temperature": 0.6},
            {"agent": {"external": True, "sampling": "client"}, "gateway": {"replicas": 1}},
            "has no effect beside agent.sampling: client",
        ),
    ],
)
def test_sampling_of_its_own_is_one_that_the_engine_has(
    tmp_path: Path, own: dict[str, Any], other: dict[str, Any], rule: str
) -> None:
    settings = {"name": "a", "model": {"path": "."}, "data": {"prompts": "p.jsonl"}, "run": {"total_steps": 9}}
    reward, held_out = {"functions": [{"path": "right.py"}]}, {"prompts": "e.jsonl", **own}
    with pytest.raises(InputError, match=rf"evaluation\.{next(iter(own))}: .*{rule}"):
        parse_config({**settings, "reward": reward, "evaluation": held_out, **other}, tmp_path)


@pytest.mark.parametrize(
    ("evaluation", "message"),
    [
        (
            {"prompts": FILES, "keep_best": "sampled_maen"},
            "sampled_maen is not a figure .* mean 'sampled_mean'",
        ),
        ({"prompts": FILES, "keep_best": "pass_at_3"}, "pass_at_3 is not a figure"),
        ({"prompts": FILES, "keep_best": "greedy_mean", "greedy": False}, "greedy_mean is not a figure"),
        ({"prompts": FILES, "keep_best": "response_tokens_mean"}, "response_tokens_mean is not a figure"),
        ({"prompts": FILES, "keep_best": "part_other_mean"}, "part_other_mean is not a figure"),
        (
            {"prompts": FILES, "keep_best": "sampled_mean", "hold_weights": False},
            "several versions under hold_weights: false. Set evaluation.hold_weights: true",
        ),
        ({"prompts": ["e.jsonl"]}, r"evaluation.prompts: \[e.jsonl\] is neither a file nor files by name. Write one"),
        ({"prompts": {}}, "is neither a file nor files by name"),
        ({"prompts": {"a/b": "e.jsonl"}}, r"evaluation.prompts"),
    ],
)
def test_a_figure_that_no_evaluation_has_is_refused(tmp_path: Path, evaluation: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        read(tmp_path, **evaluation)


def test_named_files_are_found_beside_the_configuration(tmp_path: Path) -> None:
    assert read(tmp_path, prompts=FILES).evaluation.files == {name: tmp_path / file for name, file in FILES.items()}
    assert read(tmp_path).evaluation.files == {}


def test_which_steps_are_measured(tmp_path: Path) -> None:
    config = read(tmp_path, prompts="e.jsonl", every=3)
    assert [step for step in range(12) if config.is_measured(step)] == [3, 6]  # 9 is the last, 0 the given model
    assert not any(read(tmp_path).is_measured(step) for step in range(9))
    assert config.evaluation.pass_ks == (1, 2, 4)
    assert read(tmp_path, prompts="e.jsonl", num_answers=6).evaluation.pass_ks == (1, 2, 4, 6)
