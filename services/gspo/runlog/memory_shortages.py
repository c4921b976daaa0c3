"""Steps that ran out of memory: the files `log/memory-*.json`, each written by the rank that failed, before all end.

The next process makes that step and later ones with the values of the file.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

_PREFIX = "memory-"


class MemoryShortage(BaseModel):
    """A step that ran out of memory on one rank.

    Attributes:
        unix_s: Time of the record.
        error: torch's reason.
        keys: The configured values that decide the memory of a step, by name.
        used_tokens: Positions of the step's largest micro-batch on that rank.
        micro_batch_tokens: Most tokens of a micro-batch from this step on.
        gradient_checkpointing: Whether the backward pass computes activations again from this step on.
        is_last: Whether nothing smaller is left to try: then the run ends.
    """

    model_config = ConfigDict(frozen=True)

    step: int
    rank: int
    unix_s: float
    error: str
    keys: dict[str, Any]
    used_tokens: int
    micro_batch_tokens: int
    gradient_checkpointing: bool
    is_last: bool

    @property
    def sentence(self) -> str:
        """The failure and the next attempt."""
        happened = (
            f"step {self.step} ran out of memory on rank {self.rank} with a micro-batch of {self.used_tokens:,} tokens "
            f"({self.error})"
        )
        if self.is_last:
            return f"{happened}, that of its longest rollout alone"
        if self.micro_batch_tokens < self.used_tokens:
            return f"{happened}; it is tried again with {self.micro_batch_tokens:,}"
        return f"{happened}; it is tried again with gradient checkpointing"


def shortage_path(log_folder: Path, shortage: MemoryShortage) -> Path:
    """The file of a record: no two have the same."""
    name = f"{_PREFIX}{shortage.step:06d}-{shortage.rank}-{int(shortage.unix_s * 1e6)}.json"
    return log_folder / name


def shortage_files(log_folder: Path) -> list[Path]:
    """The files of all records, each of one line."""
    return sorted(log_folder.glob(f"{_PREFIX}*.json"))


def shortage_line(shortages: Sequence[MemoryShortage]) -> str:
    """The newest record, and how many there are; empty where there is none."""
    if not shortages:
        return ""
    count = f" ({len(shortages)} times in this run)" if len(shortages) > 1 else ""
    return f"{shortages[-1].sentence}{count}"
