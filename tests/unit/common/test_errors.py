"""The one error of a user's input, and the nearest word."""

from __future__ import annotations

from gspo.common.errors import InputError, nearest


def test_an_input_error_reads_as_where_rule_and_fix() -> None:
    error = InputError("data.prompts", "no row is left", "Give a file with prompts")
    assert str(error) == "data.prompts: no row is left. Give a file with prompts"
    assert (error.where, error.rule, error.fix) == ("data.prompts", "no row is left", "Give a file with prompts")


def test_the_nearest_word_is_named() -> None:
    assert nearest("anwser", ["prompt", "answer", "id"]) == "Did you mean 'answer'?"


def test_with_none_near_all_are_named_in_order() -> None:
    assert nearest("zzz", {"b", "a"}) == "Known are: a, b."
