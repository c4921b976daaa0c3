"""What `gspo reward` prints: tables of functions, versions, calls and trials.

Neighbour: reward_commands.py.
"""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from gspo.cli.reward.api_client import printable


def print_list(told: dict[str, Any], console: Console) -> None:
    """Every function, a line each."""
    table = _table("name", "kind", "active", "versions", "convention", "from")
    for one in told["rewards"]:
        active = one["active"][:12] if one["active"] else "retired"
        origin = one["source"] if one["origin"] == "configured" else "submitted"
        origin = one["unreadable"] or origin
        table.add_row(*map(_text, (one["name"], one["kind"], active, one["versions"], one["convention"], origin)))
    console.print(table if told["rewards"] else "no function is there yet: gspo reward submit FILE")


def print_one(told: dict[str, Any], console: Console) -> None:
    """One function: its versions, and how their calls went."""
    usage = {one["version"]: one for one in told["usage"]}
    found = told.get("versions") or [
        {"version": told["reward"]["active"], "active": True, "entry": told["reward"]["entry"]}
    ]
    table = _table("version", "active", "function", "submitted", "calls", "failures", "p50", "p99")
    for one in found:
        calls = usage.get(one["version"], {"calls": 0, "errors": {}, "latency_s": {}})
        failures = ", ".join(f"{count} {kind}" for kind, count in calls["errors"].items())
        submitted = (
            f"{_when(one['submitted_unix_s'])} by {one['submitted_by']}" if "submitted_by" in one else "configured"
        )
        latency = [_seconds(calls["latency_s"].get(name)) for name in ("p50", "p99")]
        mark = "yes" if one["active"] else ""
        entry = one.get("unreadable") or one["entry"]
        cells = (one["version"][:12], mark, entry, submitted, calls["calls"], failures, *latency)
        table.add_row(*map(_text, cells))
    console.print(table)


def print_trial(told: dict[str, Any], console: Console) -> None:
    """Scores or failures, a line a row, and what was printed."""
    table = _table("row", "reward", "parts", "")
    for number, one in enumerate(told["results"]):
        failure, parts = one["failure"], {**one["parts"], **one["extras"]}
        shown = ", ".join(f"{name} {value:g}" for name, value in parts.items())
        more = f"{failure['kind']}: {failure['text']}" if failure else str(one["observation"] or "")
        table.add_row(*map(_text, (number, "failed" if failure else f"{one['reward']:g}", shown, more)))
    console.print(table)
    if told["output"]:
        console.print(_text(f"it printed:\n{told['output'].rstrip()}"))
    traceback = next((one["failure"]["traceback"] for one in told["results"] if one["failure"]), "")
    if traceback:
        console.print(_text(traceback.rstrip()))
    console.print(f"version {told['version'][:12]}, {_seconds(told['seconds'])}", highlight=False)


def print_logs(told: dict[str, Any], console: Console) -> None:
    """Changes, and the last failure of each version."""
    for line in told["lines"]:
        what = f"{line['action']} {line['version'][:12]}".rstrip()
        was = f" (was {line['was'][:12]})" if line["was"] else ""
        console.print(_text(f"{_when(line['unix_s'])}  {line['who']}: {what}{was}"))
    for one in told["usage"]:
        if failure := one["last_failure"]:
            head = f"\n{one['version'][:12]} failed last {_when(failure['unix_s'])}: {failure['kind']}"
            console.print(_text(f"{head}: {failure['text']}"))
            for text in (failure["traceback"], failure["output"]):
                if text:
                    console.print(_text(text.rstrip()))


def _text(value: object) -> Text:
    """A value that others wrote, as it is: no markup in it, and no character that a terminal would obey."""
    return Text(printable(str(value)))


def _table(*names: str) -> Table:
    return Table(*names, box=None, header_style="dim")


def _when(unix_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix_s))


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value * 1000:.1f} ms" if value < 1 else f"{value:.2f} s"
