"""The arguments of `gspo replay`."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from gspo.cli.arguments import RunDir


def replay(
    run_dir: RunDir,
    steps: Annotated[
        str | None, typer.Option(help="Steps, such as 10..20, 10.., ..20 or 12. By default all that the log can make.")
    ] = None,
    changes: Annotated[
        list[str] | None, typer.Option("--with", metavar="KEY=VALUE", help="Train with another value of this key.")
    ] = None,
    until_differs: Annotated[
        bool, typer.Option("--until-differs", help="Stop at the first step that is not the recorded one.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the replay. By default in replays/ of the run directory.")
    ] = None,
    tolerance: Annotated[
        float, typer.Option(help="Relative difference that figures may have where digests cannot be equal.")
    ] = 0.01,
    cost: Annotated[
        bool, typer.Option("--cost", help="Say what it would make and how long that takes, and end.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Make steps of a run again from its log, and compare them with the record, without engine, Redis or rewards.

    It starts at the nearest checkpoint that is kept, or at the model, and says the cost first. The run itself is not
    changed, and may be training. On the same machine and libraries every digest and figure is equal to the bit.
    Ctrl-C stops after a step; the same command continues.

    With --with, the same rollouts are trained under other keys, beside the recorded figures.

    Exit code 0: equal, or trained under other keys. 1: a step differs, or could not be made. 2: invalid input.

    Example: [bold]gspo replay runs/my-run --steps 10..20[/]

    Example: [bold]gspo replay runs/my-run --steps 10..20 --with algorithm.pg_clip_high=1e-3[/]

    Example: [bold]gspo replay runs/my-run --until-differs[/]
    """
    from gspo.cli.replay.replayed_steps import ReplayRequest
    from gspo.cli.replay.replayed_steps import replay as make_again

    request = ReplayRequest(run_dir, steps, tuple(changes or ()), until_differs, out, tolerance, as_json, cost)
    raise typer.Exit(make_again(request, Console(), Console(stderr=as_json)))
