"""`gspo run` with simulated services into which faults can be put, each at its place in the network.

GSPO_CHAOS_PLACES gives address and namespace by name.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from benchmarks.simulated.run import simulated_programs
from gspo.cli.processes.exit_codes import EXIT_INTERRUPTED, InterruptedRunError
from gspo.cli.processes.programs import Job
from gspo.cli.processes.supervisor import Program
from gspo.cli.run.training import run

_WRAPPER = "benchmarks.chaos.faulty_service"


def programs(job: Job, redis_url: str) -> list[Program]:
    """The simulated lineup, wrapped and put into its places."""
    places = json.loads(os.environ.get("GSPO_CHAOS_PLACES", "{}"))
    return [_placed(program, *places.get(program.name, ("", ()))) for program in simulated_programs(job, redis_url)]


def _placed(program: Program, address: str, prefix: list[str]) -> Program:
    python, dash_m, module, *options = program.command
    host = ("--host", address) if address else ()
    return replace(program, command=(*prefix, python, dash_m, _WRAPPER, module, *options, *host))


def main() -> None:
    """Run to the end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--plain", action="store_true")
    given = parser.parse_args()
    console = Console(width=200)
    try:
        sys.exit(run(given.config, resume=given.resume, plain=given.plain, console=console, programs=programs))
    except InterruptedRunError as stop:
        print(stop, file=sys.stderr)
        sys.exit(EXIT_INTERRUPTED)


if __name__ == "__main__":
    main()
