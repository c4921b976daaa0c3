"""A model learns to use a calculator: a cold start, then reinforcement learning on whole conversations.

Not part of the package: it makes the files that a user would bring, and calls `gspo run` on them as a user would.
cold_start.py makes model and problems, config.yaml says how they are trained; environment and reward are built in.
"""

import sys
from pathlib import Path
from typing import Annotated

import typer

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent.parent)]


def main(
    seed: Annotated[int, typer.Option(min=0, help="Everything that is drawn: lessons, weights, order, samples")] = 0,
    steps: Annotated[int | None, typer.Option(min=1, help="Steps to train; config.yaml's by default")] = None,
    runs: Annotated[Path, typer.Option(help="Folder for the run directory")] = HERE.parent.parent / "runs",
    cache: Annotated[Path, typer.Option(help="Folder for cold starts")] = HERE.parent.parent / f".cache/{HERE.name}",
) -> None:
    """Make a small model that seldom uses its tool, and train it by its rewards alone."""
    from cold_start import make
    from conversations import run

    folder = (cache / f"seed-{seed}").resolve()
    make(folder, seed)
    raise typer.Exit(run(HERE, folder, runs.resolve(), seed, steps))


if __name__ == "__main__":
    typer.run(main)
