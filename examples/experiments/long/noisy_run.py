"""`gspo run` with noise on the engine's log-probs: `python -m examples.experiments.long.noisy_run CONFIG [--plain]`.

Every service is that of a run, but the learner trains with `logp` of noisy rows. The step log keeps the engine's own.
GSPO_NOISE_SIGMA has the standard deviation. Called with the options of a learner, it is that learner.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from benchmarks.simulated.run import main
from gspo.cli.processes.child import Program

MODULE, VARIABLE = "examples.experiments.long.noisy_run", "GSPO_NOISE_SIGMA"


def noisy(program: Program) -> Program:
    """The learner's program with noise; any other as it is.

    Without -P: the modules of benchmarks are imported from the working directory.
    """
    if "gspo.learner" not in program.command:
        return program
    words = (word for word in program.command if word != "-P")
    return replace(program, command=tuple(MODULE if word == "gspo.learner" else word for word in words))


def learn() -> None:
    """Check, or train on noisy rows until the run ends."""
    from gspo.common.service.app import run_process
    from gspo.common.service.options import parse_options
    from gspo.learner.app import run_learner
    from gspo.learner.assembly.rows import Row
    from gspo.learner.check import check
    from gspo.learner.training.rank_control import RankZero
    from gspo.learner.training.trainer_api import Hyperparameters, TrainResult

    sigma = float(os.environ[VARIABLE])

    class NoisyRankZero(RankZero):
        """Trains as if the engine had returned other log-probs."""

        def train(
            self, step: int, rows: Sequence[Row], not_applied: Collection[int], hyperparameters: Hyperparameters
        ) -> TrainResult:
            noisy_rows = [replace(row, logp=with_noise(row.logp, sigma, (step, row.group, row.number))) for row in rows]
            return super().train(step, noisy_rows, not_applied, hyperparameters)

    options = parse_options("learner", check, meaning="The learner with noise on the engine's log-probs.")
    run_process(options, lambda service: run_learner(service, NoisyRankZero))


def with_noise(logp_T: NDArray[np.float32], sigma: float, entropy: Sequence[int]) -> NDArray[np.float32]:
    """Log-probs with normal noise of standard deviation `sigma`, the same for the same `entropy`."""
    noise_T = np.random.default_rng(entropy).standard_normal(len(logp_T)).astype(np.float32)
    return (logp_T + np.float32(sigma) * noise_T).astype(np.float32)


if __name__ == "__main__":
    if "--run-dir" in sys.argv or "--check" in sys.argv:
        learn()
    else:
        main(noisy)
