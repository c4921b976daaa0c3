"""The sizes of DeepSpeed's buffers that `learner.deepspeed` gives, or its own; without DeepSpeed."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gspo.common.config.engines import LearnerConfig
from gspo.common.plain_json import read_json_file

# MEMORY_OPT_ALLREDUCE_SIZE of DeepSpeed's engine.py, which no key changes.
_UNSPREAD = 5 * 10**8


@dataclass(frozen=True)
class BufferSizes:
    """Numbers of elements.

    Attributes:
        bucket: Gradients that are reduced at a time.
        live: Under ZeRO 3, gathered weights at a time, less the last one. DeepSpeed gathers ahead until so many live,
            and keeps weights that a pass uses again within so many.
        sub_group: Under ZeRO 3, parameters that one call of the optimizer updates.
    """

    bucket: int
    live: int
    sub_group: int


def buffer_sizes(learner: LearnerConfig) -> BufferSizes:
    """The sizes under the configured ZeRO stage; deepspeed_config.py refuses an unreadable section."""
    section = _zero_section(learner)

    def size(key: str, default: int) -> int:
        value = section.get(key, default)
        return int(value) if isinstance(value, int | float) else default  # "auto" is DeepSpeed's own

    return BufferSizes(
        bucket=size("reduce_bucket_size", 5 * 10**8) if learner.zero_stage else _UNSPREAD,
        live=max(size("stage3_max_live_parameters", 10**9), size("stage3_max_reuse_distance", 10**9)),
        sub_group=size("sub_group_size", 10**9),
    )


def _zero_section(learner: LearnerConfig) -> Mapping[str, Any]:
    section: Any = learner.deepspeed
    if isinstance(section, Path):
        try:
            section = read_json_file(section)
        except (OSError, ValueError):
            return {}
    zero = section.get("zero_optimization") if isinstance(section, Mapping) else None
    return zero if isinstance(zero, Mapping) else {}
