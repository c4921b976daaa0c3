"""The commands `gspo reward ...`: hand in a function, look at it, try it, make it active, retire it, remove it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from gspo.common.errors import InputError

app = typer.Typer(no_args_is_help=True, rich_markup_mode="rich", help="Reward functions: submit, try, activate, look.")
Run = Annotated[Path | None, typer.Option("--run", help="Run directory; the newest under ./runs by default.")]
Url = Annotated[str | None, typer.Option("--url", help="Address of a reward service; also GSPO_REWARD_URL.")]
Name = Annotated[str, typer.Argument(help="Name of the function.", show_default=False)]
AsJson = Annotated[bool, typer.Option("--json", help="Print what the service answered.")]


@app.command()
def submit(
    file: Annotated[Path, typer.Argument(help="Python file.", show_default=False)],
    name: Annotated[str | None, typer.Option(help="What runs call it by; the file's name by default.")] = None,
    kind: Annotated[str, typer.Option(help="reward or environment.")] = "reward",
    entry: Annotated[str | None, typer.Option(help="The function, where the file holds more than one.")] = None,
    tests: Annotated[Path | None, typer.Option(help="JSON file: a list of {input, expected}.")] = None,
    timeout_s: Annotated[float | None, typer.Option(help="Longest a call may take.")] = None,
    memory_mb: Annotated[int | None, typer.Option(help="Address space of its process, MiB.")] = None,
    cpu_s: Annotated[float | None, typer.Option(help="Processor time of a call.")] = None,
    activate: Annotated[bool, typer.Option("--activate", help="Let it score at once.")] = False,
    run: Run = None,
    url: Url = None,
) -> None:
    """Hand in a file; it is checked, loaded and tested before it is kept. Prints name and version.

    The first version of a name scores at once, a later one with --activate or `gspo reward activate`.

    Example: [bold]gspo reward submit reward.py --name exact --tests cases.json[/]
    """
    limits = {"timeout_s": timeout_s, "memory_mb": memory_mb, "cpu_s": cpu_s}
    body: dict[str, Any] = {
        "name": name or file.stem,
        "kind": kind,
        "source": _read_text(file),
        "limits": {key: value for key, value in limits.items() if value is not None},
        "tests": [] if tests is None else _read_json(tests),
        "activate": activate,
    }
    if entry is not None:
        body["entry"] = entry
    told = _client(run, url).call("POST", json=body)
    state = "scores now" if told["active"] else f"waits: gspo reward activate {told['name']} {told['version'][:12]}"
    again = "" if told["new"] else " (known before)"
    Console().print(f"{told['name']} {told['version']}{again}\n{state}", highlight=False, soft_wrap=True)


@app.command(name="list")
def list_rewards(run: Run = None, url: Url = None, as_json: AsJson = False) -> None:
    """List every function: of the run's configuration, and submitted.

    Example: [bold]gspo reward list[/]
    """
    from gspo.cli.reward.tables import print_list

    _print(_client(run, url).call("GET"), print_list, as_json=as_json)


@app.command()
def show(
    name: Name,
    version: Annotated[str | None, typer.Option(help="Print the source of this version.")] = None,
    source: Annotated[bool, typer.Option("--source", help="Print the source of the active version.")] = False,
    run: Run = None,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Show a function's versions, and how its calls went; or its source.

    Example: [bold]gspo reward show exact --source[/]
    """
    from gspo.cli.reward.tables import print_one

    client = _client(run, url)
    if source or version:
        query = {"version": version} if version else {}
        typer.echo(client.call("GET", f"/{name}/source", params=query)["source"], nl=False)
        return
    found = {"reward": client.call("GET", f"/{name}"), **client.call("GET", f"/{name}/usage")}
    if found["reward"]["origin"] == "registered":
        found |= client.call("GET", f"/{name}/versions")
    _print(found, print_one, as_json=as_json)


@app.command(name="try")
def try_rows(
    name: Name,
    rows: Annotated[
        Path, typer.Argument(help="JSON lines or a JSON list: prompt, completion, columns; or one with task, actions.")
    ],
    version: Annotated[str | None, typer.Option(help="The active one by default.")] = None,
    run: Run = None,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Score rows of a file with it, and show what it printed; nothing of it reaches a run.

    Example: [bold]gspo reward try exact rows.jsonl[/]
    """
    from gspo.cli.reward.tables import print_trial

    given = _read_rows(rows)
    episode = len(given) == 1 and "actions" in given[0]
    body = {"task": given[0].get("task"), "actions": given[0]["actions"]} if episode else {"rows": given}
    told = _client(run, url).call("POST", f"/{name}/try", json=body | ({"version": version} if version else {}))
    _print(told, print_trial, as_json=as_json)


@app.command()
def activate(
    name: Name,
    version: Annotated[str, typer.Argument(help="The version, or its first 8 or more characters.")],
    if_active: Annotated[str | None, typer.Option(help="Only while this version is active.")] = None,
    run: Run = None,
    url: Url = None,
) -> None:
    """Let a version score, newer or older; calls under way finish on theirs.

    Example: [bold]gspo reward activate exact 9f86d081[/]
    """
    body = {"version": version} | ({"if_active": if_active} if if_active is not None else {})
    told = _client(run, url).call("POST", f"/{name}/activate", json=body)
    Console().print(f"{name}: {_short(told['was'])} -> {_short(told['active'])}", highlight=False)


@app.command()
def retire(name: Name, run: Run = None, url: Url = None) -> None:
    """Leave a name without an active version; a run that pins a version still gets it.

    Example: [bold]gspo reward retire exact[/]
    """
    told = _client(run, url).call("DELETE", f"/{name}")
    Console().print(f"{name}: {_short(told['was'])} -> retired", highlight=False)


@app.command()
def remove(
    name: Name,
    version: Annotated[str, typer.Argument(help="The version, or its first 8 or more characters.")],
    run: Run = None,
    url: Url = None,
) -> None:
    """Remove a version for good, to make room; the active one is refused.

    Example: [bold]gspo reward remove exact 9f86d081[/]
    """
    told = _client(run, url).call("DELETE", f"/{name}/versions/{version}")
    Console().print(f"{name}: {told['removed'][:12]} removed", highlight=False)


@app.command()
def logs(
    name: Name,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="Lines, the newest first.")] = 20,
    run: Run = None,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Show who changed it and when, and the last failure of each version with its traceback and output.

    Example: [bold]gspo reward logs exact[/]
    """
    from gspo.cli.reward.tables import print_logs

    client = _client(run, url)
    lines = client.call("GET", f"/{name}/log", params={"limit": limit})
    _print({**lines, **client.call("GET", f"/{name}/usage")}, print_logs, as_json=as_json)


@app.command()
def serve(
    config: Annotated[Path, typer.Argument(help="Configuration file of the runs to come.", show_default=False)],
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes services.reward_port, or a free one.")] = 0,
) -> None:
    """Serve reward functions without a run, until Ctrl-C: to submit what a configuration will name.

    What is submitted stays in the folder of reward.registry, where the runs find it.

    Example: [bold]gspo reward serve config.yaml[/]
    """
    from gspo.cli.reward.standalone import serve as serve_until_stopped

    raise typer.Exit(serve_until_stopped(config, port, Console()))


def _client(run: Path | None, url: str | None) -> Any:
    from gspo.cli.reward.api_client import find_reward_service

    return find_reward_service(run, url)


def _print(told: Any, show_it: Any, *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(told, indent=2))
    else:
        show_it(told, Console())


def _short(version: str | None) -> str:
    return version[:12] if version else "none"


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(str(path), f"cannot be read ({error})", "Give a text file") from error


def _read_rows(path: Path) -> list[dict[str, Any]]:
    """The objects of a file: one a line, or a list of them."""
    text = _read_text(path)
    is_list = text.lstrip().startswith("[")
    rows = _parse(text, path) if is_list else [_parse(line, path) for line in text.split("\n") if line.strip()]
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        raise InputError(str(path), "holds no rows", 'Write lines of {"prompt": ..., "completion": ..., COLUMN: ...}')
    return rows


def _read_json(path: Path) -> Any:
    return _parse(_read_text(path), path)


def _parse(text: str, path: Path) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise InputError(str(path), f"is not JSON ({error})", "Mend that line") from error
