"""One rank of two, for test_spread_load.py: loads models under ZeRO 3 and writes the results.

Called by torchrun as `-m tests.support.training.load_cases OUT NAME=MODEL...`; rank 0 writes the digests into OUT,
and each rank the memory that each start took.
"""

from __future__ import annotations

import json
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import distributed

from gspo.learner.push.policy_weights import weights_from
from gspo.learner.training.policy_engine import PolicyEngine
from tests.support.training.rollout_rows import make_config

# Model -> learner keys beside ZeRO 3.
CASES: dict[str, dict[str, Any]] = {
    # First: the process takes memory for its libraries with the first model.
    "tied": {"dtype": "bfloat16"},
    "large": {},
    "untied": {},
    "mixture": {"dtype": "bfloat16"},
    "adapters": {"lora": {"rank": 4, "target_modules": ["q_proj", "down_proj"]}},
}


def anonymous_bytes() -> int:
    """Memory of this process that does not belong to a file."""
    kib = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert kib
    return int(kib[1]) * 1024


@contextmanager
def measured_peak(peaks: dict[str, int], name: str) -> Iterator[None]:
    """Enter the highest memory use of the block, less the use before it."""
    before, peak, ended = anonymous_bytes(), 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not ended.wait(0.001):
            peak = max(peak, anonymous_bytes())

    thread = threading.Thread(target=watch)
    thread.start()
    yield
    ended.set()
    thread.join()
    peaks[name] = peak - before


def main() -> None:
    """Load each model of the command line in the ways of CASES."""
    out, models = Path(sys.argv[1]), dict(word.split("=") for word in sys.argv[2:])
    digests, peaks = dict[str, str](), dict[str, int]()
    for name, learner in CASES.items():
        folder = Path(models[name])
        config = make_config(folder, algorithm={"use_kl_loss": name != "large"}, learner={"zero_stage": 3, **learner})
        with measured_peak(peaks, name):
            engine = PolicyEngine(config, folder)
        tensors = engine.policy()
        if distributed.get_rank() == 0:
            digests[name] = weights_from(0, tensors).digest
        del engine
    (out / f"peak-{distributed.get_rank()}.json").write_text(json.dumps(peaks))
    if distributed.get_rank() == 0:
        (out / "digests.json").write_text(json.dumps(digests))


if __name__ == "__main__":
    main()
