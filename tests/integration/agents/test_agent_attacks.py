"""Hostile rollouts of an agent at each level of its sandbox, started by root and by a user without privilege.

The attacks are in tests/support/agents/agent_attacks.py, which plays them in a process of its own for each level and
user. Not here: what an agent reaches outside (test_agent_sandbox.py).
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.agents.agent_attacks import BENIGN_REWARD, attacks
from tests.support.sandbox_attacks import NO_NAMESPACE

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.timeout(400)
CONTAINMENTS = [
    (level, user)
    for level in ("bubblewrap", "rlimits")
    for user in ("root", "plain")
    if user == "plain" or os.geteuid() == 0
]
# The machine loses less memory, of processes and of the kernel, until a rollout has ended.
MOST_LOST_MIB = 300


@functools.cache
def outcomes(level: str, user: str, *options: str) -> dict[str, Any]:
    """The outcome of every attack."""
    command = [sys.executable, "-m", "tests.support.agents.agent_attacks", level, user, *options]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}:{ROOT / 'services'}"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, timeout=380, check=False)
    if done.returncode == NO_NAMESPACE:
        pytest.skip("this machine makes no user namespace, so root cannot become a plain user here")
    assert done.returncode == 0, done.stderr[-3000:].decode(errors="replace")
    seen: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return seen


def judge(seen: dict[str, Any], level: str, *, heavy: bool) -> None:
    """Each attack has an outcome of its own rollout, and no other rollout sees, loses or wins anything."""
    for attack in attacks(level, heavy=heavy):
        played = seen["attacks"][attack.name]
        assert played["outcome"] in attack.outcome.split(" or "), (attack.name, played)
        assert played["after"] == seen["before"], f"{attack.name}: the next rollout finds other paths than the first"
    assert set(seen["benign"]) == {str(BENIGN_REWARD)}
    assert len(seen["benign"]) > seen["seconds"] / 3
    assert seen["descriptors"] < 64


def skip_without_bubblewrap(level: str) -> None:
    if level == "bubblewrap" and shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed: deploy/setup.sh does that for root")


@pytest.mark.parametrize(
    ("level", "user"),
    [
        pytest.param(level, user, marks=[] if (level == "bubblewrap") == (user == "plain") else pytest.mark.long)
        for level, user in CONTAINMENTS
    ],
)
def test_a_hostile_rollout_ends_alone_and_leaves_nothing(level: str, user: str) -> None:
    skip_without_bubblewrap(level)
    judge(outcomes(level, user), level, heavy=False)


@pytest.mark.long
@pytest.mark.parametrize("user", [user for level, user in CONTAINMENTS if level == "bubblewrap"])
def test_memory_of_the_kernel_is_bounded(user: str) -> None:
    skip_without_bubblewrap("bubblewrap")
    lost: dict[str, float] = {}
    for attempt in range(3):  # other processes of the machine take memory too
        seen = outcomes("bubblewrap", user, "heavy", str(attempt))
        judge(seen, "bubblewrap", heavy=True)
        now = {name: attack["lost_mib"] for name, attack in seen["attacks"].items()}
        lost = {name: min(mib, lost.get(name, mib)) for name, mib in now.items()}
        if max(lost.values()) < MOST_LOST_MIB:
            return
    pytest.fail(f"MiB of the machine that an attack took: {lost}")
