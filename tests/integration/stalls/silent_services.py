"""`gspo run` with simulated services, whose generators take a version without an answer while a file is there.

GSPO_SILENT names the file. `python -m tests.integration.stalls.silent_services CONFIG --plain` runs;
`... serve MODULE OPTIONS` is one service, in which a stall shows after GSPO_STALL_LIMIT_S.
"""

from __future__ import annotations

import asyncio
import os
import runpy
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.simulated.run import main, simulated
from gspo.cli.processes.child import Program

SILENT, LIMIT_S = "GSPO_SILENT", "GSPO_STALL_LIMIT_S"


def silent(program: Program) -> Program:
    """A service's simulated program within this module."""
    python, dash_m, module, *options = simulated(program).command
    return replace(program, command=(python, dash_m, __spec__.name, "serve", module, *options))


def make_silent() -> None:
    """Keep the answers to pushes while the file is there."""
    from gspo.generation.receiver import Receiver

    receive, file = Receiver.receive, Path(os.environ[SILENT])

    async def without_answer(self: Receiver, *args: Any) -> Any:
        result = await receive(self, *args)
        if file.exists():
            file.unlink()
            await asyncio.Event().wait()
        return result

    Receiver.receive = without_answer  # type: ignore[assignment]


def serve() -> None:
    """Be the module, with its fault."""
    from gspo.coordinator import stall_watch

    _, _, module, *options = sys.argv
    stall_watch._LEAST_LIMIT_S = float(os.environ[LIMIT_S])
    if module.endswith("generation"):
        make_silent()
    sys.argv = [module, *options]
    runpy.run_module(module, run_name="__main__")


if __name__ == "__main__":
    serve() if sys.argv[1] == "serve" else main(silent)
