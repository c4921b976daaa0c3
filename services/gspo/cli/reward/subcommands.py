"""The commands `gspo reward ...`: submit, list, show, try, activate, retire and remove reward functions.

The modules that call or run a service are imported by the commands: their imports take time.
"""

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gspo.cli.arguments import Run, RunDir
from gspo.common.errors import InputError, printable
from gspo.common.modules_beside import modules_beside

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Reward functions of a running service: submit, try, activate, inspect.",
)
# Of `compare`.
_TRIAL_S = 900.0
Url = Annotated[str | None, typer.Option("--url", help="Address of a reward service; or set GSPO_REWARD_URL.")]
Name = Annotated[str, typer.Argument(help="Name of the function.", show_default=False)]
AsJson = Annotated[bool, typer.Option("--json", help="Print the reply of the service.")]


@app.command()
def submit(
    file: Annotated[Path, typer.Argument(help="Python file.", show_default=False)],
    name: Annotated[str | None, typer.Option(help="Name for configurations; by default the name of the file.")] = None,
    kind: Annotated[str, typer.Option(help="reward or environment.")] = "reward",
    entry: Annotated[str | None, typer.Option(help="Name of the function, if the file has several.")] = None,
    tests: Annotated[Path | None, typer.Option(help="JSON file: a list of {input, expected}.")] = None,
    timeout_s: Annotated[float | None, typer.Option(help="Time limit of a call, in seconds.")] = None,
    memory_mb: Annotated[int | None, typer.Option(help="Limit of its address space, in MiB.")] = None,
    cpu_s: Annotated[float | None, typer.Option(help="Processor time of a call, in seconds.")] = None,
    activate: Annotated[bool, typer.Option("--activate", help="Use it for scoring at once.")] = False,
    run: Run = None,
    url: Url = None,
) -> None:
    """Submit a file with the modules beside it that it imports. The service checks, loads and tests it, then stores it.

    The first version of a name is active at once. A later one needs --activate or `gspo reward activate`.

    Example: [bold]gspo reward submit reward.py --name exact --tests cases.json[/]
    """
    limits, source = {"timeout_s": timeout_s, "memory_mb": memory_mb, "cpu_s": cpu_s}, _read_text(file)
    body: dict[str, Any] = {
        "name": name or file.stem,
        "kind": kind,
        "source": source,
        "modules": modules_beside(file, source, str(file)),
        "limits": {key: value for key, value in limits.items() if value is not None},
        "tests": [] if tests is None else _parse(_read_text(tests), tests),
        "activate": activate,
    }
    if entry is not None:
        body["entry"] = entry
    reply = _client(run, url).call("POST", json=body)
    name, version = reply["name"], reply["version"]
    state = (
        "active: scores from now on" if reply["active"] else f"not active: gspo reward activate {name} {version[:12]}"
    )
    again = "" if reply["new"] else " (known before)"
    Console().print(f"{name} {version}{again}\n{state}", highlight=False, soft_wrap=True)


@app.command(name="list")
def list_rewards(run: Run = None, url: Url = None, as_json: AsJson = False) -> None:
    """List all functions: those of the configuration, and the submitted ones.

    Example: [bold]gspo reward list[/]
    """
    _print(_client(run, url).call("GET"), _print_list, as_json=as_json)


@app.command()
def show(
    name: Name,
    version: Annotated[str | None, typer.Option(help="Print the source of this version.")] = None,
    source: Annotated[bool, typer.Option("--source", help="Print the source of the active version.")] = False,
    run: Run = None,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Show the versions of a function with the outcomes of their calls, or its source.

    Example: [bold]gspo reward show exact --source[/]
    """
    client = _client(run, url)
    if source or version:
        query = {"version": version} if version else {}
        reply = client.call("GET", f"/{name}/source", params=query)
        typer.echo(reply["source"], nl=False)
        for path, text in reply["modules"].items():
            typer.echo(f"\n# {path}\n{text}", nl=False)
        return
    facts = {"reward": client.call("GET", f"/{name}"), **client.call("GET", f"/{name}/usage")}
    if facts["reward"]["origin"] == "registered":
        facts |= client.call("GET", f"/{name}/versions")
    _print(facts, _print_function, as_json=as_json)


@app.command(name="try")
def try_rows(
    name: Name,
    rows: Annotated[
        Path,
        typer.Argument(
            help="Rows of prompt, completion and columns, in any form of data.prompts; or one row of task and actions."
        ),
    ],
    version: Annotated[str | None, typer.Option(help="By default the active version.")] = None,
    run: Run = None,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Score the rows of a file and show the output of the function. No run is affected.

    Example: [bold]gspo reward try exact rows.jsonl[/]
    """
    from gspo.common.data.row_reader import RowReader

    content = [row.columns for row in RowReader("ROWS", [rows])]  # as a run reads them
    is_episode = len(content) == 1 and "actions" in content[0]
    body = {"task": content[0].get("task"), "actions": content[0]["actions"]} if is_episode else {"rows": content}
    reply = _client(run, url).call("POST", f"/{name}/try", json=body | ({"version": version} if version else {}))
    _print(reply, _print_trial, as_json=as_json)


@app.command()
def compare(
    run_dir: RunDir,
    what: Annotated[str, typer.Argument(help="Python file, or the beginning of a version in the log.")],
    function: Annotated[str, typer.Option(help="The function that it stands for, if the run has several.")] = "",
    steps: Annotated[int, typer.Option(min=1, help="Number of last steps.")] = 1,
    rollouts: Annotated[int, typer.Option(min=1, max=4096, help="Rollouts at most; whole groups are taken.")] = 256,
    as_json: Annotated[bool, typer.Option("--json", help="Print every rollout as JSON.")] = False,
) -> None:
    """Score logged rollouts with another version of a function, and show the changes. No service is needed.

    It runs in a sandbox of its own, under the limits of the run's configuration. The run is not changed.

    Example: [bold]gspo reward compare runs/my-run new_reward.py --steps 5[/]
    """
    from dataclasses import asdict

    from gspo.cli.processes.exit_codes import RunError
    from gspo.cli.rundir.start import check_run_dir
    from gspo.view.log_trial import TrialError, try_on_log

    check_run_dir(run_dir)
    try:
        tried = asyncio.run(try_on_log(run_dir, what, function, steps, rollouts, _TRIAL_S))
    except TrialError as error:
        raise RunError(str(error)) from error
    if as_json:
        typer.echo(json.dumps([asdict(rollout) for rollout in tried], indent=2))
        return
    table = _table("step", "group", "rollout", "score", "tried", "reward", "tried", "")
    changed = [rollout for rollout in tried if rollout.is_changed]
    for rollout in changed:
        words = rollout.failure or ("the advantage changes sign" if rollout.is_flipped else "")
        scores = (rollout.old, rollout.new, rollout.old_reward, rollout.new_reward)
        shown = ["failed" if score is None else f"{score:.4g}" for score in scores]
        table.add_row(*map(_text, (rollout.step, rollout.group, rollout.number, *shown, words)))
    console = Console()
    console.print(table)
    flipped = sum(rollout.is_flipped for rollout in tried)
    failed = sum(bool(rollout.failure) for rollout in tried)
    console.print(
        f"{len(tried)} rollouts: {len(changed)} scores change, {flipped} advantages change sign, {failed} fail",
        highlight=False,
    )


@app.command()
def activate(
    name: Name,
    version: Annotated[str, typer.Argument(help="The version, or at least its first 8 characters.")],
    if_active: Annotated[str | None, typer.Option(help="Only while this version is active.")] = None,
    run: Run = None,
    url: Url = None,
) -> None:
    """Make a version the active one. Calls in flight finish with the version they began with.

    Example: [bold]gspo reward activate exact 9f86d081[/]
    """
    body = {"version": version} | ({"if_active": if_active} if if_active is not None else {})
    reply = _client(run, url).call("POST", f"/{name}/activate", json=body)
    Console().print(f"{name}: {_short(reply['was'])} -> {_short(reply['active'])}", highlight=False)


@app.command()
def retire(name: Name, run: Run = None, url: Url = None) -> None:
    """Deactivate a name. A configuration that pins a version can still use it.

    Example: [bold]gspo reward retire exact[/]
    """
    reply = _client(run, url).call("DELETE", f"/{name}")
    Console().print(f"{name}: {_short(reply['was'])} -> retired", highlight=False)


@app.command()
def remove(
    name: Name,
    version: Annotated[str, typer.Argument(help="The version, or at least its first 8 characters.")],
    run: Run = None,
    url: Url = None,
) -> None:
    """Remove a version for good. The active version cannot be removed.

    Example: [bold]gspo reward remove exact 9f86d081[/]
    """
    reply = _client(run, url).call("DELETE", f"/{name}/versions/{version}")
    Console().print(f"{name}: {reply['removed'][:12]} removed", highlight=False)


@app.command()
def logs(
    name: Name,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="Number of lines, the newest first.")] = 20,
    run: Run = None,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Show the changes of a function, and the last failure of each version with traceback and output.

    Example: [bold]gspo reward logs exact[/]
    """
    client = _client(run, url)
    lines = client.call("GET", f"/{name}/log", params={"limit": limit})
    _print({**lines, **client.call("GET", f"/{name}/usage")}, _print_logs, as_json=as_json)


@app.command()
def serve(
    config: Annotated[Path, typer.Argument(help="Configuration file of later runs.", show_default=False)],
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port; 0 takes services.reward_port, or a free port.")
    ] = 0,
) -> None:
    """Run the reward service without a training run, until Ctrl-C, to submit functions for later runs.

    Submitted functions stay in the folder of reward.registry, where the runs read them.

    Example: [bold]gspo reward serve config.yaml[/]
    """
    from gspo.cli.reward.standalone import serve as serve_until_stopped

    raise typer.Exit(serve_until_stopped(config, port, Console()))


def _client(run: Path | None, url: str | None) -> Any:
    from gspo.cli.reward.api_client import find_reward_service

    return find_reward_service(run, url)


def _print(reply: dict[str, Any], print_table: Callable[[dict[str, Any], Console], None], *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(reply, indent=2))
    else:
        print_table(reply, Console())


def _print_list(reply: dict[str, Any], console: Console) -> None:
    """Print a line for each function."""
    table = _table("name", "kind", "active", "versions", "convention", "from")
    for function in reply["rewards"]:
        active = function["active"][:12] if function["active"] else "retired"
        origin = function["source"] if function["origin"] == "configured" else "submitted"
        cells = (function["name"], function["kind"], active, function["versions"], function["convention"])
        table.add_row(*map(_text, (*cells, function["unreadable"] or origin)))
    console.print(table if reply["rewards"] else "no function yet: gspo reward submit FILE")


def _print_function(reply: dict[str, Any], console: Console) -> None:
    """Print the versions of one function, and the outcomes of their calls."""
    usage = {calls["version"]: calls for calls in reply["usage"]}
    configured = {"version": reply["reward"]["active"], "active": True, "entry": reply["reward"]["entry"]}
    table = _table("version", "active", "function", "submitted", "calls", "failures", "p50", "p99")
    for version in reply.get("versions") or [configured]:
        calls = usage.get(version["version"], {"calls": 0, "errors": {}, "latency_s": {}})
        failures = ", ".join(f"{count} {kind}" for kind, count in calls["errors"].items())
        submitted = "configured"
        if "submitted_by" in version:
            submitted = f"{_when(version['submitted_unix_s'])} by {version['submitted_by']}"
        latency = [_seconds(calls["latency_s"].get(name)) for name in ("p50", "p99")]
        active = "yes" if version["active"] else ""
        entry = version.get("unreadable") or version["entry"]
        cells = (version["version"][:12], active, entry, submitted, calls["calls"], failures, *latency)
        table.add_row(*map(_text, cells))
    console.print(table)


def _print_trial(reply: dict[str, Any], console: Console) -> None:
    """Print a line for each row, with its reward or failure, and the output of the function."""
    table = _table("row", "reward", "parts", "")
    for number, result in enumerate(reply["results"]):
        failure, parts = result["failure"], {**result["parts"], **result["extras"]}
        values = ", ".join(f"{name} {value:g}" for name, value in parts.items())
        more = f"{failure['kind']}: {failure['text']}" if failure else str(result["observation"] or "")
        table.add_row(*map(_text, (number, "failed" if failure else f"{result['reward']:g}", values, more)))
    console.print(table)
    if reply["output"]:
        console.print(_text(f"it printed:\n{reply['output'].rstrip()}"))
    traceback = next((result["failure"]["traceback"] for result in reply["results"] if result["failure"]), "")
    if traceback:
        console.print(_text(traceback.rstrip()))
    console.print(f"version {reply['version'][:12]}, {_seconds(reply['seconds'])}", highlight=False)


def _print_logs(reply: dict[str, Any], console: Console) -> None:
    """Print the changes, and the last failure of each version."""
    for line in reply["lines"]:
        action = f"{line['action']} {line['version'][:12]}".rstrip()
        was = f" (was {line['was'][:12]})" if line["was"] else ""
        console.print(_text(f"{_when(line['unix_s'])}  {line['who']}: {action}{was}"))
    for calls in reply["usage"]:
        if failure := calls["last_failure"]:
            head = f"\n{calls['version'][:12]} failed last {_when(failure['unix_s'])}: {failure['kind']}"
            console.print(_text(f"{head}: {failure['text']}"))
            for text in (failure["traceback"], failure["output"]):
                if text:
                    console.print(_text(text.rstrip()))


def _short(version: str | None) -> str:
    return version[:12] if version else "none"


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(str(path), f"cannot be read ({error})", "Give a text file") from error


def _parse(text: str, path: Path) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise InputError(str(path), f"is not JSON ({error})", "Fix that line") from error


def _text(value: object) -> Text:
    """Foreign text without rich's markup and without control characters."""
    return Text(printable(str(value)))


def _table(*names: str) -> Table:
    return Table(*names, box=None, header_style="dim")


def _when(unix_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix_s))


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value * 1000:.1f} ms" if value < 1 else f"{value:.2f} s"
