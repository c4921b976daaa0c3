"""`gspo run` with simulated engines and training: `python -m benchmarks.simulated.run CONFIG [--resume] [--plain]`.

GSPO_SIMULATION says how long things take; settings.py reads it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from gspo.cli.processes.child import Program
from gspo.cli.processes.exit_codes import InterruptedRunError
from gspo.cli.processes.programs import Job, service_programs
from gspo.cli.run.training import run
from gspo.common.errors import EXIT_INTERRUPTED

MODULES = {f"gspo.{name}": f"benchmarks.simulated.{name}" for name in ("generation", "learner")}


def simulated(program: Program) -> Program:
    """A service's program with the module that simulates it, where there is one.

    Without -P: the modules of benchmarks are imported from the working directory.
    """
    return replace(program, command=tuple(MODULES.get(word, word) for word in program.command if word != "-P"))


def main(change: Callable[[Program], Program] = simulated) -> None:
    """Run to the end, with every service's program changed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--leave-out", type=int)
    options = parser.parse_args()

    def programs(job: Job, redis_url: str) -> list[Program]:
        return [change(program) for program in service_programs(job, redis_url)]

    try:
        code = run(
            options.config,
            resume=options.resume,
            leave_out=options.leave_out,
            plain=options.plain,
            console=Console(width=200),
            programs=programs,
        )
    except InterruptedRunError as stop:
        print(stop, file=sys.stderr)
        code = EXIT_INTERRUPTED
    sys.exit(code)


if __name__ == "__main__":
    main()
