"""The commands of `gspo`: arguments and help texts. Each one but `export` calls the module that does the work."""

import os
import shlex
import shutil
from enum import StrEnum
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from gspo.cli.arguments import NewestRunDir, Run, RunDir, RunDirs
from gspo.cli.dead_letters import app as dead_letter_app
from gspo.cli.plan.plan_command import plan
from gspo.cli.replay.replay_command import replay
from gspo.cli.reward.subcommands import app as reward_app
from gspo.common.errors import InputError

app = typer.Typer(
    name="gspo",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    epilog="New here? [bold]gspo init my-run --model PATH[/], then [bold]gspo run my-run/config.yaml[/].",
)
app.add_typer(reward_app, name="reward")
app.add_typer(dead_letter_app, name="deadletter")


def _print_version(asked: bool) -> None:
    if asked:
        print(f"gspo {version('gspo')}")
        raise typer.Exit


@app.callback()
def gspo(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Train language models by reinforcement learning (GSPO), with vLLM for rollouts and DeepSpeed for training."""


class ClusterKind(StrEnum):
    """Where `gspo run` starts processes beside this machine."""

    RAY = "ray"


Plain = Annotated[bool, typer.Option("--plain", help="Print a line for each step instead of the live panel.")]


@app.command()
def run(
    config: Annotated[Path, typer.Argument(help="Configuration file, or with --resume a run directory.")],
    resume: Annotated[bool, typer.Option("--resume", help="Continue a run that was stopped or killed.")] = False,
    plain: Plain = False,
    leave_out: Annotated[
        int | None,
        typer.Option(metavar="STEP", min=1, help="With --resume, go on without this step, whose training fails."),
    ] = None,
    cluster: Annotated[
        ClusterKind | None, typer.Option(help="Use the nodes of this cluster, from one of them (docs/cluster.md).")
    ] = None,
    resume_if_begun: Annotated[
        bool, typer.Option("--resume-if-begun", help="Continue the run if it has trained a step; else start it.")
    ] = False,
) -> None:
    """Train a model: start Redis and the services, show the progress, write a report.

    Ctrl-C finishes the current step, writes a checkpoint and prints how to resume. A second Ctrl-C ends at once.

    Example: [bold]gspo run config.yaml[/]

    Example: [bold]gspo run --resume runs/my-run[/]

    Example: [bold]gspo run --resume --leave-out 12 runs/my-run[/]

    Example: [bold]gspo run config.yaml --cluster ray --resume-if-begun[/]
    """
    from gspo.cli.run.training import run as run_to_the_end
    from gspo.cli.rundir.start import has_begun

    resume = resume or (resume_if_begun and has_begun(config))
    if cluster is not None:
        from gspo.cli.cluster.ray_run import run_on_ray

        raise typer.Exit(run_on_ray(config, resume=resume, leave_out=leave_out, plain=plain, console=Console()))
    raise typer.Exit(run_to_the_end(config, resume=resume, leave_out=leave_out, plain=plain, console=Console()))


@app.command()
def agent(
    path: Annotated[Path, typer.Argument(help="Python file with `async def play(task)`, which returns a reward.")],
    url: Annotated[str, typer.Option(help="Address of the run's gateway; `gspo status` prints it.")],
    token_file: Annotated[Path | None, typer.Option(help="The run's services.token_file.")] = None,
    entry: Annotated[str, typer.Option(help="Name of the function.")] = "play",
    rollouts: Annotated[int, typer.Option(min=1, help="Rollouts at a time.")] = 8,
) -> None:
    """Play the rollouts of a run with an agent of yours (agent.external), on any machine, until the run ends.

    The agent runs with your rights, outside of any sandbox.

    Example: [bold]gspo agent my_agent.py --url http://127.0.0.1:8082[/]
    """
    from gspo.cli.play_agent import agent_worker

    raise typer.Exit(agent_worker(path, entry, url, token_file, rollouts, Console()))


@app.command()
def status(
    run_dir: NewestRunDir = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Refresh the page, with CPU and memory of each process, until Ctrl-C.")
    ] = False,
) -> None:
    """Show the progress of a run, the activity of its services, and what limits its speed.

    Example: [bold]gspo status runs/my-run[/]

    Example: [bold]gspo status --watch runs/my-run[/]
    """
    from gspo.cli.monitor.status import status as print_status

    print_status(run_dir, Console(), watch=watch)


@app.command()
def scale(
    number: Annotated[str, typer.Argument(metavar="SERVICE=NUMBER", help="For example generation=6.")],
    run_dir: Run = None,
) -> None:
    """Change the number of generators, reward services or gateways of a running run.

    Those that are too many finish their work, or leave it to the others. A resumed run has the number of its
    configuration again.

    Example: [bold]gspo scale generation=6[/]

    Example: [bold]gspo scale reward=2 --run runs/my-run[/]
    """
    from gspo.cli.run.scaling import scale as ask

    Console().print(ask(run_dir, number), highlight=False, soft_wrap=True)


@app.command()
def config(
    key: Annotated[str, typer.Argument(help="A key or a section; by default all keys.")] = "",
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown.")] = False,
) -> None:
    """Explain the keys of a configuration: type, default, bounds, meaning, changes on resume.

    Example: [bold]gspo config algorithm[/]

    Example: [bold]gspo config staleness.max_lag[/]
    """
    from gspo.cli import keys_table

    if markdown:
        print(keys_table.markdown(key))
    else:
        keys_table.print_keys(key, Console())


@app.command()
def export(
    run_dir: RunDir,
    out: Annotated[Path, typer.Argument(help="New folder.")],
    best: Annotated[bool, typer.Option("--best", help="Copy the best version (needs evaluation.keep_best).")] = False,
    adapter: Annotated[
        bool, typer.Option("--adapter", help="Copy only the adapters of a LoRA run, in peft's format.")
    ] = False,
) -> None:
    """Copy the trained model out of a run, in the Hugging Face format.

    Example: [bold]gspo export runs/my-run my-model[/]

    Example: [bold]gspo export --best runs/my-run my-model[/]
    """
    if not run_dir.is_dir():
        raise InputError(str(run_dir), "is not a folder here", "Give a run directory")
    source = run_dir / ("best" if best else "export")
    if not (source / "config.json").is_file() and best:
        raise InputError(
            str(run_dir),
            "has no best/config.json: no version was kept as the best",
            "Set evaluation.keep_best before the run, for example sampled_mean. "
            "Without --best you get the newest policy",
        )
    if not (source / "config.json").is_file():
        raise InputError(
            str(run_dir),
            "has no export/config.json: no policy was exported yet",
            "A run exports when it ends or is stopped; give a run directory after that",
        )
    if adapter:
        source = source / "adapter"
        if not source.is_dir():
            raise InputError(
                str(source),
                "is missing: this run trained all weights, and has no adapters",
                "Leave --adapter out; set learner.lora.rank before a run to train adapters",
            )
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(str(out), "exists and is not an empty folder", "Name a new one; nothing is overwritten")
    target = Path(os.path.realpath(out))  # a link stays, and a folder takes no link's place
    if target.is_symlink():
        raise InputError(str(out), "is a link that leads back to itself", "Remove it, or name another folder")
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = target.parent / f".{target.name}.tmp"
    shutil.rmtree(scratch, ignore_errors=True)
    try:
        shutil.copytree(source, scratch)
        scratch.replace(target)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    loader = "peft's PeftModel" if adapter else "AutoModelForCausalLM"
    Console().print(f"{out}: load it with {loader}.from_pretrained", highlight=False)


@app.command()
def report(run_dir: RunDir) -> None:
    """Write the report of a run again from its log: summary.json, and its page as one file, report.html.

    Example: [bold]gspo report runs/my-run[/]
    """
    from gspo.cli.rundir.start import check_run_dir
    from gspo.runlog.run_log import PAGE_NAME
    from gspo.view.picture.page import write_report

    check_run_dir(run_dir)
    write_report(run_dir)
    Console().print(f"{run_dir / PAGE_NAME}", highlight=False)


@app.command()
def view(
    run_dirs: RunDirs,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port on 127.0.0.1; 0 picks a free one.")] = 8090,
    open_path: Annotated[
        str | None, typer.Option("--open", help="Show this path of the page in the reader's open tabs, and end.")
    ] = None,
    note: Annotated[str, typer.Option(help="With --open: a line above the view.")] = "",
    socket: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """Serve a page of a run on this machine, finished or live, read only, until Ctrl-C: verdict, curves, rollouts.

    Example: [bold]gspo view runs/my-run[/], or [bold]gspo view runs/a runs/b[/] to compare two

    Example: [bold]gspo view runs/my-run --open /steps/10/groups/83 --note "all four fail alike"[/]
    """
    if open_path is not None:
        from gspo.cli.monitor.page_call import open_view

        Console().print(open_view(run_dirs[0], port, open_path, note), highlight=False, soft_wrap=True)
        return
    from gspo.cli.monitor.viewed_runs import viewed_runs
    from gspo.view.page_server import serve_page, serve_socket

    if socket is not None:
        serve_socket(viewed_runs(run_dirs), socket)
    else:
        serve_page(viewed_runs(run_dirs), port, lambda url: Console().print(url, highlight=False))


@app.command()
def init(
    folder: Annotated[Path, typer.Argument(help="Folder for the example.")],
    model: Annotated[
        str, typer.Option(help="Model folder, its name on a hub, or tiny: a small model that is made here.")
    ] = "Qwen/Qwen3-0.6B",
) -> None:
    """Write an example that you can run: config.yaml, reward.py, prompts.jsonl, eval.jsonl.

    A model's folder is linked into the example, so that the folder is all that a container needs.

    Example: [bold]gspo init my-run --model ~/models/Qwen3-0.6B[/]

    Example: [bold]gspo init my-run --model tiny[/]
    """
    from gspo.cli.scaffold import write_example

    paths, notes = write_example(folder, model)
    config = shlex.quote(str(paths[0]))
    console = Console()
    hints = (f"Check the machine: gspo doctor {config}", f"Train: gspo run {config}")
    for line in (*map(str, paths), *notes, "", *hints):
        console.print(line, highlight=False, soft_wrap=True)


@app.command()
def certs(
    folder: Annotated[Path, typer.Argument(help="Folder for the files.")],
    host: Annotated[list[str] | None, typer.Option(help="Further host name or address in the certificate.")] = None,
    days: Annotated[int, typer.Option(min=1, help="Days until the certificate expires.")] = 365,
) -> None:
    """Create the credentials of a cluster: a token, a Redis password, and a certificate for TLS.

    Copy the files to every host of the cluster, over an encrypted connection.

    Example: [bold]gspo certs /etc/gspo[/]
    """
    from gspo.cli.certs import make_secrets, settings

    paths = make_secrets(folder, tuple(host or ()), days)
    print(settings(paths))


@app.command()
def doctor(
    config: Annotated[Path | None, typer.Argument(help="Check against the needs of this configuration too.")] = None,
    sample: Annotated[
        bool, typer.Option("--sample", help="Also let the model answer some training prompts, and score the answers.")
    ] = False,
) -> None:
    """Check the machine: memory, cores, disk, ports, Redis, model, compiler, GPU, engines.

    Exit code 1 if there is a problem.

    With --sample, the engine and the reward of the configuration run for some answers to each source of prompts. It
    says whether their rewards could teach anything, and whether the answers end.

    Example: [bold]gspo doctor config.yaml[/]

    Example: [bold]gspo doctor config.yaml --sample[/]
    """
    from gspo.cli.doctor import doctor as look

    if sample and config is None:
        raise InputError("--sample", "needs a configuration", "Name it: gspo doctor config.yaml --sample")
    raise typer.Exit(look(config, Console(), samples=sample))


app.command()(plan)
app.command()(replay)


@app.command(name="eval")
def evaluate(
    model: Annotated[str, typer.Argument(help="Model folder, or its name on a hub.")],
    prompts: Annotated[list[Path], typer.Argument(help="One or more files of prompts, in a format of data.prompts.")],
    reward: Annotated[Path | None, typer.Option(help="Python file with the reward function.")] = None,
    config: Annotated[Path | None, typer.Option(help="Configuration for all other keys.")] = None,
    answers: Annotated[int | None, typer.Option(help="Sampled answers for each prompt; 4 by default.")] = None,
    temperature: Annotated[
        float | None, typer.Option(help="Temperature of the sampled answers; 1.0 by default.")
    ] = None,
    prompt_length: Annotated[int | None, typer.Option(help="Maximum length of a prompt, in tokens.")] = None,
    response_length: Annotated[int | None, typer.Option(help="Maximum length of an answer, in tokens.")] = None,
    limit: Annotated[int | None, typer.Option(help="Maximum number of prompts.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the sampling.")] = None,
    source: Annotated[
        str | None, typer.Option(help="Of several sources of prompts in --config, the one that scores the answers.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="File for the figures, as JSON.")] = None,
    plain: Plain = False,
) -> None:
    """Measure a model on prompts: mean reward (sampled and greedy) and pass@k, with standard errors.

    Example: [bold]gspo eval runs/my-run/export eval.jsonl --config runs/my-run/config.yaml[/]

    Example: [bold]gspo eval ~/models/Qwen3-0.6B eval.jsonl --reward reward.py --out result.json[/]
    """
    from gspo.cli.run.evaluation import EvaluationSpec
    from gspo.cli.run.evaluation import evaluate as measure

    spec = EvaluationSpec(
        model, tuple(prompts), config, reward, answers, temperature, prompt_length, response_length, limit, seed, source
    )
    raise typer.Exit(measure(spec, out, plain=plain, console=Console()))
