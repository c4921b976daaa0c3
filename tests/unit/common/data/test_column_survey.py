"""Likely mistakes of columns, by line, and text that looks like numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gspo.cli import findings
from gspo.common.config.loading import parse_config
from gspo.common.data.column_survey import ColumnSurvey, number_columns
from gspo.common.data.row_reader import RowReader


def survey(path: Path) -> ColumnSurvey:
    seen = ColumnSurvey()
    for _ in seen.watch(RowReader("data.prompts", [path])):
        pass
    return seen


def written(folder: Path, rows: list[dict[str, Any]]) -> Path:
    path = folder / "p.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


GOOD = {"prompt": "p", "answer": "4"}


@pytest.mark.parametrize(
    ("place", "row", "mistake"),
    [
        (60, {"prompt": "p", "answer": 4}, "column 'answer' is text in 99 rows, and a number in p.jsonl, line 61"),
        (60, {"prompt": "p", "answer": ["4"]}, "column 'answer' is text in 99 rows, and a list in p.jsonl, line 61"),
        (99, {"prompt": "p"}, "column 'answer' has no value in p.jsonl, line 100"),
        (0, {"prompt": "p"}, "column 'answer' has no value in p.jsonl, line 1"),
        (7, {"prompt": "p", "answer": None}, "column 'answer' has no value in p.jsonl, line 8"),
        (7, {"prompt": "p", "answer": ""}, "column 'answer' is text in 99 rows, and empty text in p.jsonl, line 8"),
        (7, {"prompt": "p", "answer": "4 "}, "column 'answer' has blanks around its text in p.jsonl, line 8"),
    ],
)
def test_a_slip_in_one_row_is_named(tmp_path: Path, place: int, row: dict[str, Any], mistake: str) -> None:
    rows = [GOOD] * 100
    rows[place] = row
    assert list(survey(written(tmp_path, rows)).mistakes(prompt_column="prompt")) == [mistake]


def test_what_many_rows_have_is_meant(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        GOOD,
        {"prompt": "p", "answer": 4, "hint": " x"},
        {"prompt": " p", "answer": [1]},
    ] * 20
    assert list(survey(written(tmp_path, rows)).mistakes(prompt_column="prompt")) == []


def test_images_as_text_or_names_are_said(tmp_path: Path) -> None:
    rows = [{"prompt": "p", "a": "iVBORw0KGgoAAA", "b": f"img/{number}.png"} for number in range(9)]
    first, second = survey(written(tmp_path, rows)).mistakes(prompt_column="prompt")
    assert first.startswith("column 'a' seems to hold images, which the policy does not see; data.types.a: omit")
    assert second.startswith("column 'b' seems to hold images")


def test_the_doctor_counts_columns_that_look_like_numbers(tmp_path: Path) -> None:
    (tmp_path / "p.csv").write_text("prompt,answer,level,name\n1,007,1.5,a\n2,010,-2e3,b\n3,,1,7\n")
    assert number_columns(survey(tmp_path / "p.csv"), {}, "prompt") == ["answer", "level"]
    keys: dict[str, Any] = {
        "name": "r",
        "model": {"path": "m"},
        "data": {"prompts": ["p.csv", "p.csv"]},
        "reward": {"functions": [{"path": "r.py"}]},
        "run": {"total_steps": 3},
    }
    (finding,) = findings.data(parse_config(keys, tmp_path))
    assert finding.text == (
        "p.csv, p.csv: 6 rows, columns prompt, answer, level, name; 2 of text look like numbers: answer, level"
    )
    assert "data.types: {answer: number}" in finding.advice
    keys["data"] = {"prompts": "p.csv", "types": {"answer": "number", "level": "text"}}
    (finding,) = findings.data(parse_config(keys, tmp_path))
    assert (finding.text, finding.advice) == ("p.csv: 3 rows, columns prompt, answer, level, name", "")
