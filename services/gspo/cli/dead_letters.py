"""The commands `gspo deadletter ...`: list the entries that a run gave up, put them back, or remove them.

A letter is written in the transaction that removes the entry from its stream. A retry puts the entry back exactly once,
and only while its group is open: a settled group is never trained again.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

import typer
from google.protobuf.message import DecodeError
from redis.asyncio import Redis
from rich.console import Console
from rich.table import Table

from gspo.cli.arguments import Run
from gspo.common.errors import InputError, nearest
from gspo.common.streams.entries import SCHEMA
from gspo.common.streams.inbox import FIELD
from gspo.common.streams.keys import Keys
from gspo_proto.rollout_pb2 import DeadLetter

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Entries that a run gave up: list them, put them back, remove them.",
    epilog="An entry becomes a dead letter if it cannot be read, or if several deliveries of it never finished. Its "
    "group fails, or is issued again after its deadline. The run continues in either case: no letter needs an action.",
)
Letters = Annotated[list[str] | None, typer.Argument(help="Letters, by the names in `list`.")]
All = Annotated[bool, typer.Option("--all", help="All letters.")]
T = TypeVar("T")
Retried: TypeAlias = Literal["sent", "settled", "gone"]
_RESULTS: dict[Retried, str] = {
    "sent": "back in {stream}",
    "settled": "not sent: group {group} is settled already, and a group is never settled twice. Drop the letter",
    "gone": "not sent: the letter does not exist any more; another call has retried or dropped it",
}


# KEYS: dead, the stream of the entry, open. ARGV: letter, payload, group or '' if it has no group to check.
# The call that removes the letter writes the entry, so two concurrent retries write it once.
_RETRY = """
if ARGV[3] ~= '' and redis.call('HEXISTS', KEYS[3], ARGV[3]) == 0 then return 'settled' end
if redis.call('XDEL', KEYS[1], ARGV[1]) == 0 then return 'gone' end
redis.call('XADD', KEYS[2], '*', 'd', ARGV[2])
return 'sent'
"""


@dataclass(frozen=True)
class DeadLetterEntry:
    """An entry of the stream `dead`; `letter` is None if its bytes are not a letter."""

    entry: str
    letter: DeadLetter | None


async def letters(redis: Redis, keys: Keys) -> list[DeadLetterEntry]:
    """Every letter, the oldest first."""
    reply: Any = await redis.xrange(keys.dead)
    return [DeadLetterEntry(entry.decode(), _read(fields.get(FIELD, b""))) for entry, fields in reply]


def _read(payload: bytes) -> DeadLetter | None:
    try:
        letter = DeadLetter.FromString(payload)
    except DecodeError:
        return None
    return letter if letter.schema == SCHEMA and letter.stream else None


async def retry(redis: Redis, keys: Keys, dead: DeadLetterEntry) -> Retried:
    """Put an entry back into its stream: `sent`, or the reason why not (its group is `settled`, the letter `gone`)."""
    letter = dead.letter
    if letter is None:
        return "gone"
    # Only the coordinator knows whether an evaluation is still in flight: it has no slots and no settlement.
    group = str(letter.group) if letter.HasField("group") and not letter.evaluation else ""
    answer: Any = await redis.register_script(_RETRY)(
        keys=[keys.dead, keys.key(letter.stream), keys.open], args=[dead.entry, letter.payload, group]
    )
    retried: Retried = answer.decode()
    return retried


async def drop(redis: Redis, keys: Keys, entries: Iterable[str]) -> int:
    """Remove letters for good; returns how many existed."""
    names = list(entries)
    return int(await redis.xdel(keys.dead, *names)) if names else 0


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
    # here: every `gspo --help` imports this module
    from gspo.cli.rundir.open_run import connect_once, open_run
    from gspo.cli.rundir.start import completion

    opened = open_run(run)
    if opened.redis_url is None:
        if reason := completion(opened.run_dir):
            rule = f"has finished ({reason}), and its dead letters have ended with its Redis"
            raise InputError(str(opened.run_dir), rule, "There is nothing to put back: ask while a run trains")
        rule = "is not running, and its dead letters are in its Redis"
        raise InputError(str(opened.run_dir), rule, "Resume it, then ask again")

    async def answer(redis_url: str) -> T:
        async with connect_once(redis_url, opened.config) as redis:
            return await question(redis, Keys(opened.config.name))

    return asyncio.run(answer(opened.redis_url))


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
