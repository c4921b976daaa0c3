"""`gspo run` with simulated services that can have faults, each at its place in the network.

GSPO_CHAOS_PLACES gives address and namespace by name.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace

from benchmarks.simulated.run import main, simulated
from gspo.cli.processes.supervisor import Program

_WRAPPER = "benchmarks.chaos.faulty_service"


def faulty(program: Program) -> Program:
    """A service's simulated program, wrapped and put into its place."""
    address, prefix = json.loads(os.environ["GSPO_CHAOS_PLACES"]).get(program.name, ("", ()))
    python, dash_m, module, *options = simulated(program).command
    host = ("--host", address) if address else ()
    return replace(program, command=(*prefix, python, dash_m, _WRAPPER, module, *options, *host))


if __name__ == "__main__":
    main(faulty)
