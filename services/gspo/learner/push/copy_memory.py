"""Whether the learner's host memory holds copies that are used beside training: a version, a checkpoint.

app.py asks before the model is loaded, so without torch. Without that memory training waits.
"""

from collections.abc import Mapping
from typing import NamedTuple

import structlog

from gspo.common.config.schema import Config
from gspo.common.host.machine import GIB, free_memory, visible_gpus
from gspo.common.model.files import ModelFiles
from gspo.common.model.trained_parameters import trained_size
from gspo.common.network.credentials import is_loopback
from gspo.common.planning.memory import checkpoint_bytes, learner_host_bytes, published_bytes
from gspo.learner.ranks.launcher import num_ranks, num_ranks_here

log = structlog.get_logger()


class CopiesBeside(NamedTuple):
    """Whether the free memory takes a version that is made beside training, and a checkpoint's copies too."""

    version: bool
    checkpoint: bool


def copies_beside_training(config: Config, files: ModelFiles, host: str) -> CopiesBeside:
    """The copies for which the first rank's machine has memory at the learner's start; logs a warning without it.

    Activations on a CPU are not counted: they depend on the model's code. On shared GPUs a checkpoint is written within
    the learner's shift: afterwards the states take that memory.

    Args:
        host: The address that the learner listens on.
    """
    ranks, ranks_here = num_ranks(config), num_ranks_here(config)
    size, available = trained_size(config, files), free_memory()
    # On loopback, generators reach the ranks of this machine alone, which then own all layers.
    owners = ranks_here if is_loopback(host) else ranks
    parts = {
        "training": learner_host_bytes(config, size, ranks, ranks_here, on_gpu=bool(visible_gpus())),
        "policies": published_bytes(config, files.num_parameters, owners, ranks_here),
    }
    version = _fit(parts, available, "no_memory_for_next_version", "training waits while a version is made")
    if config.placement == "shared":
        return CopiesBeside(version, checkpoint=False)
    parts["checkpoint"] = checkpoint_bytes(config, size, ranks, ranks_here)
    waits = "training waits while a checkpoint is written"
    return CopiesBeside(version, _fit(parts, available, "no_memory_for_checkpoint", waits))


def _fit(parts: Mapping[str, float], available: float, event: str, effect: str) -> bool:
    if sum(parts.values()) <= available:
        return True
    sizes = {f"{name}_gib": round(size / GIB, 2) for name, size in parts.items()}
    log.warning(event, **sizes, free_gib=round(available / GIB, 2), effect=effect)
    return False
