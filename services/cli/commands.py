"""The commands of `gspo`: their arguments and their help, each with an example.

They do nothing themselves. Neighbours: run.py, evaluate.py, status.py, scaffold.py, keys_table.py, doctor.py.
Their modules are imported when called, so that `--help` answers at once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

app = typer.Typer(
    name="gspo",
    help="Reinforcement learning for language models: GSPO with vLLM, DeepSpeed and services that survive a crash.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    epilog="New here? [bold]gspo init my-run --model PATH[/], then [bold]gspo run my-run/config.yaml[/].",
)
Plain = Annotated[bool, typer.Option("--plain", help="One line a step instead of the live view.")]


@app.command()
def run(
    config: Annotated[
        Path, typer.Argument(help="Configuration file; with --resume also a run directory.", show_default=False)
    ],
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a run that was stopped or died.")] = False,
    plain: Plain = False,
) -> None:
    """Train: start Redis, the four services, watch them, report.

    Ctrl-C finishes the step under way, writes a checkpoint and says how to resume; a second one leaves at once.

    Example: [bold]gspo run config.yaml[/]

    Example: [bold]gspo run --resume runs/my-run[/]
    """
    from services.cli.run import run as run_to_the_end

    raise typer.Exit(run_to_the_end(config, resume=resume, plain=plain, console=Console()))


@app.command()
def status(
    run_dir: Annotated[
        Path | None, typer.Argument(help="Run directory; the newest under ./runs by default.", show_default=False)
    ] = None,
) -> None:
    """Show what every service of a run is doing or waiting for, and since when.

    Example: [bold]gspo status runs/my-run[/]
    """
    from services.cli.status import status as print_status

    print_status(run_dir, Console())


@app.command()
def config(
    key: Annotated[str, typer.Argument(help="A key or a section; every key by default.", show_default=False)] = "",
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown, for documentation.")] = False,
) -> None:
    """Explain every key of a configuration: type, default, bounds, whether it may change on resume, meaning.

    Example: [bold]gspo config algorithm[/]

    Example: [bold]gspo config staleness.max_lag[/]
    """
    from services.cli import keys_table

    if markdown:
        print(keys_table.markdown(key))
    else:
        keys_table.print_keys(key, Console())


@app.command()
def export(
    run_dir: Annotated[Path, typer.Argument(help="Run directory.", show_default=False)],
    out: Annotated[Path, typer.Argument(help="Folder to make.", show_default=False)],
) -> None:
    """Copy the newest policy of a run out, in the Hugging Face format.

    Example: [bold]gspo export runs/my-run my-model[/]
    """
    from services.cli.export import export as copy_out

    Console().print(f"{copy_out(run_dir, out)}: load it with AutoModelForCausalLM.from_pretrained", highlight=False)


@app.command()
def report(run_dir: Annotated[Path, typer.Argument(help="Run directory.", show_default=False)]) -> None:
    """Write summary.json, plots and report.html of a run again, from its log.

    Example: [bold]gspo report runs/my-run[/]
    """
    from services.cli.report import write_report
    from services.cli.rundir import check_run_dir

    check_run_dir(run_dir)
    write_report(run_dir)
    Console().print(f"{run_dir / 'report.html'}", highlight=False)
