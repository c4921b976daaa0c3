"""`python -m examples.experiments long` and `moe`: GSPO beside GRPO on an example, and the page of it."""

from __future__ import annotations

import signal

import typer

from examples.experiments.long.experiments import long
from examples.experiments.moe.stability import moe

app = typer.Typer(help=__doc__, add_completion=False)
for command in (moe, long):
    app.command()(command)

if __name__ == "__main__":
    # A terminated experiment ends its runs as an interrupted one does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    app()
