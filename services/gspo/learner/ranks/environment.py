"""The rank of this process among the learner's, from the environment that its launcher set; without torch.

torchrun and DeepSpeed's launcher use the same names, save one.
"""

from __future__ import annotations

import ctypes
import os
import signal

from gspo.common.config.schema import Config

_PR_SET_PDEATHSIG = 1


def is_launched() -> bool:
    """Whether a launcher started this process as one of its ranks."""
    return "RANK" in os.environ


def own_rank() -> int:
    """From 0; a learner without a launcher is rank zero."""
    return int(os.environ.get("RANK", 0))


def num_ranks(config: Config) -> int:
    """Ranks on all hosts: as many as the launcher started, or as learner.ranks asks to be started here."""
    return int(os.environ["WORLD_SIZE"]) if is_launched() else max(1, config.learner.ranks)


def num_local_ranks() -> int:
    """Ranks on this host, this one included."""
    # LOCAL_SIZE is DeepSpeed's name.
    return int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or 1)


def end_with_launcher() -> None:
    """Have the kernel kill this rank when its launcher dies: it would keep the run directory locked."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def cores_per_rank(num_ranks_here: int) -> int:
    """CPU cores that each of so many ranks on this machine may use."""
    return max(1, len(os.sched_getaffinity(0)) // num_ranks_here)
