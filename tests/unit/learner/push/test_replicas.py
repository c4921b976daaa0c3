"""A generator in the learner's eyes: behind, out after three failures in a row, back with the first success."""

from __future__ import annotations

import time

import pytest

from gspo.common.streams.instances import Instance
from gspo.learner.push.replicas import GeneratorReplica


@pytest.fixture
def replica() -> GeneratorReplica:
    instance = Instance("generation", "generation-0", grpc="host:1", facts={"version": 0, "digest": "d"})
    return GeneratorReplica(instance, channel=None, metadata=())  # type: ignore[arg-type]  # no test calls


def test_three_failures_in_a_row_put_it_out_and_one_success_brings_it_back(replica: GeneratorReplica) -> None:
    replica.fall_behind()
    assert replica.state == "behind"
    assert [replica.fail(f"failure {n}") for n in range(1, 5)] == [False, False, True, False]
    assert replica.describe(waiting=False) | {"since_unix_s": 0} == {
        "name": "generation-0 (host:1)",
        "state": "out",
        "version": 0,
        "num_failures": 4,
        "problem": "failure 4",
        "waiting": False,
        "since_unix_s": 0,
    }
    assert replica.catch_up()
    assert (replica.state, replica.problem, replica.behind_since_unix_s) == ("current", "", None)
    assert not replica.catch_up()
    replica.fall_behind()
    assert not replica.fail("only one")


def test_pushes_to_it_become_seldom(replica: GeneratorReplica) -> None:
    pauses = []
    for _ in range(8):
        replica.fail("refused")
        pauses.append(replica.not_before_s - time.monotonic())
    assert [round(pause) for pause in pauses] == [1, 2, 4, 8, 16, 30, 30, 30]
    assert not replica.idle
    replica.catch_up()
    assert replica.idle


def test_it_is_behind_since_the_first_version_that_it_lacks(replica: GeneratorReplica) -> None:
    replica.fall_behind()
    since = replica.behind_since_unix_s
    replica.fall_behind()
    assert replica.behind_since_unix_s == since
