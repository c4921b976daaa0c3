"""Values that a function may return; no other becomes a number."""

from __future__ import annotations

import json
import math
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import sympy

from gspo.reward.sandbox.calls import CallError
from gspo.reward.sandbox.inside.results import InvalidReturnError, list_values, plain_value
from gspo.reward.sandbox.inside.supplied import MAX_TEXT_CHARS, CallLog, TrainerState
from gspo.reward.sandbox.values import Failure, Value, read_value, with_logged
from gspo.reward.scoring.scorer import spread_over_groups
from gspo_proto.rollout_pb2 import Rollout


@pytest.mark.parametrize(
    ("returned", "number"),
    [
        (1, 1.0),
        (0.5, 0.5),
        (True, 1.0),
        (np.float32(0.25), 0.25),
        (np.array([2.0]), 2.0),
        (np.int64(3), 3.0),
        (np.bool_(True), 1.0),
        (Fraction(1, 4), 0.25),
        (Decimal("0.5"), 0.5),
        (sympy.Rational(1, 4), 0.25),
        (sympy.Integer(2), 2.0),
        (sympy.sqrt(4), 2.0),
    ],
)
def test_numbers_count(returned: Any, number: float) -> None:
    assert read_value(plain_value(returned), "trl") == Value(number)


@pytest.mark.parametrize(
    ("returned", "reason"),
    [
        ({"form": None}, "part 'form': returned None"),
        (math.nan, "returned NaN"),
        (math.inf, "returned infinity"),
        (-math.inf, "returned minus infinity"),
        (-1e308, "returned -1e+308, and rewards are from -1e+30 to 1e+30"),
        (10**400, "returned 1.79769e+308, and rewards are from -1e+30 to 1e+30"),
        (Fraction(-(10**400)), "returned -1.79769e+308, and rewards are from"),
        (Decimal("NaN"), "returned NaN"),
        (sympy.oo, "returned infinity"),
        (sympy.Symbol("x"), "returned Symbol where a number belongs"),
        (1j, "returned complex where a number belongs"),
        ([Fraction(1)], "returned list where a number belongs"),
        ({"a": 1e30, "b": 1e30}, "the sum of its parts is 2e+30, and rewards are from"),
        ("1.0", "returned str where a number belongs"),
        ([1.0], "returned list where a number belongs"),
        (np.array([1.0, 2.0]), "returned ndarray where a number belongs"),
        ({}, "returned no parts"),
        ({"form": 1.0, "sum": math.nan}, "part 'sum': returned NaN"),
        ({"form": {"deep": 1.0}}, "part 'form': returned"),
        ({f"part{number}": 0.0 for number in range(65)}, "returned 65 parts, and at most 64 are taken"),
        ({"": 1.0}, "returned a part named ''"),
        ({"x" * 101: 1.0}, "returned a part named 'xxx"),
        ({"a\nb": 1.0}, "returned a part named 'a\\nb': a name has 1 to 100 printable characters"),
    ],
)
def test_nothing_else_does(returned: Any, reason: str) -> None:
    value = read_value(plain_value(returned), "trl")
    assert isinstance(value, Failure)
    assert value.reason.startswith(reason)


@pytest.mark.parametrize(
    "raw",
    [
        {"parts": [1]},
        {"parts": 5},
        {"error": 5},
        {"error": None},
        [],
        {},
        "1",
        True,
        7,
        {"type": {}},
        {"parts": {"a": {}}},
    ],
)
def test_a_forged_value_is_a_failure(raw: Any) -> None:
    value = read_value(raw, "trl")
    assert isinstance(value, Failure)
    assert value.kind == "invalid_return"


def test_an_error_of_a_row_keeps_its_kind_if_there_is_such_a_kind() -> None:
    error = {"kind": "memory", "type": "MemoryError", "text": "MemoryError", "place": "r.py line 3"}
    assert read_value({"error": error}, "verl") == Failure("raised MemoryError (r.py line 3)", "memory")
    assert read_value({"error": error | {"kind": "fine", "text": 5}}, "verl") == Failure(
        "failed without a message", "exception"
    )


def test_named_parts_are_summed() -> None:
    value = read_value(plain_value({"form": 0.25, "sum": True}), "trl")
    assert value == Value(1.25, parts={"form": 0.25, "sum": 1.0})


def test_of_a_verl_dict_the_score_counts() -> None:
    value = read_value(plain_value({"score": 0.5, "acc": 1, "pred": "4"}), "verl")
    assert value == Value(0.5, extras={"acc": 1.0})
    assert read_value(plain_value({"acc": 1.0}), "verl") == Failure("returned a dict without 'score'", "invalid_return")


def test_none_of_a_trl_function_is_no_value_and_of_others_a_failure() -> None:
    assert read_value(plain_value(None), "trl") is None
    for convention in ("verl", "verl_batch", "openrlhf"):
        assert read_value(None, convention) == Failure("returned None", "invalid_return")


def test_a_log_has_means_and_a_value_of_each_answer() -> None:
    call_log = CallLog()
    assert call_log.as_json(2) == ""
    for number in (1, Fraction(1, 2)):
        call_log.log_metric("m", number)
    call_log.log_extra("c", ["x" * (MAX_TEXT_CHARS + 5), {"a"}])
    numbers: Any = np.array([1, math.nan])
    call_log.log_extra("n", numbers)
    logged = call_log.as_json(2)
    first, failed = with_logged([Value(1.0, extras={"own": 2.0}), Failure("why", "exception")], logged)
    assert failed == Failure("why", "exception")
    assert isinstance(first, Value)
    assert (first.extras, first.columns["n"]) == ({"m": 0.75, "own": 2.0}, 1.0)
    assert first.columns["c"].endswith("xxx ... (5 characters cut)")
    assert json.loads(logged)["columns"][1] == {"c": "{'a'}", "n": "nan"}
    with pytest.raises(InvalidReturnError, match="logged 2 values in the column 'c' for 3 completions"):
        call_log.as_json(3)
    with pytest.raises(InvalidReturnError, match="logged str as the metric 'm', where a number belongs"):
        call_log.log_metric("m", "1")
    with pytest.raises(AttributeError, match="has global_step alone, and not max_steps"):
        _ = TrainerState(3).max_steps


@pytest.mark.parametrize(
    ("logged", "why"),
    [
        ("[]", "Expected `object`"),
        ("{", "cannot be taken"),
        ('{"metrics": {}, "columns": []}', "0 rows for 1 answers"),
        ('{"metrics": {"m": 1e40}, "columns": [{}]}', "the metric 'm' is 1e[+]40, and rewards are"),
        ('{"metrics": {"m": NaN}, "columns": [{}]}', "cannot be taken"),
        ('{"metrics": {"a\\nb": 1}, "columns": [{}]}', "a name has 1 to 100 printable characters"),
        ('{"metrics": {}, "columns": [[1]]}', "Expected `object`"),
        ('{"metrics": {}, "columns": [{"a": ' + "[" * 10**5 + "]" * 10**5 + "}]}", "cannot be taken"),
    ],
)
def test_a_forged_log_is_a_failure_of_the_call(logged: str, why: str) -> None:
    with pytest.raises(CallError, match=why) as failed:
        with_logged([Value(1.0)], logged)
    assert failed.value.kind == "invalid_return"


def test_extra_logs_may_be_a_number_of_all_answers() -> None:
    values = list_values({"rewards": [1, 0], "extra_logs": {"tries": 3, "length": [5, 6]}})
    assert [read_value(value, "openrlhf") for value in values] == [
        Value(1.0, extras={"tries": 3.0, "length": 5.0}),
        Value(0.0, extras={"tries": 3.0, "length": 6.0}),
    ]


@pytest.mark.parametrize(
    ("logs", "why"),
    [
        ({"tries": "three"}, r"returned str as extra_logs\['tries'\], where a number or a list belongs"),
        ({"tries": [1]}, r"returned 1 values as extra_logs\['tries'\] for 2 answers"),
        ([1, 2], "returned list as extra_logs, where a dict"),
    ],
)
def test_extra_logs_of_another_form_name_their_key(logs: Any, why: str) -> None:
    with pytest.raises(InvalidReturnError, match=why):
        list_values({"rewards": [1, 0], "extra_logs": logs})


def test_a_batch_may_come_as_list_tuple_or_array() -> None:
    assert list_values([1, 0.5]) == list_values((1, 0.5)) == list_values(np.array([1, 0.5])) == [1.0, 0.5]
    assert list_values(value for value in (1, 0)) == [1.0, 0.0]


@pytest.mark.parametrize("returned", [1.0, None, "ok", {"a": 1.0}, np.float64(1)])
def test_a_batch_is_nothing_else(returned: Any) -> None:
    with pytest.raises(InvalidReturnError, match="a list of numbers belongs"):
        list_values(returned)


def test_every_group_is_tried_before_a_second_of_its_answers() -> None:
    batch = [Rollout(group=group) for group in (5, 5, 5, 6, 6, 7)]
    assert spread_over_groups(batch) == [0, 3, 5, 1, 4, 2]
