"""The list of promises holds: each can still be broken as it says, and its tests are there.

What it is not: the breaking, which takes hours (`make test-promises`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import pytest

from tests.promises import __main__ as runner
from tests.promises.breaks import CODE, changed, definitions, definitions_of
from tests.promises.catalogue import Promise, read_promises
from tests.support.repository.source_files import fail_with, place

CATALOGUE = "tests/promises/promises.yml"
PROMISES = read_promises()
SOURCE = """
LIMIT: float = 60.0
LUA = '''
return 1
'''


class Store:
    def take(self, name, *, most=3):
        'é: positions are of bytes'; assert most < (
        3)  # of them
        if name in self.names:
            raise KeyError
        self.put(name, 'a' 'b', most = most)
        return f"{name} é"
"""


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A module."""
    (tmp_path / "store.py").write_text(SOURCE)
    return tmp_path / "store.py"


def test_there_are_as_many_as_we_say() -> None:
    assert len(PROMISES) >= 40
    assert len({promise.promise for promise in PROMISES}) == len(PROMISES)


def broken_entries(promise: Promise) -> Iterator[str]:
    """Yield each fault of an entry of the list."""
    entry = f"{place(CATALOGUE, f'- promise: {promise.promise}')}: {promise.promise}"
    try:
        promise.broken()
        promise.test_ids()
    except ValueError as error:
        yield f"{entry}: {error}"
    if promise.new == promise.old:
        yield f"{entry}: `new` is `old`: give code that breaks it"
    if not promise.tests:
        yield f"{entry}: no test: name one that fails then"


def test_every_promise_can_be_broken_and_has_its_tests() -> None:
    fail_with(broken for promise in PROMISES for broken in broken_entries(promise))


@pytest.mark.parametrize(
    ("name", "old", "new", "before", "after"),
    [
        ("LIMIT", "60.0", "6.0", "60.0", "(6.0)"),
        ("LUA", "return 1", "return 0", "return 1", "return 0"),
        ("take", "_ < 3", "_ <= 3", "most < (\n        3)", "(most <= 3)"),
        ("take", "if name in self.names: ...", "pass", "if name in self.names:\n            raise KeyError", "pass"),
        ("take", "most=most", "most=0", "most = most", "most = (0)"),
        ("take", "self.put(name, ...)", "pass", "self.put(name, 'a' 'b', most = most)", "pass"),
        ("take", 'self.put(_, "ab", most=_)', "_ or _", "self.put(name, 'a' 'b', most = most)", "(name or most)"),
        ("take", 'return f"{_} é"', "return _", 'return f"{name} é"', "return name"),
    ],
)
def test_code_is_matched_by_its_syntax(store: Path, name: str, old: str, new: str, before: str, after: str) -> None:
    scopes = [known for known in definitions_of(str(store)) if known.name.endswith(f".{name}")]
    assert changed(scopes, old, new) == (str(store), SOURCE.replace(before, after))


@pytest.mark.parametrize("old", ["most", "_ < 4", "if", "name; most", "return 1"])
def test_what_does_not_stand_there_once_is_refused(store: Path, old: str) -> None:
    with pytest.raises(ValueError, match=r"stands \d times|wrong syntax|is not one"):
        changed(definitions_of(str(store))[-1:], old, "pass")


def test_a_name_may_lack_its_beginning() -> None:
    full = "gspo_core.token_losses.clip_loss"
    for name in ("clip_loss", "token_losses.clip_loss", full):
        assert [known.name for known in definitions(name, CODE)] == [full]
    with pytest.raises(ValueError, match=r"nothing in .* is named ratio:"):
        definitions("ratio", CODE)


@dataclass(frozen=True)
class Case:
    """As much of pytest's item as the choice of cases reads."""

    nodeid: str
    is_long: bool = False

    def get_closest_marker(self, name: str) -> bool:
        return self.is_long and name == "long"


def test_long_cases_are_run_where_a_test_has_no_others() -> None:
    items = [Case("a.py::long", is_long=True), Case("a.py::both[1]"), Case("a.py::both[1000]", is_long=True)]
    runner.ShortCases.pytest_collection_modifyitems(cast("list[pytest.Item]", items))
    assert [item.nodeid for item in items] == ["a.py::long", "a.py::both[1]"]


def test_a_break_is_tried_again_when_it_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "_RECORD", tmp_path / ".cache/promises.json")
    promise, other = PROMISES[:2]
    runner.Record().add(promise, True, 60.0)
    runner.Record().add(other, False, 180.0)
    record = runner.Record()
    assert [record.has(each) for each in (promise, other)] == [True, False]
    assert not record.has(replace(promise, new="0"))
    assert record.minutes([promise, other, PROMISES[2]]) == 1 + 3 + 2
