"""Start the generation service: `python -m services.generation --run-dir DIR`."""

from __future__ import annotations

import os

from services.common.cpu_threads import generation_threads
from services.common.freed_memory import keep_freed_memory
from services.common.runtime import await_start, parse_options, run_service
from services.generation.check import check

MEANING = "Turns prompts into rollouts with vLLM, a log-prob and a policy version for every token."


def main() -> None:
    """Check, or serve until the run ends."""
    # Its check may import vLLM, which reads the variable below.
    options = parse_options("generation", check, meaning=MEANING, checks_in_life=True)
    # Read when torch is loaded; vLLM leaves a number that is set alone, and takes one thread where none is.
    os.environ["OMP_NUM_THREADS"] = str(generation_threads(options.config.generation.threads))
    keep_freed_memory()
    # After the options: importing vLLM takes seconds.
    from services.generation.life import live
    from services.generation.start import start_engine

    run_service(await_start(options), lambda service: live(service, start_engine))


if __name__ == "__main__":
    main()
