"""Generators that the learner's pushes do not reach, in words: from what the learner's heartbeat says of each.

Neighbours: services/learner/targets.py keeps the account; status.py and watch.py show it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from services.cli.view import Line, duration
from services.common.members import Member

OUT = "out"
_PATIENCE_S = 5.0


def in_trouble(found: Iterable[Member]) -> list[str]:
    """A line for every generator that lacks the newest version for a while: since when, and why."""
    return [_line(generator) for generator in _generators(found) if generator["problem"] or _lags(generator)]


class GeneratorNews:
    """Remembers who is out, so that each departure and return is told once."""

    def __init__(self) -> None:
        self._out: set[str] = set()

    def lines(self, found: Iterable[Member]) -> list[Line]:
        """What has changed since the last call."""
        generators = {generator["name"]: generator for generator in _generators(found)}
        out = {name for name, generator in generators.items() if generator["state"] == OUT}
        left = [Line(_line(generators[name]), "warning") for name in sorted(out - self._out)]
        back = [Line(f"{name} has caught up") for name in sorted((self._out - out) & generators.keys())]
        self._out = out
        return left + back


def _generators(found: Iterable[Member]) -> list[dict[str, Any]]:
    return [generator for member in found for generator in member.facts.get("generators", [])]


def _lags(generator: dict[str, Any]) -> bool:
    """Whether a push to it takes long."""
    since = generator["since_unix_s"]
    return since is not None and time.time() - since > _PATIENCE_S


def _line(generator: dict[str, Any]) -> str:
    why = "the push to it is under way"
    if generator["problem"]:
        why = f"{generator['num_failures']} pushes failed, the last: {generator['problem']}"
    return (
        f"{generator['name']} is {generator['state']} for {duration(time.time() - generator['since_unix_s'])}, serving "
        f"version {generator['version']}: {why}"
    )
