"""The commands `gspo deadletter ...`: list the entries that a run gave up, put them back, or remove them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from redis.asyncio import Redis
from rich.console import Console
from rich.table import Table

from gspo.cli.dead_letter_store import DeadLetterEntry, Retried, drop, letters, retry
from gspo.cli.rundir.open_run import OpenRun, connect_once, open_run
from gspo.common.errors import InputError, nearest
from gspo.common.streams.keys import Keys

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Entries that a run gave up: list them, put them back, remove them.",
    epilog="An entry becomes a dead letter if it cannot be read, or if several deliveries of it never finished. Its "
    "group fails, or is issued again after its deadline. The run continues in either case: no letter needs an action.",
)
Run = Annotated[Path | None, typer.Option("--run", help="Run directory; by default the newest under ./runs.")]
Letters = Annotated[list[str] | None, typer.Argument(help="Letters, by the names in `list`.", show_default=False)]
All = Annotated[bool, typer.Option("--all", help="All letters.")]
T = TypeVar("T")
_RESULTS: dict[Retried, str] = {
    "sent": "back in {stream}",
    "settled": "not sent: group {group} is settled already, and a group is never settled twice. Drop the letter",
    "gone": "not sent: the letter does not exist any more; another call has retried or dropped it",
}


@app.command(name="list")
def list_letters(
    run: Run = None, as_json: Annotated[bool, typer.Option("--json", help="Print the whole records.")] = False
) -> None:
    """List the dead letters: the stream, the group, the reason, the time, and the service that gave the entry up.

    Example: [bold]gspo deadletter list[/]

    Example: [bold]gspo deadletter list --run runs/my-run --json[/]
    """
    entries = _ask(run, letters)
    if as_json:
        print(json.dumps([_record(entry) for entry in entries], indent=2))
    elif entries:
        _print(entries, Console())
    else:
        Console().print("nothing was given up")


@app.command(name="retry")
def retry_letters(names: Letters = None, run: Run = None, every: All = False) -> None:
    """Put entries back into their streams. Each entry is sent once, also if several calls retry it.

    A retry helps if the cause is gone: for example, if a service that could not read the entry was replaced. The
    entry of a settled group is not sent, because that group has ended.

    Exit code 1 if an entry was not sent.

    Example: [bold]gspo deadletter retry 1763761234567-0[/]

    Example: [bold]gspo deadletter retry --all[/]
    """

    async def put_back(redis: Redis, keys: Keys) -> list[tuple[DeadLetterEntry, Retried]]:
        chosen = _chosen(await letters(redis, keys), names, every=every)
        return [(entry, await retry(redis, keys, entry)) for entry in chosen]

    results = _ask(run, put_back)
    for entry, result in results:
        facts = {"stream": entry.letter.stream, "group": entry.letter.group} if entry.letter else {}
        Console().print(f"{entry.entry}: {_RESULTS[result].format(**facts)}", highlight=False, soft_wrap=True)
    if any(result != "sent" for _, result in results):
        raise typer.Exit(1)


@app.command(name="drop")
def drop_letters(names: Letters = None, run: Run = None, every: All = False) -> None:
    """Remove letters for good. The run does not need them.

    Example: [bold]gspo deadletter drop 1763761234567-0[/]

    Example: [bold]gspo deadletter drop --all[/]
    """

    async def remove(redis: Redis, keys: Keys) -> int:
        chosen = _chosen(await letters(redis, keys), names, every=every)
        return await drop(redis, keys, [entry.entry for entry in chosen])

    Console().print(f"{_ask(run, remove)} removed", highlight=False)


def _ask(run: Path | None, question: Callable[[Redis, Keys], Awaitable[T]]) -> T:
    """Ask the Redis of a run.

    Raises:
        InputError: There is no such run, or its Redis does not answer.
    """
    opened = open_run(run)
    if opened.redis_url is None:
        raise InputError(
            str(opened.run_dir), "is not running, and its dead letters are in its Redis", "Resume it, then ask again"
        )
    return asyncio.run(_answer(opened, opened.redis_url, question))


async def _answer(run: OpenRun, redis_url: str, question: Callable[[Redis, Keys], Awaitable[T]]) -> T:
    async with connect_once(redis_url, run.config) as redis:
        return await question(redis, Keys(run.config.name))


def _chosen(entries: list[DeadLetterEntry], names: list[str] | None, *, every: bool) -> list[DeadLetterEntry]:
    """The named letters, or all.

    Raises:
        InputError: No letter is named, or a name does not exist.
    """
    if bool(names) == every:
        raise InputError("LETTERS", "name letters, or say --all, and not both", "gspo deadletter list shows them")
    by_name = {entry.entry: entry for entry in entries}
    for name in names or []:
        if name not in by_name:
            raise InputError("LETTERS", f"there is no letter {name}", nearest(name, by_name))
    return entries if every else [by_name[name] for name in names or []]


def _record(entry: DeadLetterEntry) -> dict[str, Any]:
    """A letter as plain values; scripts rely on these names."""
    letter = entry.letter
    if letter is None:
        return {"letter": entry.entry, "reason": "these bytes are not a letter of this version"}
    return {
        "letter": entry.entry,
        "stream": letter.stream,
        "group": letter.group if letter.HasField("group") else None,
        "number": letter.number if letter.HasField("number") else None,
        "evaluation": letter.evaluation or None,
        "reason": letter.reason,
        "unix_s": letter.unix_s,
        "by": letter.by,
        "attempts": letter.num_deliveries,
        "bytes": len(letter.payload),
    }


def _print(entries: list[DeadLetterEntry], console: Console) -> None:
    table = Table("letter", "stream", "group", "when (UTC)", "attempts", "by", "why", box=None, header_style="dim")
    for entry in entries:
        record = _record(entry)
        group = "-" if record.get("group") is None else str(record["group"])
        if record.get("number") is not None:
            group += f"-{record['number']}"
        if record.get("evaluation"):
            group += f" of {record['evaluation']}"
        when = datetime.fromtimestamp(record["unix_s"], UTC).strftime("%Y-%m-%d %H:%M:%S") if "unix_s" in record else ""
        cells = [str(record.get(name, "")) for name in ("attempts", "by", "reason")]
        table.add_row(entry.entry, str(record.get("stream", "")), group, when, *cells)
    console.print(table)
