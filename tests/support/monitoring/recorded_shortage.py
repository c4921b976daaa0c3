"""A record of a step that ran out of memory, for tests of its readers."""

from __future__ import annotations

from pathlib import Path

from gspo.runlog.memory_shortages import MemoryShortage, shortage_path
from gspo.runlog.run_log import LOG_FOLDER

SHORTAGE = MemoryShortage(
    step=3,
    rank=1,
    unix_s=1.5,
    error="CUDA out of memory. Tried to allocate 2.00 GiB",
    keys={},
    used_tokens=8192,
    micro_batch_tokens=4096,
    gradient_checkpointing=False,
    is_last=False,
)
SENTENCE = (
    "step 3 ran out of memory on rank 1 with a micro-batch of 8,192 tokens (CUDA out of memory. Tried to allocate 2.00 "
    "GiB); it is tried again with 4,096"
)


def record_shortage(run_dir: Path) -> None:
    """Write it into the log of a run."""
    path = shortage_path(run_dir / LOG_FOLDER, SHORTAGE)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{SHORTAGE.model_dump_json()}\n")
