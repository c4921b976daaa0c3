"""Starts the learner's ranks on this machine through torchrun, and ends as they end.

torchrun keeps them: one that dies ends the others.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import get_args_parser, run

from gspo.common.config.schema import Config
from gspo.common.errors import EXIT_FAILED
from gspo.learner.ranks.environment import cores_per_rank

_MODULE = "gspo.learner"


def launch(config: Config, arguments: Sequence[str]) -> int:
    """Run `python -m gspo.learner ARGUMENTS` once a rank, to the end of all; the exit code of the first to fail."""
    learner = config.learner
    # torchrun would set it to 1, with a long warning.
    os.environ.setdefault("OMP_NUM_THREADS", str(learner.threads or cores_per_rank(learner.ranks)))
    words = ["--standalone", "--nproc-per-node", str(learner.ranks), "--max-restarts", "0", "-m", _MODULE, *arguments]
    try:
        run(get_args_parser().parse_args(words))  # type: ignore[no-untyped-call]
    except ChildFailedError as error:
        _, first = error.get_first_failure()
        return first.exitcode if first.exitcode > 0 else EXIT_FAILED
    except SignalException as asked:
        return 128 + int(asked.sigval)
    return 0
