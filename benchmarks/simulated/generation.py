"""The generation service with the simulated engine: `python -m benchmarks.simulated.generation --run-dir DIR`.

Everything but the engine is gspo.generation.
"""

from __future__ import annotations

from benchmarks.simulated.engine import start_simulated
from gspo.common.service.app import run_process
from gspo.common.service.options import parse_options
from gspo.generation.app import run_generation
from gspo.generation.check import check


def main() -> None:
    """Check, or serve until the run ends."""
    options = parse_options("generation", check, meaning="Generation with a simulated engine.")
    run_process(options, lambda service: run_generation(service, start_simulated))


if __name__ == "__main__":
    main()
