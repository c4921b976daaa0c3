"""What cannot work in containers, and what it says: refused before the start, or staying there with its reason."""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.compose.docker_engine import ROOT, Docker
from tests.compose.project import ComposeProject, until

OTHER_TOKEN = "another-token-than-the-others-have"
# Standard output holds JSON, whatever the status.
READY = """
import urllib.error, urllib.request
try:
    print(urllib.request.urlopen("http://127.0.0.1:8000/readyz", timeout=4).read().decode())
except urllib.error.HTTPError as error:
    print(error.read().decode())
"""
DIFFERS = "refuses our token: the secrets in services.token_file of both differ"
# vLLM's start, beside two that generate.
START_S, STEPS_S = 300.0, 300.0


def refusals(docker: Docker, folder: Path) -> None:
    """What cannot work is one line and exit code 2, before anything is started."""
    empty, lost = folder / "empty", folder / "lost"
    empty.mkdir(mode=0o555)
    lost.mkdir()
    shutil.copy(ROOT / "examples/arithmetic/config.yaml", lost)
    cases = [
        (["prepare"], {"GSPO_INPUT": str(empty)}, "error: /input/config.yaml: is not there"),
        (["prepare"], {"GSPO_INPUT": str(lost)}, "error: model.path: model is not a folder here"),
        (["-v", f"{empty}:/runs", "prepare"], {}, "error: run.directory: /runs cannot be written by user 1000"),
        (["secrets"], {"GSPO_SECRETS": str(empty)}, "error: secrets: "),
    ]
    for words, given, rule in cases:
        other = Docker({**docker.environment, **given})
        done = other.run("compose", "run", "--rm", "-T", "--no-deps", *words, check=False)
        lines = [line for line in done.stderr.splitlines() if line.startswith("error:")]
        assert done.returncode == 2, f"{words}: exit code {done.returncode}: {done.stderr}"
        assert len(lines) == 1, done.stderr
        assert lines[0].startswith(rule), lines
    with socket.create_server(("127.0.0.1", 0)) as taken:
        other = Docker({**docker.environment, "GSPO_PORT": str(taken.getsockname()[1])})
        done = other.run("compose", "run", "--rm", "-T", "--no-deps", "--service-ports", "proxy", check=False)
    assert done.returncode, "a port was published that is taken"
    assert "address already in use" in done.stderr, done.stderr


def unreadable_secrets(docker: Docker, folder: Path) -> None:
    """A service that may not read its token stays, not ready, with one line that says so."""
    secrets = folder / "unreadable"
    secrets.mkdir()
    for name in ("token", "redis_password"):
        (secrets / name).write_text("not-for-user-1000-to-be-read")
        (secrets / name).chmod(0o600)
    with beside(docker, "coordinator", secrets) as container:
        (line,) = until("its refusal", lambda: said(docker, container, "bad_input") or None, 60)
        assert line["reason"].startswith("services.token_file: /secrets/token cannot be read"), line
        found = until("/readyz", lambda: ready(docker, container), 30)
        assert (found["ready"], found["problems"]["bad_input"]) == (False, line["reason"]), found


def generator_with_another_token(house: ComposeProject, folder: Path) -> None:
    """A generator with another token than the learner's: both say so, and the learner is not ready while it is there.

    The run is paused before and after; in between it makes a version, which the stranger does not take.
    """
    docker, secrets = house.docker, folder / "stranger"
    secrets.mkdir()
    (coordinator,), (learner,) = docker.containers("coordinator"), docker.containers("learner")
    password = docker.python(coordinator, "print(open('/secrets/redis_password').read())")
    for file, content in (("token", OTHER_TOKEN), ("redis_password", password)):
        (secrets / file).write_text(content)
        (secrets / file).chmod(0o444)

    def is_ready(container: str) -> bool | None:
        found = ready(docker, container)
        return True if found and found["ready"] else None

    with beside(docker, "generation", secrets) as container:
        name = f"generation-{docker.inspect(container)['Config']['Hostname']}"

        def named() -> bool | None:
            found = ready(docker, learner)
            reasons = found.get("problems", {}).values() if found else ()
            return any(reason.startswith(name) and reason.endswith(DIFFERS) for reason in reasons) or None

        until(f"{name} to be ready", lambda: is_ready(container), START_S)
        house.ask("GSPO_PORT", "/v1/resume", post=True)
        until(f"the learner's word about {name}", named, STEPS_S)
        house.ask("GSPO_PORT", "/v1/pause", post=True)
        refused = [line for line in said(docker, container, "call_refused") if "token" in line["reason"]]
        assert refused, f"{name} did not say it"
        assert len([line for line in said(docker, learner, "token_refused") if line["peer"].startswith(name)]) == 1
    until("the learner to be ready again", lambda: is_ready(learner), STEPS_S)


@contextmanager
def beside(docker: Docker, service: str, secrets: Path) -> Iterator[str]:
    """One more container of a service, with secrets of its own; removed at the end."""
    mount = f"{secrets}:/secrets:ro"
    container = docker.compose("run", "-d", "-T", "--no-deps", "-v", mount, service).strip()
    try:
        yield container
    finally:
        docker.run("rm", "-f", container)


def ready(docker: Docker, container: str) -> dict[str, Any] | None:
    """What a service says at /readyz; None before it says anything."""
    printed = docker.python(container, READY, check=False)
    return dict(json.loads(printed)) if printed else None


def said(docker: Docker, container: str, event: str) -> list[dict[str, Any]]:
    """The lines of one event in a container's log."""
    done = docker.run("logs", container)
    lines = [json.loads(line) for line in (done.stdout + done.stderr).splitlines() if line.startswith("{")]
    return [line for line in lines if line["event"] == event]
