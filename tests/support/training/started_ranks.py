"""Starts a module of tests on several ranks, as a user's own torchrun would."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def rank_command(num_ranks: int, module: str, *arguments: str | Path | int) -> list[str]:
    """The words that run a module on so many ranks of this machine."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    return [*launcher, "-m", "tests.support.training.rank_program", module, *map(str, arguments)]


def rank_environment(**variables: str) -> dict[str, str]:
    """This process's environment with one thread a rank, and with other variables."""
    return {**os.environ, "OMP_NUM_THREADS": "1", **variables}


def run_ranks(num_ranks: int, module: str, *arguments: str | Path | int, timeout_s: float, **variables: str) -> None:
    """Run a module on so many ranks to its end; what a failed rank printed is the error.

    Args:
        variables: Those of the ranks' environment.
    """
    done = subprocess.run(
        rank_command(num_ranks, module, *arguments),
        env=rank_environment(**variables),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
