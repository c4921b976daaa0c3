"""The generation service with the simulated engine: `python -m benchmarks.simulated.generation --run-dir DIR`.

Everything but the engine is services.generation. Neighbour: services/generation/__main__.py, which this stands for.
"""

from __future__ import annotations

from benchmarks.simulated.engine import start_simulated
from services.common.runtime import parse_options, run_service
from services.generation.check import check
from services.generation.life import live


def main() -> None:
    """Check, or serve until the run ends."""
    options = parse_options("generation", check, meaning="Generation with a simulated engine.")
    run_service(options, lambda service: live(service, start_simulated))


if __name__ == "__main__":
    main()
