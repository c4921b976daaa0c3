"""The learner with a simulated training step: `python -m benchmarks.simulated.learner --run-dir DIR`.

Everything but the trainer is gspo.learner.
"""

from __future__ import annotations

from benchmarks.simulated.trainer import SimulatedTrainer
from gspo.common.service.app import run_process
from gspo.common.service.options import parse_options
from gspo.learner.app import run_learner
from gspo.learner.check import check


def main() -> None:
    """Check, or train until the run ends."""
    options = parse_options("learner", check, meaning="The learner with a simulated training step.")
    run_process(options, lambda service: run_learner(service, SimulatedTrainer))


if __name__ == "__main__":
    main()
