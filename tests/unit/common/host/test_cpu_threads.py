"""How many threads, and how they wait."""

from __future__ import annotations

import os

import pytest

from gspo.common.host.cpu_threads import WAITING, generation_threads, wait_shortly


@pytest.mark.parametrize(("configured", "cores", "threads"), [(0, 1, 1), (0, 2, 1), (0, 8, 7), (8, 8, 8), (3, 2, 3)])
def test_an_engine_leaves_a_core_free_unless_it_is_told(
    monkeypatch: pytest.MonkeyPatch, configured: int, cores: int, threads: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    assert generation_threads(configured) == threads


def test_what_the_user_has_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    monkeypatch.setenv("GOMP_SPINCOUNT", "")  # so that what the call sets is undone
    monkeypatch.delenv("GOMP_SPINCOUNT")
    wait_shortly()
    assert os.environ["OMP_WAIT_POLICY"] == "active"
    assert os.environ["GOMP_SPINCOUNT"] == WAITING["GOMP_SPINCOUNT"]
