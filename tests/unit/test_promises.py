"""The list of promises holds: each can still be broken as it says, and its tests are there.

What it is not: the breaking, which takes minutes (`make test-promises`).
"""

from __future__ import annotations

from collections.abc import Iterator

from tests.promises.catalogue import Promise, read_promises
from tests.support.repository.source_files import fail_with, place, text_of

CATALOGUE = "tests/promises/promises.yml"
PROMISES = read_promises()


def test_there_are_as_many_as_we_say() -> None:
    assert len(PROMISES) >= 40
    assert len({one.promise for one in PROMISES}) == len(PROMISES)


def broken_entries(promise: Promise) -> Iterator[str]:
    """Yield each fault of an entry of the list."""
    entry = f"{place(CATALOGUE, f'- promise: {promise.promise}')}: {promise.promise}"
    if (count := text_of(promise.file).count(promise.old)) != 1:
        yield f"{entry}: `old` stands {count} times in {promise.file}: give text that stands there once"
    if promise.new == promise.old:
        yield f"{entry}: `new` is `old`: give text that breaks it"
    if not promise.tests:
        yield f"{entry}: no test: name one that fails then"
    for name in promise.tests:
        path, _, test = name.partition("::")
        if f"def {test}(" not in text_of(path):
            yield f"{entry}: there is no {name}: name a test that is there"


def test_every_promise_can_be_broken_and_has_its_tests() -> None:
    fail_with(broken for promise in PROMISES for broken in broken_entries(promise))
