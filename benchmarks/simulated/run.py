"""`gspo run` with simulated engines and training: `python -m benchmarks.simulated.run CONFIG [--resume] [--plain]`.

How long things take is in GSPO_SIMULATION, as settings.py reads it.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from gspo.cli.processes.programs import Job, service_programs
from gspo.cli.processes.supervisor import Program
from gspo.cli.run.training import run

SIMULATED = {"generation": "benchmarks.simulated.generation", "learner": "benchmarks.simulated.learner"}


def simulated_programs(job: Job, redis_url: str) -> list[Program]:
    """The lineup of a run, with generation and learner as they are here."""
    return [simulated(program) for program in service_programs(job, redis_url)]


def simulated(program: Program) -> Program:
    """A service's program with the module that simulates it, where there is one."""
    modules = {f"gspo.{name}": module for name, module in SIMULATED.items()}
    return replace(program, command=tuple(modules.get(word, word) for word in program.command))


def main() -> None:
    """Run to the end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--plain", action="store_true")
    given = parser.parse_args()
    sys.exit(run(given.config, resume=given.resume, plain=given.plain, console=Console(), programs=simulated_programs))


if __name__ == "__main__":
    main()
