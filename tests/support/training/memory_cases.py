"""One rank that trains, for test_planned_memory.py.

Called by torchrun as `-m tests.support.training.memory_cases OUT STAGE OFFLOAD MODEL...`. It writes the anonymous
memory that each model took in two parts, as JSON into OUT/RANK.json.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from torch import distributed

from gspo.common.config.schema import Config
from gspo.common.host import process_tuning
from gspo.learner.training.trainer import Trainer
from tests.support.training.load_cases import measured_peak
from tests.support.training.rollout_rows import make_config, make_rows, train

_FEW = {"num_groups": 1, "num_mini_batches": 1, "longest": 8}
# DeepSpeed's buffers, in elements: so small that under ZeRO 3 no weight stays whole.
_SMALL = 10**6
_BUFFERS: dict[int, dict[str, Any]] = {
    0: {},
    2: {"reduce_bucket_size": _SMALL},
    3: {
        "reduce_bucket_size": _SMALL,
        "stage3_prefetch_bucket_size": _SMALL,
        "stage3_max_live_parameters": _SMALL,
        "stage3_max_reuse_distance": 0,
    },
}


def memory_config(folder: Path, stage: int, offload: str) -> Config:
    """A lag of one version, and a probe that keeps a version from the second step on."""
    deepspeed = {"zero_optimization": _BUFFERS[stage]} if _BUFFERS[stage] else {}
    keys = {"zero_stage": stage, "offload": offload, "mismatch_every": 1, "deepspeed": deepspeed}
    return make_config(folder, learner=keys)


def main() -> None:
    """Train each model for two steps, and make the versions that the first rank keeps for pushes."""
    out, stage, offload, folders = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], map(Path, sys.argv[4:])
    # A freed block would stay in the heap, and serve the next model.
    process_tuning.keep_freed_memory = lambda: True
    measured, kept = dict[str, dict[str, int]](), list[Any]()
    for folder in folders:
        config, rows = memory_config(folder, stage, offload), make_rows(folder, **_FEW)
        peaks = measured[folder.name] = {}
        with measured_peak(peaks, "training"):
            trainer = Trainer(config, folder)
            for step in (1, 2):
                train(trainer, step, rows)
        with measured_peak(peaks, "versions"):
            kept += [trainer, *(trainer.engine.begin_version(version, "", is_reused=True) for version in range(3))]
    (out / f"{distributed.get_rank()}.json").write_text(json.dumps(measured))


if __name__ == "__main__":
    main()
