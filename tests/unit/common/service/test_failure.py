"""The error that ends a process, as the supervisor reads it in the process's log."""

from __future__ import annotations

import importlib
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

from gspo.common.errors import InputError
from gspo.common.service.failure import OUTSIDE, ProcessFailure, in_step

_DIES = """
from gspo.common.service.logs import set_up_logs
set_up_logs("info", name="learner-0")
import no_such_module
"""


def dies_of(error: Exception, *, caused_by: Exception | None = None) -> ProcessFailure:
    try:
        with in_step(8), in_step(7):
            raise error from caused_by
    except type(error) as raised:
        return ProcessFailure.of(raised, f"{type(raised).__name__}: {raised}")


def test_it_has_the_place_of_the_first_error_and_the_step_within() -> None:
    def parse() -> None:
        raise KeyError("reward")

    try:
        with in_step(7):
            try:
                parse()
            except KeyError as error:
                raise InputError("algorithm.loss.path", "raised", "Correct it") from error
    except InputError as raised:
        failure = ProcessFailure.of(raised, str(raised))
    assert (failure.kind, failure.step, failure.is_outside) == ("KeyError", 7, False)
    path, line = failure.place.rsplit(":", 1)
    assert path == __file__
    assert 'raise KeyError("reward")' in Path(path).read_text().splitlines()[int(line) - 1]


def test_the_same_error_elsewhere_or_in_another_step_is_another() -> None:
    first, again = (dies_of(ValueError(text)) for text in ("reward 3", "reward 4"))
    assert first == again, "a message may name a time, a path or an address"
    assert first != ProcessFailure(first.kind, first.place, 9)
    assert first != ProcessFailure(first.kind, "loss.py:3", first.step)
    assert first != ProcessFailure("TypeError", first.place, first.step)


@pytest.mark.parametrize(
    "error", [OSError(98, "Address already in use"), ConnectionResetError(), TimeoutError(), RedisConnectionError()]
)
def test_a_cause_outside_may_pass(error: Exception) -> None:
    assert dies_of(error).is_outside
    assert dies_of(RuntimeError("no answer"), caused_by=error).is_outside
    assert not dies_of(RuntimeError("no answer")).is_outside


@pytest.mark.parametrize("name", sorted(OUTSIDE))
def test_the_names_of_outside_errors_are_those_of_classes(name: str) -> None:
    module, _, kind = name.rpartition(".")
    library, *parts = module.split(".")
    if library == "vllm":  # its import takes many seconds
        spec = importlib.util.find_spec(library)
        assert spec is not None and spec.origin is not None
        assert f"\nclass {kind}(" in Path(spec.origin).parent.joinpath(*parts).with_suffix(".py").read_text()
        return
    listed = getattr(importlib.import_module(module.removesuffix("._safetensors_rust")), kind)
    assert f"{listed.__module__}.{listed.__qualname__}" == name


def test_an_error_before_the_service_runs_is_logged_too() -> None:
    done = subprocess.run([sys.executable, "-c", _DIES], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    failure = ProcessFailure.from_log(json.loads(done.stderr))
    assert (failure.kind, failure.place, failure.step) == ("ModuleNotFoundError", "<string>:4", None)
    assert "no_such_module" in failure.reason
