"""Whether the learner's host memory holds copies that are used beside training: a version, a checkpoint.

app.py asks before the model is loaded, so without torch. Without that memory training waits.
"""

from collections.abc import Mapping

import structlog

from gspo.common.config.schema import Config
from gspo.common.host.machine import GIB, free_memory, visible_gpus
from gspo.common.model.files import ModelFiles
from gspo.common.model.trained_parameters import trained_size
from gspo.common.network.credentials import is_loopback
from gspo.common.planning.memory import checkpoint_bytes, learner_host_bytes, published_bytes
from gspo.learner.ranks.launcher import num_ranks, num_ranks_here

log = structlog.get_logger()


class CopyMemory:
    """The host memory of the first rank's machine, as the learner finds it at its start.

    Activations on a CPU are not counted: they depend on the model's code.

    Args:
        host: The address that the learner listens on.
    """

    def __init__(self, config: Config, files: ModelFiles, host: str) -> None:
        ranks, ranks_here = num_ranks(config), num_ranks_here(config)
        size = trained_size(config, files)
        self._training = learner_host_bytes(config, size, ranks, ranks_here, on_gpu=bool(visible_gpus()))
        # On loopback, generators reach the ranks of this machine alone, which then own all layers.
        owners = ranks_here if is_loopback(host) else ranks
        self._policies = published_bytes(config, files.num_parameters, owners, ranks_here)
        self._checkpoint = checkpoint_bytes(config, size, ranks, ranks_here)
        self._is_shared, self._available = config.placement == "shared", free_memory()

    def holds_next_version(self) -> bool:
        """Whether training and every policy that is kept for pushes fit into the free memory; logs a warning if not."""
        parts = {"training": self._training, "policies": self._policies}
        return self._holds(parts, "no_memory_for_next_version", "training waits while a version is made")

    def holds_checkpoint(self) -> bool:
        """Whether the copies for a checkpoint fit beside these; logs a warning if not.

        On shared GPUs a checkpoint is written within the learner's shift: afterwards the states take that memory.
        """
        if self._is_shared:
            return False
        parts = {"training": self._training, "policies": self._policies, "checkpoint": self._checkpoint}
        return self._holds(parts, "no_memory_for_checkpoint", "training waits while a checkpoint is written")

    def _holds(self, parts: Mapping[str, float], event: str, effect: str) -> bool:
        if sum(parts.values()) <= self._available:
            return True
        sizes = {f"{name}_gib": round(size / GIB, 2) for name, size in parts.items()}
        log.warning(event, **sizes, free_gib=round(self._available / GIB, 2), effect=effect)
        return False
