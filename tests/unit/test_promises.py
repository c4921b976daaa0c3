"""The list of promises holds: each can still be broken as it says, and its tests are there.

What it is not: the breaking, which takes minutes (`make test-promises`). Neighbour: tests/promises.
"""

from __future__ import annotations

import pytest

from tests.promises.catalogue import ROOT, Promise, read_promises

PROMISES = read_promises()


def test_there_are_as_many_as_we_say() -> None:
    assert len(PROMISES) >= 40
    assert len({one.promise for one in PROMISES}) == len(PROMISES)


@pytest.mark.parametrize("promise", PROMISES, ids=lambda one: one.promise)
def test_a_promise_can_be_broken_and_has_its_tests(promise: Promise) -> None:
    assert (ROOT / promise.file).read_text().count(promise.old) == 1, promise.old
    assert promise.new != promise.old
    assert promise.tests
    for name in promise.tests:
        path, _, test = name.partition("::")
        assert f"def {test}(" in (ROOT / path).read_text(), name
