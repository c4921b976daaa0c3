"""Break the promises one by one in a copy of the tree, and see that their tests notice: `make test-promises`.

A break that was noticed is not tried again until its entry, the broken file or the tests change. The tests must pass in
the unbroken copy first. The same command continues an interrupted run. Exit codes: 0 every break was noticed, 1 one was
not, 2 no promise has one of the words.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path

import pytest

from tests.promises.catalogue import Promise, read_promises
from tests.support.repository.source_files import ROOT

_RECORD = ROOT / ".cache/promises.json"
_TIMEOUT_S = 600
# Imported once, before each forked run: most of a test's time would be their import.
_SLOW_IMPORTS = ("torch", "hypothesis.extra.numpy", "pyarrow.parquet", "pydantic", "transformers", "structlog", "redis")
_OURS = ("tests", "gspo", "gspo_core", "gspo_proto", "benchmarks")
_FORK = multiprocessing.get_context("fork")


class Record:
    """The last try of each promise, on the disk: its digest if it was noticed, and its time."""

    def __init__(self) -> None:
        self._tries: dict[str, dict[str, str | float]] = json.loads(_RECORD.read_text()) if _RECORD.exists() else {}

    def has(self, promise: Promise) -> bool:
        """Whether this break was noticed, and nothing of it has changed since."""
        return self._tries.get(promise.promise, {}).get("digest") == promise.digest()

    def add(self, promise: Promise, is_noticed: bool, seconds: float) -> None:
        """Write one down; an interrupted run loses nothing."""
        digest = promise.digest() if is_noticed else ""
        self._tries[promise.promise] = {"digest": digest, "seconds": round(seconds, 1)}
        _RECORD.parent.mkdir(exist_ok=True)
        unfinished = _RECORD.with_suffix(".new")
        unfinished.write_text(json.dumps(self._tries, indent=0))
        unfinished.replace(_RECORD)

    def minutes(self, promises: Sequence[Promise]) -> float:
        """Estimate their time from the last tries, from the mean where there is none."""
        known = {name: float(tried["seconds"]) for name, tried in self._tries.items()}
        mean = sum(known.values()) / max(len(known), 1)
        return sum(known.get(promise.promise, mean) for promise in promises) / 60


def copy_tree(target: Path) -> None:
    """What git tracks, and new files that it does not ignore, as they are on the disk."""
    words = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, target / name)


class ShortCases:
    """Pytest's plugin: of each test the cases that `make test` runs, or all of a test that has none of these."""

    @staticmethod
    def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
        """Leave out the long cases beside short ones."""
        short = {_test_of(item) for item in items if not item.get_closest_marker("long")}
        items[:] = [item for item in items if not item.get_closest_marker("long") or _test_of(item) not in short]


def _test_of(item: pytest.Item) -> str:
    return item.nodeid.partition("[")[0]


def _run_pytest(root: Path, tests: Sequence[str], printed: Path) -> None:
    """In a forked process: the copy's modules, and none that was imported from here."""
    for name in [name for name in sys.modules if name.partition(".")[0] in _OURS]:
        del sys.modules[name]
    os.chdir(root)
    paths = [str(root), str(root / "proto"), str(root / "services")]
    sys.path[:] = paths + [
        path for path in sys.path if path not in ("", str(ROOT), str(ROOT / "proto"), str(ROOT / "services"))
    ]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)  # of what the tests start
    with printed.open("wb") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    options = ["-q", "-rfE", "--tb=line", "-p", "no:cacheprovider", f"--rootdir={root}", "-m", ""]
    code = pytest.main([*options, *tests], plugins=[ShortCases()])
    sys.stdout.flush()
    os._exit(code)


def failing(root: Path, tests: Iterable[str]) -> set[str]:
    """Names of the tests that do not pass in a tree, without parameters; RuntimeError if pytest does not end well."""
    printed = root.with_suffix(".printed")
    process = _FORK.Process(target=_run_pytest, args=(root, [*tests], printed))
    process.start()
    process.join(_TIMEOUT_S)
    if process.is_alive():
        process.kill()
        process.join()
    text = printed.read_text()
    if process.exitcode not in (0, 1):
        raise RuntimeError(f"pytest ended with {process.exitcode} (at most {_TIMEOUT_S} s):\n{text}")
    return set(re.findall(r"^(?:FAILED|ERROR) (\S+?::\w+)", text, re.MULTILINE))


def replace(path: Path, text: str) -> None:
    """Write a module; its bytecode goes, since a change within a second would not be seen."""
    path.write_text(text)
    for cached in (path.parent / "__pycache__").glob(f"{path.stem}.*"):
        cached.unlink()


def try_promise(promise: Promise, root: Path) -> str:
    """Break one; why it was not noticed, empty if it was."""
    file, text = promise.broken()
    before = (root / file).read_text()
    replace(root / file, text)
    try:
        noticing = failing(root, promise.test_ids())
    except RuntimeError as error:
        return f"NOT TRIED: {error}"
    finally:
        replace(root / file, before)
    missing = [test for test in promise.test_ids() if test not in noticing]
    return f"NOT NOTICED by {', '.join(missing)}" if missing else ""


def try_promises(promises: Sequence[Promise], root: Path) -> Iterator[tuple[Promise, str]]:
    """Yield each with why it was not noticed; those of the same files of tests together, unit tests first."""

    def files(promise: Promise) -> list[str]:
        return sorted({test.partition("::")[0] for test in promise.test_ids()})

    def cost(promise: Promise) -> tuple[bool, list[str]]:
        return not files(promise)[0].startswith("tests/unit/"), files(promise)

    for _, group in groupby(sorted(promises, key=cost), cost):
        together = [*group]
        tests = dict.fromkeys(test for promise in together for test in promise.test_ids())
        try:
            red = failing(root, tests)
        except RuntimeError as error:
            red = {*tests}
            sys.stderr.write(f"{error}\n")
        for promise in together:
            unfit = [test for test in promise.test_ids() if test in red]
            yield promise, f"FAILS WITHOUT ANY BREAK: {', '.join(unfit)}" if unfit else try_promise(promise, root)


def main(words: Sequence[str], tries_all: bool) -> int:
    """Try the changed promises that have one of the words, or all that have one; the exit code."""
    chosen = [each for each in read_promises() if not words or any(word in _searched(each) for word in words)]
    if not chosen:
        sys.stderr.write(f"no promise or file has {' or '.join(words)} in it; promises.yml lists them\n")
        return 2
    record, faults = Record(), []
    due = [promise for promise in chosen if tries_all or not record.has(promise)]
    sys.stderr.write(f"{len(chosen) - len(due)} of {len(chosen)} skipped: noticed before, and unchanged (--all: all)\n")
    if not due:
        return 0
    for name in _SLOW_IMPORTS:
        importlib.import_module(name)
    with tempfile.TemporaryDirectory() as scratch:
        copy_tree(root := Path(scratch) / "tree")
        waiting, began = {promise.promise: promise for promise in due}, time.monotonic()
        for promise, fault in try_promises(due, root):
            record.add(promise, not fault, time.monotonic() - began)
            began = time.monotonic()
            del waiting[promise.promise]
            line = f"{fault or 'noticed'}: {promise.promise}\n"
            faults += [line] if fault else []
            minutes = record.minutes([*waiting.values()])
            sys.stderr.write(f"{len(due) - len(waiting)}/{len(due)}, about {minutes:.0f} min more: {line}")
    sys.stderr.write(f"{len(due) - len(faults)} of {len(due)} noticed\n{''.join(faults)}")
    return 1 if faults else 0


def _searched(promise: Promise) -> str:
    return f"{promise.promise}\n{promise.code}\n{promise.broken()[0]}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.promises", description=__doc__)
    parser.add_argument("words", nargs="*", metavar="WORD", help="try those with one of these in their text or file")
    parser.add_argument("--all", action="store_true", help="try also what was noticed before and has not changed")
    options = parser.parse_args()
    sys.exit(main(options.words, options.all))
