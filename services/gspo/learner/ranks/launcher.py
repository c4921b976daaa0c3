"""The learner's ranks as processes: starts them through torchrun, and reads the environment that torchrun sets.

Without torch until it launches.
"""

import ctypes
import os
import signal
from collections.abc import Sequence

from gspo.common.config.schema import Config
from gspo.common.errors import EXIT_FAILED
from gspo.common.host.module_command import module_command

_PR_SET_PDEATHSIG = 1
# torchrun's own variable for its number of hosts; a cluster sets it, with PET_NODE_RANK and the address of host 0.
_HOSTS = "PET_NNODES"


def is_launched() -> bool:
    """Whether a launcher started this process as one of its ranks."""
    return "RANK" in os.environ


def own_rank() -> int:
    """From 0; a learner without a launcher is rank zero."""
    return int(os.environ.get("RANK", 0))


def num_ranks(config: Config) -> int:
    """Ranks on all hosts: as many as the launcher started, or as learner.ranks asks for."""
    return int(os.environ["WORLD_SIZE"]) if is_launched() else config.learner.ranks


def num_local_ranks() -> int:
    """Ranks on this host, this one included."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def num_ranks_here(config: Config) -> int:
    """Ranks on this host, before and after a launcher has started them."""
    return num_local_ranks() if is_launched() else num_ranks(config) // _num_hosts()


def _num_hosts() -> int:
    return int(os.environ.get(_HOSTS, 1))


def end_with_launcher() -> None:
    """Have the kernel kill this rank when its launcher dies: it would keep the run directory locked."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def cores_per_rank(num_ranks_here: int) -> int:
    """CPU cores that each of so many ranks on this machine may use."""
    return max(1, len(os.sched_getaffinity(0)) // num_ranks_here)


def launch(config: Config, arguments: Sequence[str], module: str = "gspo.learner") -> int:
    """Run `python -m MODULE ARGUMENTS` once a rank, to the end of all; the exit code of the first to fail.

    torchrun keeps the ranks: one that dies ends the others. On one of several hosts it starts the ranks of this one.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import get_args_parser, run

    ranks_here = num_ranks_here(config)
    # torchrun would set it to 1, with a long warning.
    os.environ.setdefault("OMP_NUM_THREADS", str(config.learner.threads or cores_per_rank(ranks_here)))
    words = [
        *(["--standalone"] if _num_hosts() == 1 else []),
        "--nproc-per-node",
        str(ranks_here),
        "--max-restarts",
        "0",
        # torchrun's own -m would put the working directory on sys.path.
        "--no-python",
        *module_command(module),
        *arguments,
    ]
    try:
        run(get_args_parser().parse_args(words))  # type: ignore[no-untyped-call]
    except ChildFailedError as error:
        _, first = error.get_first_failure()
        return first.exitcode if first.exitcode > 0 else EXIT_FAILED
    except SignalException as asked:
        return 128 + int(asked.sigval)
    return 0
