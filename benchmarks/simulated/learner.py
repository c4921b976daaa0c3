"""The learner with a simulated training step: `python -m benchmarks.simulated.learner --run-dir DIR`.

Everything but the trainer is services.learner. Neighbour: services/learner/__main__.py, which this stands for.
"""

from __future__ import annotations

from benchmarks.simulated.maker import SimulatedMaker
from services.common.runtime import parse_options, run_service
from services.learner.check import check
from services.learner.life import live


def main() -> None:
    """Check, or train until the run ends."""
    options = parse_options("learner", check, meaning="The learner with a simulated training step.")
    run_service(options, lambda service: live(service, SimulatedMaker))


if __name__ == "__main__":
    main()
