"""Break the promises one by one in a copy of the tree, and see that their tests notice: `make test-promises`.

The tests must pass in the unbroken copy first. Exit codes: 0 every break was noticed, 1 one was not, 2 no promise has
one of the words.
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table

from tests.promises.catalogue import Promise, read_promises
from tests.support.repository.source_files import ROOT

_TIMEOUT_S = 600
# Imported once, before each forked run: most of a test's time would be their import.
_SLOW_IMPORTS = ("torch", "hypothesis.extra.numpy", "pyarrow.parquet", "pydantic", "transformers", "structlog", "redis")
_OURS = ("tests", "gspo", "gspo_core", "gspo_proto", "benchmarks")
_FORK = multiprocessing.get_context("fork")


def copy_tree(target: Path) -> None:
    """What git tracks, and new files that it does not ignore, as they are on the disk."""
    words = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, target / name)


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
    options = ["-q", "-rfE", "--tb=line", "-p", "no:cacheprovider", f"--rootdir={root}"]
    code = pytest.main([*options, *tests])
    sys.stdout.flush()
    os._exit(code)


def failing(root: Path, tests: Iterable[str]) -> tuple[set[str], str]:
    """Names of the tests that do not pass in a tree, without parameters, and what pytest printed."""
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
    return set(re.findall(r"^(?:FAILED|ERROR) (\S+?::\w+)", text, re.MULTILINE)), text


def replace(path: Path, text: str) -> None:
    """Write a module; its bytecode goes, since a change within a second would not be seen."""
    path.write_text(text)
    for cached in (path.parent / "__pycache__").glob(f"{path.stem}.*"):
        cached.unlink()


def try_promise(promise: Promise, root: Path) -> list[str]:
    """Break one; the tests that do not notice."""
    file, text = promise.broken()
    before = (root / file).read_text()
    replace(root / file, text)
    try:
        noticing, _ = failing(root, promise.test_ids())
    finally:
        replace(root / file, before)
    return [test for test in promise.test_ids() if test not in noticing]


def main(words: Sequence[str]) -> int:
    """Try all promises, or those that hold one of the words; the exit code."""
    promises = [
        one for one in read_promises() if not words or any(w in one.promise or w in one.broken()[0] for w in words)
    ]
    if not promises:
        sys.stderr.write(f"no promise or file has {' or '.join(words)} in it; promises.yml lists them\n")
        return 2
    for name in _SLOW_IMPORTS:
        importlib.import_module(name)
    table, num_unnoticed = Table("", "promise", "broken in", "its tests"), 0
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch) / "tree"
        copy_tree(root)
        sys.stderr.write(f"the tests of {len(promises)} promises in the unbroken copy\n")
        found, printed = failing(root, dict.fromkeys(test for one in promises for test in one.test_ids()))
        if found:
            sys.stderr.write(f"{printed}\nThese fail without any break: {', '.join(sorted(found))}\n")
            return 1
        for number, promise in enumerate(promises, 1):
            missing = try_promise(promise, root)
            num_unnoticed += bool(missing)
            told = f"NOT NOTICED by {', '.join(missing)}" if missing else "noticed"
            table.add_row(str(number), promise.promise, promise.broken()[0], told)
            sys.stderr.write(f"{number}/{len(promises)} {told}: {promise.promise}\n")
    Console().print(table)
    return 1 if num_unnoticed else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.promises", description=__doc__)
    parser.add_argument("words", nargs="*", metavar="WORD", help="try those with one of these in their text or file")
    sys.exit(main(parser.parse_args().words))
