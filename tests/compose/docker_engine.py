"""A Docker engine with Compose for drive.py: the one that is there, else a throw-away one, else none.

What it is not: it knows nothing of gspo. What it starts it stops. Neighbour: drive.py.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
TOOL = Path(os.environ.get("GSPO_DOCKER_ENGINE", ROOT.parent / "shared/tools/docker-engine"))
COMMAND_S = 120.0


class NoEngineError(Exception):
    """There is none here; the message says what was looked for."""


class CommandError(AssertionError):
    """A command failed; the message holds its words."""


@dataclass(frozen=True)
class Docker:
    """Calls of `docker` and `docker compose` for one project.

    Attributes:
        environment: What the commands and the compose file see.
    """

    environment: Mapping[str, str]

    def run(self, *words: str, timeout_s: float = COMMAND_S, check: bool = True) -> subprocess.CompletedProcess[str]:
        """One command, from the repository's root. CommandError: it failed, or took too long."""
        try:
            done = subprocess.run(
                ["docker", *words],
                cwd=ROOT,
                env=dict(self.environment),
                capture_output=True,
                text=True,
                timeout=timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise CommandError(f"docker {shlex.join(words)}: not done after {timeout_s:g} s") from error
        if check and done.returncode:
            said = f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
            raise CommandError(f"docker {shlex.join(words)}: exit code {done.returncode}\n{said}")
        return done

    def compose(self, *words: str, timeout_s: float = COMMAND_S, check: bool = True) -> str:
        """Standard output of one `docker compose` command."""
        return self.run("compose", *words, timeout_s=timeout_s, check=check).stdout

    def inspect(self, name: str) -> dict[str, Any]:
        """What the engine knows of an image or container."""
        return dict(json.loads(self.run("inspect", name).stdout)[0])

    def containers(self, service: str) -> list[str]:
        """Ids of a service's containers, running or not, the oldest first."""
        ids = self.compose("ps", "-a", "-q", service).split()
        return sorted(ids, key=lambda one: str(self.inspect(one)["Created"]))

    def python(self, container: str, code: str, *, check: bool = True) -> str:
        """Standard output of Python code in a container."""
        return self.run("exec", container, "python", "-c", code, check=check).stdout.strip()


@contextmanager
def engine() -> Iterator[Mapping[str, str]]:
    """The environment in which `docker` reaches an engine, as long as the block lasts.

    Raises:
        NoEngineError: There is neither an engine nor the tool that starts one.
    """
    if _works(os.environ):
        yield dict(os.environ)
        return
    if not os.access(TOOL, os.X_OK) or os.geteuid() != 0:
        raise NoEngineError(f"docker compose reaches no engine, and {TOOL} cannot start one here")
    try:
        printed = subprocess.run([TOOL, "start"], stdout=subprocess.PIPE, text=True, check=True).stdout
        words = [word.partition("=") for word in shlex.split(printed) if "=" in word]
        environment = {**os.environ, **{name: value for name, _, value in words}}
        subprocess.run([TOOL, "images"], env=environment, check=True)
        yield environment
    finally:
        subprocess.run([TOOL, "stop"], check=False)


def _works(environment: Mapping[str, str]) -> bool:
    try:
        for words in (["info"], ["compose", "version"]):
            subprocess.run(["docker", *words], env=dict(environment), capture_output=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return False
    return True
