"""Configuration files that a stranger wrote: each is one line of error, in a moment."""

from __future__ import annotations

import time
from pathlib import Path
from textwrap import indent

import pytest

from gspo.common.bounded_yaml import load_yaml
from gspo.common.config.loading import read_mapping
from gspo.common.errors import InputError

BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 10)
)
# Case -> text, words of the error.
HOSTILE = {
    "bomb": (BOMB, "line 5, column .*: more than 50,000 values"),
    "bomb in a mapping": ("generation:\n  engine:\n" + indent(BOMB, "    "), "50,000"),
    "itself": ("a: &x [*x]", "line 1, column 8: .x has no value before it, or is a part of it"),
    "no anchor": ("a: *x", "x has no value before it"),
    "brackets": ("a: " + "[" * 50_000, "line 1, column 102: nested deeper than 100"),
    "braces": ("{a: " * 50_000, "nested deeper than 100"),
    "dashes": ("- " * 50_000 + "x", "nested deeper than 100"),
    "indentation": ("\n".join(" " * n + "a:" for n in range(1000)), "nested deeper than 100"),
    "digits": (f"seed: {'9' * 6000}", "has a number or a date that cannot be read"),
    "date": ("since: 2024-13-45", "has a number or a date that cannot be read .month must be"),
    "length": (f"a: {'x' * (5 << 20)}", "at most 1048576"),
    "tag": ("a: !!python/object/apply:os.system [true]", "could not determine a constructor"),
    "key": ("? [a, b]\n: 1", "line 1, column 3: a key is one word or number"),
    "twice": ("a: 1\na: 2", "'a' is there twice"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_file_is_one_error_in_a_moment(tmp_path: Path, case: str) -> None:
    text, words = HOSTILE[case]
    path = tmp_path / "config.yaml"
    path.write_text(text)
    began = time.process_time()
    with pytest.raises(InputError, match=words):
        read_mapping(path)
    assert time.process_time() - began < 10


def test_anchors_and_merges_of_honest_files_work() -> None:
    text = "base: &b {x: 1, y: [2, 3]}\nmore:\n  <<: *b\n  z: *b\nname: &n text\nagain: *n\n"
    value = load_yaml(text)
    assert value["more"] == {"x": 1, "y": [2, 3], "z": value["base"]}
    assert value["again"] == "text"
