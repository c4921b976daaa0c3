"""The promises of the project: what breaks each, and the tests that must fail then."""

from __future__ import annotations

import hashlib
import re
from dataclasses import astuple, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from tests.promises.breaks import CODE, TESTS, changed, definitions, files_with
from tests.support.repository.source_files import text_of

_MODULE = re.compile(r"\b(tests(?:\.\w+)+)(?: import (\([^)]*\)|.*))?")


@dataclass(frozen=True)
class Promise:
    """A sentence that holds, and a change after which it does not.

    Attributes:
        old: Stands there once: code as `changed` takes it, or a text of `file`.
        new: What takes its place.
        tests: Names of tests, of which each must fail then; where several have a name, with the module: `module.test`.
        code: The name of the code that breaks, as `definitions` takes it.
        file: Instead of it, a file in another language.
    """

    promise: str
    old: str
    new: str
    tests: list[str]
    code: str = ""
    file: str = ""

    def broken(self) -> tuple[str, str]:
        """Find the file that changes, and its text with the change; ValueError if there is not one place for it."""
        if self.code:
            return changed(definitions(self.code, CODE), self.old, self.new)
        if (count := text_of(self.file).count(self.old)) != 1:
            raise ValueError(f"`old` stands {count} times in {self.file}: give text that stands there once")
        return self.file, text_of(self.file).replace(self.old, self.new)

    def test_ids(self) -> list[str]:
        """Return the tests as pytest names them; ValueError for a name that is not of one test."""
        return [_test_id(name) for name in self.tests]

    def digest(self) -> str:
        """Return the hash of the entry, the file that breaks, its tests, and the modules that these name."""
        files = {test.partition("::")[0] for test in self.test_ids()}
        shared = {str(folder / "conftest.py") for file in files for folder in Path(file).parents}
        named = set[str]().union(*map(_named, files | shared))
        sources = "".join(map(text_of, [self.broken()[0], *sorted(files | shared | named)]))
        return hashlib.sha256(f"{astuple(self)}{sources}".encode()).hexdigest()


def _test_id(name: str) -> str:
    """Without syntax trees: a test stands at the beginning of a line."""
    files = files_with(name, TESTS)
    if len(files) != 1:
        raise ValueError(f"{len(files)} tests are named {name} {files or ''}: name a test, with its module if need be")
    return f"{files[0]}::{name.rpartition('.')[2]}"


@cache
def _named(file: str) -> frozenset[str]:
    """The modules of tests that a file names, as it imports or starts them, and those that these name."""
    known, waiting = set[str](), [file]
    while waiting:
        for package, names in _MODULE.findall(text_of(waiting.pop())):
            modules = [package, *(f"{package}.{name}" for name in re.findall(r"\w+", names))]
            files = {f"{module.replace('.', '/')}.py" for module in modules} - known
            known |= files
            waiting.extend(files)
    return frozenset(known)


def read_promises() -> list[Promise]:
    """All of them, in their order."""
    entries: list[dict[str, Any]] = yaml.safe_load((Path(__file__).parent / "promises.yml").read_text())
    # `new: True` is code.
    codes = [{key: str(entry[key]) for key in ("old", "new")} for entry in entries]
    return [Promise(**entry | code) for entry, code in zip(entries, codes, strict=True)]
