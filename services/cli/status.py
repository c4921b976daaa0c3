"""`gspo status`: what everyone in a run is doing or waiting for, now.

It changes nothing. Neighbours: rundir.py knows whether a supervisor lives, members.py who is there.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass
from pathlib import Path

from redis.asyncio import Redis
from redis.exceptions import RedisError
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from services.cli.explained import last_step_table, verdict_lines, verdict_of
from services.cli.generators import in_trouble
from services.cli.live import process_cells
from services.cli.rundir import PAGE_NAME, SUMMARY_NAME, check_run_dir, is_held, supervisor_facts
from services.cli.usage import Usage, Used
from services.cli.view import Phases, Process, View, held_out_line, load_history, step_line
from services.common.config import Config
from services.common.configfile import read_config
from services.common.errors import InputError
from services.common.keys import GENERATION, Keys
from services.common.members import Member, members
from services.common.runtime import CONFIG_NAME

_ANSWER_S = 3.0
_WATCH_S = 1.0


def status(run_dir: Path | None, console: Console, *, watch: bool = False) -> None:
    """Print the state of a run; of the newest one under ./runs where none is given.

    Args:
        watch: Draw it again and again, with CPU and memory of each process, until Ctrl-C or until the run is over.

    Raises:
        InputError: There is no run, or Redis does not answer.
    """
    run_dir = run_dir or _newest(Path("runs"))
    check_run_dir(run_dir)
    config = read_config(run_dir / CONFIG_NAME)
    if not watch:
        console.print(_look(run_dir, config, None).page, highlight=False)
        return
    usage = Usage()
    with Live(console=console, auto_refresh=False) as live:
        try:
            while (seen := _look(run_dir, config, usage)).runs:
                live.update(seen.page, refresh=True)
                time.sleep(_WATCH_S)
            live.update(seen.page, refresh=True)
        except KeyboardInterrupt:
            return


@dataclass(frozen=True)
class Look:
    """One look at a run: what to draw, and whether anybody works on it."""

    page: RenderableType
    runs: bool


def _look(run_dir: Path, config: Config, usage: Usage | None) -> Look:
    view = View(config, run_dir, {}, Phases())
    load_history(view)
    parts: list[RenderableType] = [
        Text(str(run_dir), "bold"),
        Text(step_line(view) if view.step else "no step trained yet"),
    ]
    for file, measured in view.held_out.items():
        version, figures = measured[-1]
        parts.append(Text(f"{file or 'held-out prompts'} at version {version}: {held_out_line(figures)}"))
    if view.best is not None:
        parts.append(Text(f"best by {config.evaluation.keep_best}: version {view.best[0]}"))
    redis_url = config.services.redis_url or str(supervisor_facts(run_dir).get("redis_url", ""))
    runs = is_held(run_dir) or config.services.redis_url is not None
    found = asyncio.run(read_members(redis_url, config.name)) if runs else []
    num_generators = sum(member.service == GENERATION for member in found) or config.generation.replicas
    if bound := verdict_of(view, num_generators):
        parts += ["", last_step_table(view), *map(Text, verdict_lines(bound))]
    if runs:
        parts += ["", *members_parts(found, usage.look(found) if usage else None)]
    else:
        parts.append(Text(how_it_rests(run_dir, view.step)))
    return Look(Group(*parts), runs)


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


def members_parts(found: list[Member], used: dict[str, Used] | None) -> list[RenderableType]:
    """Who does or waits for what, with CPU and memory where they are given, and the generators in trouble."""
    if not found:
        return ["no service has registered: the run is starting, or nobody works on it"]
    usage_columns = [] if used is None else ["CPU", "memory"]
    table = Table("service", "for", "what", *usage_columns, "HTTP", "gRPC", "process", box=None, header_style="dim")
    for column in table.columns:
        column.overflow = "fold"  # an address with an ellipsis is none
    for member in found:
        process = Process(member.name, member.beat_unix_s, member, ready=True)
        cells = [] if used is None else _usage_cells(used.get(member.uid))
        table.add_row(member.name, *process_cells(process), *cells, member.http, member.grpc, str(member.pid))
    return [table, *(Text(line, "yellow") for line in in_trouble(found))]


def _usage_cells(used: Used | None) -> list[str]:
    """('1.02 cores', '812 MiB'); a dash for what is not known: of another machine, or at the first look."""
    if used is None:
        return ["-", "-"]
    return ["-" if used.cpu is None else f"{used.cpu:.2f} cores", f"{used.memory_bytes / 2**20:,.0f} MiB"]
