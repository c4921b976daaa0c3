"""`gspo reward compare` on a real log and in a real sandbox."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest

from gspo.common.errors import InputError
from gspo.learner.assembly.rows import row_from_scored
from gspo.learner.storage.step_log import StepLog
from gspo.runlog.function_files import FunctionSource, write_source
from gspo.view.log_trial import TriedRollout, try_on_log
from tests.support.service_process import make_run
from tests.unit.learner.conftest import _scored

VERSION = "ab" * 32
SOURCE = """def reward(completions, answer, **columns):
    return [float(text == str(a)) for text, a in zip(completions, answer)]
"""


def tried_on(run_dir: Path, what: str, name: str, steps: int, most: int) -> list[TriedRollout]:
    return asyncio.run(try_on_log(run_dir, what, name, steps, most, 60.0))


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Two groups of two answers, 2 and 3 to a question whose answer is 2; scored 0 and 1 by an older version."""
    folder = make_run(tmp_path, tmp_path).run_dir
    (folder / "environment.json").write_text("{}")
    (folder / "log").mkdir()
    rows = []
    for group in (1, 2):
        for number in (0, 1):
            parts = [{"name": "sums", "value": float(number), "weight": 1.0, "version": "cd" * 32}]
            row = row_from_scored(_scored(group, number, text=str(2 + number), reward=float(number)))
            rows.append(replace(row, step=1, outcome="eos", parts_json=json.dumps(parts)))
    StepLog(folder / "log").write(1, rows)
    source = FunctionSource("sums", VERSION, "reward", "sums.py", "", SOURCE, {}, True, [], 1.0)
    write_source(folder / "log", source)
    write_source(folder / "log", replace(source, version="ef" * 32, is_tryable=False))
    return folder


def test_a_version_and_a_file_score_logged_rollouts(run_dir: Path, tmp_path: Path) -> None:
    tried = tried_on(run_dir, VERSION[:8], "", 1, 256)
    assert [(rollout.old, rollout.new, rollout.is_flipped) for rollout in tried] == [
        (0.0, 1.0, True),
        (1.0, 0.0, True),
    ] * 2
    file = tmp_path / "new.py"
    file.write_text("from helpers import share\n" + SOURCE.replace("float(text == str(a))", "share(text)"))
    (tmp_path / "helpers.py").write_text("def share(text):\n    return 1 / (int(text) - 2) if text != '9' else None\n")
    tried = tried_on(run_dir, str(file), "sums", 1, 2)
    assert len(tried) == 2, "whole groups alone"
    assert "raised ZeroDivisionError" in tried[0].failure
    assert (tried[1].new, tried[1].new_reward) == (1.0, 1.0)


@pytest.mark.parametrize(
    ("what", "name", "words"),
    [
        ("missing.py", "", "neither a version in the log nor a file"),
        ("efefefef", "", "is more than a source"),
        (VERSION, "other", "Give one that scored these rollouts: sums"),
    ],
)
def test_bad_input_is_an_error(run_dir: Path, what: str, name: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        tried_on(run_dir, what, name, 1, 256)


def test_a_file_that_does_not_load_says_why(run_dir: Path, tmp_path: Path) -> None:
    file = tmp_path / "new.py"
    file.write_text("import no_such_module\n\ndef reward(completions):\n    return []\n")
    with pytest.raises(InputError, match="no_such_module"):
        tried_on(run_dir, str(file), "sums", 1, 256)
