"""The commands `gspo deadletter ...`: what a run gave up and why; put it back, or remove it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from redis.asyncio import Redis
from redis.exceptions import RedisError
from rich.console import Console
from rich.table import Table

from gspo.cli.dead_letter_store import DeadLetterEntry, Retried, drop, letters, retry
from gspo.cli.rundir.open_run import open_run
from gspo.common.config.schema import Config
from gspo.common.errors import InputError, nearest
from gspo.common.network.credentials import redis_arguments, redis_refusal
from gspo.common.streams.keys import Keys

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="What a run gave up: list it, put it back, remove it.",
    epilog="A letter is written when an entry of a stream cannot be read, or was handed out too often and never "
    "finished. Its group ends as failed, or is issued again past its deadline: no letter needs an answer for the run "
    "to go on.",
)
Run = Annotated[Path | None, typer.Option("--run", help="Run directory; the newest under ./runs by default.")]
Letters = Annotated[list[str] | None, typer.Argument(help="Letters, as `list` names them.", show_default=False)]
All = Annotated[bool, typer.Option("--all", help="Every letter there is.")]
T = TypeVar("T")
_ANSWERS: dict[Retried, str] = {
    "sent": "back in {stream}",
    "settled": "not sent: group {group} is settled already, and a group is never settled twice. Drop the letter",
    "gone": "not sent: it is no letter any more; somebody else has retried or dropped it",
}


@app.command(name="list")
def list_letters(
    run: Run = None, as_json: Annotated[bool, typer.Option("--json", help="Print the whole records.")] = False
) -> None:
    """List what was given up: in which stream, of which group, why, when, by whom.

    Example: [bold]gspo deadletter list[/]

    Example: [bold]gspo deadletter list --run runs/my-run --json[/]
    """
    found = _ask(run, letters)
    if as_json:
        print(json.dumps([_record(letter) for letter in found], indent=2))
    elif found:
        _print(found, Console())
    else:
        Console().print("nothing was given up")


@app.command(name="retry")
def retry_letters(wanted: Letters = None, run: Run = None, every: All = False) -> None:
    """Put entries back into their streams, each exactly once, however often and from where this is called.

    It helps where the cause has gone: a service that could not read the entry was replaced, a machine that killed
    every worker was mended. The entry of a group that is settled is not sent: that group has ended.

    Exit code 1 where one was not sent.

    Example: [bold]gspo deadletter retry 1763761234567-0[/]

    Example: [bold]gspo deadletter retry --all[/]
    """

    async def put_back(redis: Redis, keys: Keys) -> list[tuple[DeadLetterEntry, Retried]]:
        chosen = _chosen(await letters(redis, keys), wanted, every=every)
        return [(found, await retry(redis, keys, found)) for found in chosen]

    told = _ask(run, put_back)
    for found, answer in told:
        letter = found.letter
        facts = {"stream": letter.stream, "group": letter.group} if letter else {}
        Console().print(f"{found.entry}: {_ANSWERS[answer].format(**facts)}", highlight=False, soft_wrap=True)
    if any(answer != "sent" for _, answer in told):
        raise typer.Exit(1)


@app.command(name="drop")
def drop_letters(wanted: Letters = None, run: Run = None, every: All = False) -> None:
    """Remove letters for good. The run does not miss them.

    Example: [bold]gspo deadletter drop 1763761234567-0[/]

    Example: [bold]gspo deadletter drop --all[/]
    """

    async def remove(redis: Redis, keys: Keys) -> int:
        chosen = _chosen(await letters(redis, keys), wanted, every=every)
        return await drop(redis, keys, [found.entry for found in chosen])

    Console().print(f"{_ask(run, remove)} removed", highlight=False)


def _ask(run: Path | None, question: Callable[[Redis, Keys], Awaitable[T]]) -> T:
    """What a run's Redis answers.

    Raises:
        InputError: There is no such run, or its Redis does not answer.
    """
    opened = open_run(run)
    if opened.redis_url is None:
        raise InputError(
            str(opened.run_dir), "is not running, and its dead letters are in its Redis", "Resume it, then ask again"
        )
    return asyncio.run(_answer(opened.redis_url, opened.config, question))


async def _answer(url: str, config: Config, question: Callable[[Redis, Keys], Awaitable[T]]) -> T:
    given = redis_arguments(url, config)
    redis = Redis.from_url(url, protocol=2, socket_connect_timeout=3.0, socket_timeout=10.0, **given)
    try:
        return await question(redis, Keys(config.name))
    except (RedisError, OSError) as error:
        if refusal := redis_refusal(error):
            raise refusal from error
        raise InputError("redis", f"does not answer ({error})", "The run may be starting or ending") from error
    finally:
        await redis.aclose()


def _chosen(found: list[DeadLetterEntry], wanted: list[str] | None, *, every: bool) -> list[DeadLetterEntry]:
    """The letters that are asked for.

    Raises:
        InputError: None is named, or one that is not there.
    """
    if bool(wanted) == every:
        raise InputError("LETTERS", "name letters, or say --all, and not both", "gspo deadletter list shows them")
    by_entry = {letter.entry: letter for letter in found}
    for name in wanted or []:
        if name not in by_entry:
            raise InputError("LETTERS", f"there is no letter {name}", nearest(name, by_entry))
    return found if every else [by_entry[name] for name in wanted or []]


def _record(found: DeadLetterEntry) -> dict[str, Any]:
    """One letter as plain values; the names here stay as they are."""
    letter = found.letter
    if letter is None:
        return {"letter": found.entry, "reason": "these bytes are no letter of this version"}
    return {
        "letter": found.entry,
        "stream": letter.stream,
        "group": letter.group if letter.HasField("group") else None,
        "number": letter.number if letter.HasField("number") else None,
        "evaluation": letter.evaluation or None,
        "reason": letter.reason,
        "unix_s": letter.unix_s,
        "by": letter.by,
        "attempts": letter.attempts,
        "bytes": len(letter.payload),
    }


def _print(found: list[DeadLetterEntry], console: Console) -> None:
    table = Table("letter", "stream", "group", "when (UTC)", "attempts", "by", "why", box=None, header_style="dim")
    for letter in found:
        record = _record(letter)
        group = "-" if record.get("group") is None else str(record["group"])
        if record.get("number") is not None:
            group += f"-{record['number']}"
        if record.get("evaluation"):
            group += f" of {record['evaluation']}"
        when = datetime.fromtimestamp(record["unix_s"], UTC).strftime("%Y-%m-%d %H:%M:%S") if "unix_s" in record else ""
        cells = [str(record.get(name, "")) for name in ("attempts", "by", "reason")]
        table.add_row(letter.entry, str(record.get("stream", "")), group, when, *cells)
    console.print(table)
