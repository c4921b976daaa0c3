"""`gspo run` with services that can have faults, each at its place in the network and with its own proxy to Redis.

GSPO_CHAOS_PLACES gives the places by name. With GSPO_CHAOS_SIMULATED engine and training step are simulated.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace

from benchmarks.simulated.run import main, simulated
from gspo.cli.processes.child import Program

PLACES, IS_SIMULATED = "GSPO_CHAOS_PLACES", "GSPO_CHAOS_SIMULATED"
_WRAPPER = "benchmarks.chaos.harness.faulty_service"


@dataclass(frozen=True)
class Place:
    """Where a service runs.

    Attributes:
        host: Its address; empty for that of the configuration.
        prefix: The words before its command, which put it into its namespace.
        redis_url: That of its proxy to Redis.
    """

    host: str
    prefix: tuple[str, ...]
    redis_url: str


def faulty(program: Program) -> Program:
    """A service's program, wrapped and put into its place."""
    places = json.loads(os.environ[PLACES])
    if os.environ.get(IS_SIMULATED):
        program = simulated(program)
    # Without -P: the modules of benchmarks are imported from the working directory.
    python, dash_m, module, *options = (word for word in program.command if word != "-P")
    place = Place("", (), options[options.index("--redis-url") + 1])
    if program.name in places:
        place = Place(**places[program.name])
    options[options.index("--redis-url") + 1] = place.redis_url
    host = ("--host", place.host) if place.host else ()
    return replace(program, command=(*place.prefix, python, dash_m, _WRAPPER, module, *options, *host))


if __name__ == "__main__":
    main(faulty)
