"""Hostile and careless user code at each level of the sandbox, started by root and by a user without privilege.

The attacks are in tests/support/sandbox_attacks.py, which runs them in a process of its own for each level and user.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.support.sandbox_attacks import ALL, NO_NAMESPACE, SECRET, WITHOUT_LANDLOCK, Attack, attacks

ROOT = Path(__file__).parents[4]
CONTAINMENTS = [
    (level, user)
    for level in ("bubblewrap", "landlock")
    for user in ("root", "plain")
    if user == "plain" or os.geteuid() == 0
]


@functools.cache
def outcomes(level: str, user: str) -> dict[str, Any]:
    """The outcome of every attack."""
    done = _started()[level, user].result()
    if done.returncode == NO_NAMESPACE:
        pytest.skip("this machine makes no user namespace, so root cannot become a plain user here")
    assert done.returncode == 0, done.stderr[-3000:]
    outcomes: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return outcomes


@functools.cache
def _started() -> dict[tuple[str, str], Future[subprocess.CompletedProcess[str]]]:
    """The programs of all containments, two at a time: much of their time is spent waiting for limits."""
    pool = ThreadPoolExecutor(2)
    started = {
        case: pool.submit(_run, *case) for case in CONTAINMENTS if case[0] != "bubblewrap" or shutil.which("bwrap")
    }
    pool.shutdown(wait=False)
    return started


def _run(*words: str, program: str = "sandbox_attacks") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", f"tests.support.{program}", *words]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}:{ROOT / 'services'}"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240, check=False)


@pytest.fixture(params=CONTAINMENTS, ids="-".join)
def contained(request: pytest.FixtureRequest) -> dict[str, Any]:
    if request.param[0] == "bubblewrap" and shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed: deploy/setup.sh does that for root")
    return outcomes(*request.param)


@pytest.mark.parametrize("attack", ALL, ids=lambda attack: attack.name)
def test_an_attack_fails_its_caller_alone(contained: dict[str, Any], attack: Attack) -> None:
    outcome = contained[attack.name]
    assert str(outcome["kind"]) in str(attack.kind).split(" or "), outcome["text"]
    assert (outcome["beside"], outcome["after"]) == ([1.0, 2.0], [1.0, 2.0])


def test_nothing_outside_was_reached(contained: dict[str, Any]) -> None:
    assert (contained["reached"], contained["file"]) == ([], SECRET)


def test_no_attack_ended_its_supervisor(contained: dict[str, Any]) -> None:
    assert contained["supervisors_live"]


def test_a_call_of_another_function_is_answered_at_once_all_the_while(contained: dict[str, Any]) -> None:
    assert len(contained["benign_s"]) >= 5
    assert max(contained["benign_s"]) < 0.5


def test_a_level_has_the_parts_of_its_name(contained: dict[str, Any], request: pytest.FixtureRequest) -> None:
    parts = set(contained["parts"])
    assert {"seccomp", "rlimits"} < parts
    assert any(part.startswith("Landlock") for part in parts)
    wrapped = "bubblewrap" in request.node.name
    assert ("namespaces user mnt pid net ipc" in parts) is wrapped
    if wrapped and "root" in request.node.name:
        assert "a user of its own" in parts


@pytest.mark.long
@pytest.mark.parametrize("user", [user for level, user in CONTAINMENTS if level == "bubblewrap"])
@pytest.mark.parametrize("case", [("bubblewrap", "without_landlock"), ("rlimits", "")], ids=" ".join)
def test_the_weaker_levels_hold_what_they_promise(case: tuple[str, str], user: str) -> None:
    level, option = case
    if level == "bubblewrap" and shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed: deploy/setup.sh does that for root")
    done = _run(level, user, *filter(None, [option]))
    if done.returncode == NO_NAMESPACE:
        pytest.skip("this machine makes no user namespace, so root cannot become a plain user here")
    assert done.returncode == 0, done.stderr[-3000:]
    seen = json.loads(done.stdout.splitlines()[-1])
    kinds = WITHOUT_LANDLOCK if option else {}
    for attack in attacks(level):
        outcome = seen[attack.name]
        assert str(outcome["kind"]) in kinds.get(attack.name, str(attack.kind)).split(" or "), (attack.name, outcome)
        assert (outcome["beside"], outcome["after"]) == ([1.0, 2.0], [1.0, 2.0]), attack.name
    assert seen["supervisors_live"]
    assert (seen["reached"], seen["file"]) == ([], SECRET)
    assert max(seen["benign_s"]) < 1


def test_without_landlock_no_session_reaches_into_another() -> None:
    if shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed: deploy/setup.sh does that for root")
    done = _run(program="sandbox.without_landlock")
    assert done.returncode == 0, done.stderr[-3000:]
    outcomes = json.loads(done.stdout.splitlines()[-1])
    assert not any(part.startswith("Landlock") for part in outcomes["parts"])
    assert [outcomes[name]["values"] for name in ("attack", "victim")] == [[1.0, 2.0]] * 2, outcomes["attack"]["text"]
