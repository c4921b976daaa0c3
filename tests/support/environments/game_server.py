"""The guessing game's server in a process of its own, which a test can make slow, hostile or forgetful.

The game is examples/guess/server.py as a user runs it. Around it stands a layer that breaks answers: `break_answers`
sets them, and `count` counts the sessions that the server has.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import httpx

GUESS = Path(__file__).parents[3] / "examples/guess"
# The bodies of hostile replies, by their names.
BODIES = {
    "not_json": b"<html>",
    "nan_reward": b'{"observation": "a", "reward": NaN, "done": false}',
    "no_done": b'{"observation": "a", "reward": 1}',
    "number": b'{"observation": 3, "reward": 1, "done": false}',
    "oversized": b'{"observation": "' + b"a" * 2**21 + b'", "reward": 1, "done": false}',
    "deep": b"[" * 50_000,
}


class FaultyApp:
    """The game's server, with faults.

    Attributes:
        faults: By name. hostile: one of BODIES for every step. hang_s: the time before a step's answer.
            lose: the share of answers that are lost after the work. key: that of every request.
            forgets: every `close`, or the `repeats` of steps.
    """

    def __init__(self) -> None:
        self.faults: dict[str, str] = {}
        self._draw = random.Random(0)  # noqa: S311 - it hides nothing
        self.num_requests = 0

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        game = importlib.import_module("server")
        if scope["type"] != "http":
            await game.app(scope, receive, send)
        elif scope["path"] == "/faults":
            self.faults = dict(parse_qsl(scope["query_string"].decode()))
            await _answer(send, b"{}")
        elif scope["path"] == "/count":
            counts = {"sessions": len(game.sessions), "requests": self.num_requests, "names": list(game.sessions)}
            await _answer(send, json.dumps(counts).encode())
        else:
            self.num_requests += 1
            await self._play(game, scope, receive, send)

    async def _play(self, game: Any, scope: dict[str, Any], receive: Any, send: Any) -> None:
        key = self.faults.get("key")
        if key and (b"authorization", f"Bearer {key}".encode()) not in scope["headers"]:
            await _answer(send, b"{}", 401)
            return
        if scope["path"] == "/step" and (hostile := self.faults.get("hostile")):
            await _answer(send, BODIES[hostile])
            return
        forgets = self.faults.get("forgets")
        if forgets == "close" and scope["path"] == "/close":
            await _answer(send, b"{}")
            return
        for session in game.sessions.values() if forgets == "repeats" else ():
            session["last"] = None
        if scope["path"] == "/step":
            await asyncio.sleep(float(self.faults.get("hang_s", 0)))
        is_lost = self._draw.random() < float(self.faults.get("lose", 0))
        await game.app(scope, receive, _dropped if is_lost else send)
        if is_lost:  # the connection breaks within the answer
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"100")]})


async def _dropped(message: dict[str, Any]) -> None:
    """In place of `send`: the answer goes nowhere."""


async def _answer(send: Any, body: bytes, status: int = 200) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


@dataclass
class EnvironmentServer:
    """A server in a child process; its port stays the same over restarts."""

    url: str
    port: int
    settings: dict[str, str]
    folder: Path = GUESS
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, and wait until it answers."""
        paths = os.pathsep.join(map(str, [self.folder, GUESS, GUESS.parents[1]]))
        command = [
            sys.executable,
            "-m",
            "uvicorn",
            "tests.support.environments.game_server:app",
            "--port",
            str(self.port),
        ]
        self.process = subprocess.Popen(
            [*command, "--log-level", "critical"], env={**os.environ, **self.settings, "PYTHONPATH": paths}
        )
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            try:
                httpx.get(f"{self.url}/count")
            except httpx.TransportError:
                time.sleep(0.05)
            else:
                return
        raise TimeoutError("the environment's server did not start within 30 s")

    def kill(self) -> None:
        """End it as a crash does: every session is gone."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def pause(self) -> None:
        """Stop it without closing its connections."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)

    def break_answers(self, **faults: Any) -> None:
        """Set its faults; without arguments it has none."""
        httpx.post(f"{self.url}/faults", params=faults)

    def end_silent_sessions(self) -> None:
        """Ask for a session that is not there: the server then looks for those beyond their time to live."""
        httpx.get(f"{self.url}/state", params={"episode_id": "none"})

    def sessions(self) -> list[str]:
        """Ids of the sessions that it has."""
        names: list[str] = httpx.get(f"{self.url}/count").json()["names"]
        return names

    def count(self, what: str = "sessions") -> int:
        """Sessions that it has, or requests that it has had."""
        return int(httpx.get(f"{self.url}/count").json()[what])


@contextmanager
def environment_server(places: int = 1000, ttl_s: float = 60.0, folder: Path = GUESS) -> Iterator[EnvironmentServer]:
    """A running server, which ends with the block.

    Args:
        folder: That of server.py.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = EnvironmentServer(f"http://127.0.0.1:{port}", port, {"PLACES": str(places), "TTL_S": str(ttl_s)}, folder)
    server.start()
    try:
        yield server
    finally:
        server.kill()


app = FaultyApp()
