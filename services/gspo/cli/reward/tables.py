"""The tables that `gspo reward` prints: functions, versions, calls and trials."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from gspo.cli.reward.api_client import printable


def print_list(reply: dict[str, Any], console: Console) -> None:
    """Print a line for each function."""
    table = _table("name", "kind", "active", "versions", "convention", "from")
    for function in reply["rewards"]:
        active = function["active"][:12] if function["active"] else "retired"
        origin = function["source"] if function["origin"] == "configured" else "submitted"
        cells = (function["name"], function["kind"], active, function["versions"], function["convention"])
        table.add_row(*map(_text, (*cells, function["unreadable"] or origin)))
    console.print(table if reply["rewards"] else "no function yet: gspo reward submit FILE")


def print_function(reply: dict[str, Any], console: Console) -> None:
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


def print_trial(reply: dict[str, Any], console: Console) -> None:
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


def print_logs(reply: dict[str, Any], console: Console) -> None:
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


def _text(value: object) -> Text:
    """Foreign text without rich's markup and without control characters."""
    return Text(printable(str(value)))


def _table(*names: str) -> Table:
    return Table(*names, box=None, header_style="dim")


def _when(unix_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix_s))


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value * 1000:.1f} ms" if value < 1 else f"{value:.2f} s"
