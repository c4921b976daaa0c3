"""A submission before it runs: version, imports, places. Tokens of callers, and usage."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import msgspec
import pytest
from pydantic import ValidationError

from gspo.common.config.reward import RewardFunction
from gspo.common.errors import InputError
from gspo.reward.functions.policy_code import UnreadableTestError, code_of, read_tests, same
from gspo.reward.http_api.bodies import TryBody
from gspo.reward.registry.records import MAX_COLUMNS, RequestedLimits, Submission, version_of
from gspo.reward.registry.usage import bucket_of, percentiles
from gspo.reward.sandbox.inside import read_source
from gspo.reward.sandbox.launch import Importable, packages_to_share
from gspo.reward.submissions.admission import InputRefusedError, Outline, Problem, check_imports
from gspo.reward.submissions.callers import Caller, Callers, RateLimit, read_tokens

ALLOWED = ("numpy", "math-verify")
SOURCE = "def reward(completions): return [1.0]\n"


def test_a_version_is_the_hash_of_what_decides_the_value() -> None:
    plain = Submission(name="a", source=SOURCE)
    assert plain.version == hashlib.sha256(SOURCE.encode()).hexdigest()
    same_content = Submission(name="b", source=SOURCE, activate=True)
    assert same_content.version == plain.version
    others = {
        version_of(SOURCE.encode(), entry="reward"),
        version_of(SOURCE.encode(), kind="environment"),
        version_of(SOURCE.encode(), limits=RequestedLimits(timeout_s=5.0)),
        version_of(SOURCE.encode(), args={"a": 1}),
        version_of(SOURCE.encode() + b"#"),
    }
    assert len(others | {plain.version}) == 6


@pytest.mark.parametrize(
    ("source", "line", "column", "message"),
    [
        ("import requests", 1, 1, "imports 'requests'"),
        ("import os, numpy.linalg, torch", 1, 1, "imports 'torch'"),
        ("def f():\n    from flask import Flask", 2, 5, "imports 'flask'"),
        ("from . import other", 1, 1, "imports '.', and no package holds it. Import a module of `modules`"),
        ("x = __import__('requests')", 1, 5, "imports 'requests'"),
        ("import importlib\nimportlib.import_module('aiohttp')", 2, 1, "imports 'aiohttp'"),
        ("def f(:", 1, 7, "invalid syntax"),
        ("x = 1\n  y = 2", 2, 2, "unexpected indent"),
        ("x = '\0'", 1, 1, "null bytes"),
        ("(" * 300, 1, 201, "too many nested parentheses"),
    ],
)
def test_a_source_is_refused_with_its_place(source: str, line: int, column: int, message: str) -> None:
    with pytest.raises(InputRefusedError) as refused:
        check_imports({"": outline_of(source)}, ALLOWED)
    (problem,) = refused.value.problems
    assert (problem.line, problem.column) == (line, column)
    assert message in problem.text


def outline_of(source: str) -> Outline:
    """As Admission does, without a sandbox."""
    task = {"source": source, "modules": {}}
    outline = msgspec.convert(json.loads(json.dumps(read_source.reset(task)[0][""])), Outline)
    if outline.wrong:
        raise InputRefusedError([Problem("syntax", *outline.wrong)])
    return outline


def test_a_module_is_checked_as_the_source_is() -> None:
    outlines = {
        "": outline_of("import helpers, lib.words"),
        "helpers.py": outline_of("import json\n\nimport requests\nfrom . import other"),
        "lib/words.py": outline_of("from . import other\nfrom ..lib import other"),
    }
    with pytest.raises(InputRefusedError) as refused:
        check_imports(outlines, ALLOWED)
    first, second = refused.value.problems
    assert first.text.startswith("helpers.py, line 3, column 1: imports 'requests', which is neither")
    assert second.text.startswith("helpers.py, line 4, column 1: imports '.', and no package holds it")
    assert (first.field, first.line, first.column) == ("modules.helpers.py", None, None)


def test_every_forbidden_import_is_named_at_once() -> None:
    with pytest.raises(InputRefusedError) as refused:
        check_imports({"": outline_of("import requests\nimport json\nimport flask")}, ALLOWED)
    assert [problem.line for problem in refused.value.problems] == [1, 3]


def test_allowed_imports_pass_and_definitions_have_their_place() -> None:
    outline = outline_of("import json, math_verify\nfrom numpy.linalg import norm\n\ndef reward(completions): ...")
    check_imports({"": outline}, ALLOWED)
    assert outline.place_of(("reward",)) == outline.place_of(("other",)) == (4, 1)
    assert outline_of("x = 1").place_of(("reward",)) == (1, 1)


def test_packages_are_seen_without_parsing() -> None:
    text = (
        "import torch\nfrom numpy.linalg import norm\nimport sympy as s, os\n"
        "def f(:\n    import scipy\nfrom . import regex\nmy import torch\n" + "(" * 10**5
    )
    assert packages_to_share([text], Importable(())) == ["torch", "numpy.linalg", "sympy", "scipy"]
    assert "torch" not in packages_to_share([text], Importable((Path("/nowhere/torch.py"),)))


def test_tokens_are_read_line_by_line(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text("# who\n\nann submit 0123456789abcdef\nbob read fedcba9876543210\n")
    callers = Callers("shared-secret", file)
    assert callers.find("0123456789abcdef") == Caller("ann", "submit")
    assert callers.find("fedcba9876543210") == Caller("bob", "read")
    assert callers.find("shared-secret") == Caller("service", "submit")
    assert callers.find("") is callers.find("Fedcba9876543210") is None
    assert Callers("", None).find("") == Caller("anonymous", "submit")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("ann submit", "line 1: has 2 words"),
        ("ann admin 0123456789abcdef", "line 1: the role 'admin' is unknown"),
        ("ann read short", "at least 16 characters"),
        ("a read 0123456789abcdef\nb read 0123456789abcdef", "line 2: a token is there twice"),
    ],
)
def test_a_wrong_tokens_file_is_refused_and_no_token_is_shown(tmp_path: Path, line: str, message: str) -> None:
    (tmp_path / "tokens").write_text(line)
    with pytest.raises(InputError) as refused:
        read_tokens(tmp_path / "tokens")
    assert message in str(refused.value)
    assert "0123456789abcdef" not in str(refused.value)


def test_a_caller_has_so_many_calls_a_minute() -> None:
    rate = RateLimit(3)
    assert [rate.wait_s("ann", "submit") for _ in range(3)] == [0.0, 0.0, 0.0]
    assert 0 < rate.wait_s("ann", "submit") <= 20
    assert rate.wait_s("bob", "submit") == 0.0


def test_percentiles_are_bounds_of_their_buckets() -> None:
    assert percentiles({}) == {}
    times_s = percentiles({bucket_of(0.01): 98, bucket_of(0.5): 1, bucket_of(2.0): 1})
    for name, seconds in (("p50", 0.01), ("p90", 0.01), ("p99", 0.5), ("longest", 2.0)):
        assert seconds <= times_s[name] <= seconds * 1.1


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({}, "path: is missing"),
        ({"path": "a.py", "builtin": "regex"}, "builtin: stands beside path"),
        ({"url": "ftp://a"}, "String should match"),
        ({"builtin": "magic"}, "Input should be"),
    ],
)
def test_a_function_of_a_configuration_is_one_thing(spec: dict[str, str], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        RewardFunction.model_validate(spec)


def test_a_function_has_a_label() -> None:
    labels = [
        RewardFunction.model_validate(spec).label
        for spec in ({"path": "a/b.py"}, {"builtin": "regex"}, {"url": "http://h:1/x"}, {"name": "n"})
    ]
    assert labels == ["b", "regex", "h-1", "n"]


@pytest.mark.parametrize(
    ("spec", "run", "expected"),
    [
        ("assert add(1, 2) == 3", {"call": "add(1, 2)"}, 3),
        ("assert [1] == f('a')", {"call": "f('a')"}, [1]),
        ({"call": "f()", "expected": None}, {"call": "f()"}, None),
        ({"stdin": "1", "expected": "2"}, {"stdin": "1"}, "2"),
    ],
)
def test_the_forms_of_a_code_test(spec: object, run: dict[str, str], expected: object) -> None:
    for tests in ([spec], json.dumps([spec])):
        (test,) = read_tests(tests)
        assert (test.run, test.expected) == (run, expected)


@pytest.mark.parametrize("spec", [[], "x", None, ["assert f() > 1"], ["f() == 1"], [{"call": "f()"}], [1]])
def test_other_code_tests_cannot_be_read(spec: object) -> None:
    with pytest.raises(UnreadableTestError):
        read_tests(spec)


def test_results_of_code_are_compared_by_kind_too() -> None:
    assert same({"a": [1, 2.0]}, {"a": [1, 2]})
    assert not same(True, 1)
    assert not same([1], (1,))
    assert not same([1], [1, 2])
    assert code_of("a\n```python\nx = 1\n```\n```\ny\n```") == "y\n"
    assert code_of("x = 1") == "x = 1"


def test_a_million_wrong_elements_are_one_problem() -> None:
    with pytest.raises(ValidationError) as refusal:
        Submission.model_validate({"name": "exact", "source": "x", "tests": list(range(100_000))})
    assert refusal.value.error_count() == 1


def test_a_row_has_a_bounded_number_of_columns() -> None:
    row = {"completion": "42", **{f"column_{number}": 1 for number in range(MAX_COLUMNS)}}
    with pytest.raises(ValidationError, match=f"at most {MAX_COLUMNS} are taken"):
        TryBody.model_validate({"rows": [row]})
