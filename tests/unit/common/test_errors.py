"""The one error of a user's input, and the nearest word."""

from __future__ import annotations

from typing import Any

from gspo.common.errors import InputError, in_yaml, nearest


def test_an_input_error_reads_as_where_rule_and_fix() -> None:
    error = InputError("data.prompts", "no row is left", "Give a file with prompts")
    assert str(error) == "data.prompts: no row is left. Give a file with prompts"
    assert (error.where, error.rule, error.fix) == ("data.prompts", "no row is left", "Give a file with prompts")


def test_the_nearest_word_is_named() -> None:
    assert nearest("anwser", ["prompt", "answer", "id"]) == "Did you mean 'answer'?"


def test_with_none_near_all_are_named_in_order() -> None:
    assert nearest("zzz", {"b", "a"}) == "Known are: a, b."


def test_a_value_with_more_levels_than_python_has_frames_is_cut() -> None:
    value: list[Any] = []
    for _ in range(50_000):
        value = [value]
    assert in_yaml(value) == f"{'[' * 32}'...'{']' * 32}"
    assert in_yaml({"a": [1, {"b": ()}]}) == "{a: [1, {b: []}]}"
