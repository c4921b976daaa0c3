"""How threads wait, and that freed blocks stay with the process: seen in the pages that it takes from the system."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from gspo.common.host.process_tuning import WAITING, wait_shortly

_ROUNDS = """
import json, resource, sys
from gspo.common.host.process_tuning import keep_freed_memory

def faults_of_a_round():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(50):
        blocks = [bytearray(2**20) for _ in range(4)]
        del blocks
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

before = [faults_of_a_round() for _ in range(3)][-1]
kept = keep_freed_memory()
after = [faults_of_a_round() for _ in range(3)][-1]
print(json.dumps({"before": before, "kept": kept, "after": after}))
"""


def test_a_value_that_the_user_has_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    monkeypatch.setenv("GOMP_SPINCOUNT", "")  # so that monkeypatch undoes the call's setting
    monkeypatch.delenv("GOMP_SPINCOUNT")
    wait_shortly()
    assert os.environ["OMP_WAIT_POLICY"] == "active"
    assert os.environ["GOMP_SPINCOUNT"] == WAITING["GOMP_SPINCOUNT"]


def test_freed_blocks_are_not_taken_from_the_system_again() -> None:
    # A process of its own: the setting stays until the process ends.
    done = subprocess.run([sys.executable, "-c", _ROUNDS], capture_output=True, text=True, check=True, timeout=60)
    faults = json.loads(done.stdout)

    assert faults["kept"]
    assert faults["before"] > 10_000  # 200 MiB in pages of 4 KiB, again and again
    assert faults["after"] < faults["before"] / 20
