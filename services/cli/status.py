"""`gspo status`: what everyone in a run is doing or waiting for, now.

It changes nothing. Neighbours: rundir.py knows whether a supervisor lives, members.py who is there.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from redis.asyncio import Redis
from redis.exceptions import RedisError
from rich.console import Console
from rich.table import Table

from services.cli.generators import in_trouble
from services.cli.live import process_cells
from services.cli.rundir import PAGE_NAME, SUMMARY_NAME, check_run_dir, is_held, supervisor_facts
from services.cli.view import Phases, Process, View, held_out_line, load_history, step_line
from services.common.configfile import read_config
from services.common.errors import InputError
from services.common.keys import Keys
from services.common.members import Member, members
from services.common.runtime import CONFIG_NAME

_ANSWER_S = 3.0


def status(run_dir: Path | None, console: Console) -> None:
    """Print the state of a run; of the newest one under ./runs where none is given.

    Raises:
        InputError: There is no run.
    """
    run_dir = run_dir or _newest(Path("runs"))
    check_run_dir(run_dir)
    config = read_config(run_dir / CONFIG_NAME)
    view = View(config, run_dir, {}, Phases())
    load_history(view)
    console.print(f"[bold]{run_dir}[/]", highlight=False)
    console.print(step_line(view) if view.step else "no step trained yet", highlight=False)
    for file, measured in view.held_out.items():
        version, figures = measured[-1]
        console.print(f"{file or 'held-out prompts'} at version {version}: {held_out_line(figures)}", highlight=False)
    if view.best is not None:
        console.print(f"best by {config.evaluation.keep_best}: version {view.best[0]}", highlight=False)
    facts = supervisor_facts(run_dir)
    redis_url = config.services.redis_url or str(facts.get("redis_url", ""))
    if not is_held(run_dir) and config.services.redis_url is None:
        console.print(how_it_rests(run_dir, view.step), highlight=False, markup=False)
        return
    _print_members(asyncio.run(read_members(redis_url, config.name)), console)


def how_it_rests(run_dir: Path, step: int) -> str:
    """How a run ended that came to its end at `step`, by its summary; of another, how to go on with it."""
    try:
        summary = json.loads((run_dir / SUMMARY_NAME).read_text())
    except (OSError, ValueError):
        summary = {}
    reason = summary.get("end_reason") or ""
    if summary.get("steps") != step or not reason or reason.startswith("stopped"):
        return f"not running. Go on with it: gspo run --resume {run_dir}"
    ended = f"{'failed' if summary.get('failed') else 'finished'}: {reason}. Report: {run_dir / PAGE_NAME}"
    return f"{ended}\nTo train on, change what ended it: gspo run CONFIG.yaml --resume"


def _newest(folder: Path) -> Path:
    found = [path.parent for path in folder.glob(f"*/{CONFIG_NAME}")]
    if not found:
        raise InputError(str(folder), "holds no run directory", "Give one: gspo status path/to/run")
    return max(found, key=lambda path: path.stat().st_mtime)


async def read_members(url: str, run: str) -> list[Member]:
    """Everyone who is registered with a run.

    Raises:
        InputError: Redis does not answer.
    """
    redis = Redis.from_url(url, protocol=2, socket_connect_timeout=_ANSWER_S, socket_timeout=_ANSWER_S)
    try:
        return await members(redis, Keys(run))
    except (RedisError, OSError) as error:
        raise InputError(
            "redis", f"does not answer ({error})", "The run may be starting or ending; try again"
        ) from error
    finally:
        await redis.aclose()


def _print_members(found: list[Member], console: Console) -> None:
    table = Table("service", "for", "what", "HTTP", "gRPC", "process", box=None, header_style="dim")
    for column in table.columns:
        column.overflow = "fold"  # an address with an ellipsis is none
    for member in found:
        process = Process(member.name, member.beat_unix_s, member, ready=True)
        table.add_row(member.name, *process_cells(process), member.http, member.grpc, str(member.pid))
    console.print(table if found else "no service has registered: the run is starting, or nobody works on it")
    for line in in_trouble(found):
        console.print(line, style="yellow", highlight=False, markup=False)
