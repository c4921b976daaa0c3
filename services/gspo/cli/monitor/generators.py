"""What the learner's heartbeat says that a user has to know: generators that pushes do not reach, and notices."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from gspo.cli.monitor.view import ScreenLine, duration
from gspo.common.streams.instances import Instance

OUT = "out"
_PATIENCE_S = 5.0


def generator_problems(found: Iterable[Instance]) -> list[str]:
    """A line for each notice, and for every generator that lacks the newest version for a while: since when, why."""
    found = list(found)
    return _notices(found) + [_line(g) for g in _generators(found) if g["problem"] or _lags(g)]


class GeneratorAlerts:
    """Remembers who is out and what was said, so that each departure, return and notice is told once."""

    def __init__(self) -> None:
        self._out: set[str] = set()
        self._noticed: set[str] = set()

    def lines(self, found: Iterable[Instance]) -> list[ScreenLine]:
        """What has changed since the last call."""
        found = list(found)
        notices = [ScreenLine(text, "warning") for text in _notices(found) if text not in self._noticed]
        self._noticed.update(line.text for line in notices)
        generators = {generator["name"]: generator for generator in _generators(found)}
        out = {name for name, generator in generators.items() if generator["state"] == OUT}
        left = [ScreenLine(_line(generators[name]), "warning") for name in sorted(out - self._out)]
        back = [ScreenLine(f"{name} has caught up") for name in sorted((self._out - out) & generators.keys())]
        self._out = out
        return notices + left + back


def _notices(found: Iterable[Instance]) -> list[str]:
    return [text for instance in found for text in instance.facts.get("notices", [])]


def _generators(found: Iterable[Instance]) -> list[dict[str, Any]]:
    return [generator for instance in found for generator in instance.facts.get("generators", [])]


def _lags(generator: dict[str, Any]) -> bool:
    """Whether a push to it takes long."""
    since = generator["since_unix_s"]
    return since is not None and time.time() - since > _PATIENCE_S


def _line(generator: dict[str, Any]) -> str:
    why = "the push to it is waiting for another push" if generator["waiting"] else "the push to it is under way"
    if generator["problem"]:
        why = f"{generator['num_failures']} pushes failed, the last: {generator['problem']}"
    return (
        f"{generator['name']} is {generator['state']} for {duration(time.time() - generator['since_unix_s'])}, serving "
        f"version {generator['version']}: {why}"
    )
