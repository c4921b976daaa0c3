"""A measurement in a child process: its result, and the error of one that fails or takes too long."""

from __future__ import annotations

import pytest

from benchmarks.harness.child_process import MeasurementError, run_child


def test_a_function_gets_its_arguments_and_returns_its_result() -> None:
    assert run_child("builtins.dict", {"a": 1, "b": [2.5]}, timeout_s=60) == {"a": 1, "b": [2.5]}


def test_a_failure_is_an_error_with_the_end_of_the_output() -> None:
    with pytest.raises(MeasurementError, match=r"builtins.int ended with exit code 1(?s:.*)TypeError"):
        run_child("builtins.int", {"number": 1}, timeout_s=60)


def test_a_child_that_takes_too_long_is_ended() -> None:
    with pytest.raises(MeasurementError, match=r"subprocess.run took longer than 2 s"):
        run_child("subprocess.run", {"args": ["sleep", "60"]}, timeout_s=2)
