"""Freed blocks stay with the process: seen in how many pages it takes from the system."""

import json
import subprocess
import sys

_ROUNDS = """
import json, resource, sys
from gspo.common.host.allocator import keep_freed_memory

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


def test_blocks_that_are_freed_are_not_taken_from_the_system_again() -> None:
    # A process of its own: what is set holds for its life.
    done = subprocess.run([sys.executable, "-c", _ROUNDS], capture_output=True, text=True, check=True, timeout=60)
    found = json.loads(done.stdout)

    assert found["kept"]
    assert found["before"] > 10_000  # 200 MiB in pages of 4 KiB, again and again
    assert found["after"] < found["before"] / 20
