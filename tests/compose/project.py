"""The project's containers as a user outside sees them, for drive.py and misfits.py.

What it is not: a claim about them.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import time
import urllib.request
from collections.abc import Callable
from typing import Any, TypeVar
from urllib.parse import quote

from tests.compose.docker_engine import ROOT, Docker

T = TypeVar("T")
_began = time.monotonic()


def report_progress(text: str) -> None:
    print(f"[{time.monotonic() - _began:5.0f} s] {text}", flush=True)


def until(what: str, ask: Callable[[], T | None], timeout_s: float) -> T:
    """Ask until there is an answer; AssertionError says what did not come. A refused connection counts as no answer."""
    deadline = time.monotonic() + timeout_s
    seen: object = None
    while time.monotonic() < deadline:
        try:
            if (answer := ask()) is not None:
                return answer
        except OSError as error:
            seen = error
        time.sleep(1.0)
    raise AssertionError(f"after {timeout_s:g} s: {what} did not come (last: {seen})")


class ComposeProject:
    """The running project as a user outside sees it."""

    def __init__(self, docker: Docker, project: str, ports: dict[str, int]) -> None:
        self.docker, self.project, self._ports = docker, project, ports
        self.token = ""

    def as_documented(self, line: str, *more: str, timeout_s: float = 120.0) -> str:
        """Standard output of a command of docs/deployment.md, word for word, with further words at its end."""
        words = shlex.split(line)[2:]
        if words[0] in ("exec", "run"):  # nobody sits at a terminal here
            words.insert(1, "-T")
        return self.docker.compose(*words, *more, timeout_s=timeout_s)

    def first_line(self, line: str) -> str:
        """The first line that a command prints which does not end by itself."""
        command = ["docker", *shlex.split(line)[1:]]
        with subprocess.Popen(
            command, cwd=ROOT, env=dict(self.docker.environment), stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout
            found = process.stdout.readline()
            process.kill()
        return found

    def address(self, port: str) -> str:
        return f"http://127.0.0.1:{self._ports[port]}"

    def ask(self, port: str, path: str, *, post: bool = False, body: object = None, token: str | None = None) -> Any:
        """The JSON of one call; one with a body is a POST."""
        headers = {"authorization": f"Bearer {token or self.token}", "content-type": "application/json"}
        data = json.dumps(body).encode() if body is not None else b"" if post else None
        request = urllib.request.Request(self.address(port) + path, headers=headers, data=data)
        with urllib.request.urlopen(request, timeout=10) as reply:
            return json.load(reply)

    def state(self) -> dict[str, Any]:
        return dict(self.ask("GSPO_PORT", "/v1/state"))

    def step_above(self, step: int) -> Callable[[], int | None]:
        """The run's step, once it is above `step`."""

        def look() -> int | None:
            now = int(self.state()["step"])
            return now if now > step else None

        return look

    def query(self, expression: str) -> dict[str, float]:
        """An instant query of Prometheus: values by job and instance."""
        found = self.ask("GSPO_PROMETHEUS_PORT", f"/api/v1/query?query={quote(expression)}")["data"]["result"]
        return {" ".join(sorted(one["metric"].values())): float(one["value"][1]) for one in found}
