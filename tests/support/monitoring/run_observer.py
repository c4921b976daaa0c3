"""What a person has open while a run goes: Prometheus, `gspo status`, the commands of docs, a collector.

The run is whole_run.py's.
"""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from redis import Redis
from redis.exceptions import RedisError

from gspo.cli.rundir.start import supervisor_facts
from gspo.common.streams.keys import Keys
from tests.support.monitoring.otlp_collector import Collector
from tests.support.monitoring.prometheus_server import ROOT, Prometheus

PAGES = ("operations.md", "metrics.md")
_LOOK_S = 0.5
_PATIENCE_S = 60.0
_LEARNERS_CPU = re.compile(r"learner-0 [^\n]* cores")


@dataclass
class RunObservations:
    """What was seen of a run.

    Attributes:
        commands: (command of a page, exit code, what it printed).
        page: What `gspo status --watch` had on its page when it was ended.
        status: /v1/status while the run waited for somebody to resume it.
        trouble: What kept the looking from its end; empty is none.
    """

    prometheus: Prometheus
    collector: Collector
    began_unix_s: float = field(default_factory=time.time)
    ended_unix_s: float = 0.0
    commands: list[tuple[str, int, str]] = field(default_factory=list)
    page: str = ""
    status: dict[str, Any] = field(default_factory=dict)
    trouble: str = ""

    @contextmanager
    def scraped(self, run_dir: Path) -> Iterator[None]:
        """Have Prometheus follow the run's services as long as the block lasts."""
        with followed(self.prometheus, run_dir):
            yield
        self.ended_unix_s = time.time()

    def at_rest(
        self, process: subprocess.Popen[bytes], run_dir: Path, num_groups: int, look: Callable[[str], None]
    ) -> None:
        """Pause the run after its first step and call `look` with the coordinator's address, then resume it.

        A pause stops the issue of groups. It is asked for as soon as the groups of the first step are issued, so that
        a run of several steps cannot end before it, however quick its steps are. What fails is kept in `trouble`.

        Args:
            num_groups: Groups of a step, in a run whose next step is issued once the one before is trained.
        """
        try:
            coordinator = _coordinator_of(process, run_dir, num_groups)
            _post(coordinator, "/v1/pause")
            try:
                _until(lambda: (run_dir / "log" / "step-000001.parquet").exists(), process, "the first step")
                look(coordinator)
            finally:
                with suppress(httpx.HTTPError):  # the pages' command has resumed it, and it may be over
                    _post(coordinator, "/v1/resume")
        except Exception as error:  # noqa: BLE001 - other tests look at the run itself, which goes on
            self.trouble = f"{type(error).__name__}: {error}"

    def look(self, folder: Path, run_dir: Path, coordinator: str) -> None:
        """Look at a paused run as the pages say, and resume it as they say."""
        for name, target in (("deploy", ROOT / "deploy"), ("tests", ROOT / "tests")):
            (folder / name).symlink_to(target)
        (folder / "runs" / "demo").symlink_to(run_dir)
        self.page = _live_page(folder)
        self.status = _status_at_rest(coordinator)
        learner = next(address for address, service in addresses(run_dir).items() if service == "learner")
        variables = {"COORDINATOR": coordinator, "SERVICE": learner, "TOKEN": "none"}
        # What resumes the run comes last: it would end before the others are through.
        for command in sorted(documented_commands(), key=lambda command: "/v1/resume" in command):
            done = subprocess.run(
                ["bash", "-euc", command], cwd=folder, env=_environment() | variables, capture_output=True, text=True,
                timeout=60, check=False,
            )  # fmt: skip
            self.commands.append((command, done.returncode, done.stdout + done.stderr))


@contextmanager
def followed(prometheus: Prometheus, run_dir: Path) -> Iterator[None]:
    """Have Prometheus follow the run's services as long as the block lasts."""
    over = threading.Event()
    following = threading.Thread(target=_follow, args=(prometheus, run_dir, over))
    following.start()
    try:
        yield
    finally:
        over.set()
        following.join()


def _follow(prometheus: Prometheus, run_dir: Path, over: threading.Event) -> None:
    known: dict[str, str] = {}
    while not over.wait(_LOOK_S):
        found = addresses(run_dir)
        if not found.keys() <= known.keys():
            known |= found
            prometheus.scrape(known)


def addresses(run_dir: Path) -> dict[str, str]:
    """HTTP address -> service of everyone registered; nobody while Redis is not there."""
    facts = supervisor_facts(run_dir)
    if "redis_url" not in facts:
        return {}
    redis: Any = Redis.from_url(facts["redis_url"], socket_timeout=2)
    keys = Keys(run_dir.name)
    try:
        entries = [entry.decode().split(":", 1) for entry in redis.smembers(keys.instances)]
        texts = [(service, redis.get(keys.instance(service, uid))) for service, uid in entries]
    except RedisError:
        return {}
    finally:
        redis.close()
    found = [(service, re.search(rb'"http": "([^"]+)"', text)) for service, text in texts if text]
    return {match[1].decode(): service for service, match in found if match}


def documented_commands() -> list[str]:
    """Every command in the shell blocks of the pages, in their order.

    `gspo scale` would start engines for the other tests of the run; tests/integration/cli/test_scale.py has it.
    """
    blocks = [
        block
        for page in PAGES
        for block in re.findall(r"^```sh\n(.*?)^```", (ROOT / "docs" / page).read_text(), re.MULTILINE | re.DOTALL)
    ]
    return [line for block in blocks for line in block.splitlines() if line and not line.startswith("gspo scale")]


def _coordinator_of(process: subprocess.Popen[bytes], run_dir: Path, num_groups: int) -> str:
    """The coordinator's address once it has issued so many groups."""
    _until(lambda: "coordinator" in addresses(run_dir).values(), process, "the coordinator")
    (coordinator,) = (address for address, service in addresses(run_dir).items() if service == "coordinator")
    # While the coordinator reads the prompts, its state has no groups.
    _until(lambda: _issued(_get(coordinator, "/v1/state")) >= num_groups, process, "the first groups")
    return coordinator


def _issued(state: dict[str, Any]) -> int:
    num_issued: int = state.get("groups", {"issued": 0})["issued"]
    return num_issued


def _until(is_so: Callable[[], bool], process: subprocess.Popen[bytes], what: str) -> None:
    """Wait while the run goes; pytest-timeout bounds it."""
    while not is_so():
        if process.poll() is not None:
            raise RuntimeError(f"the run ended before {what} could be seen")
        time.sleep(0.02)


def _get(address: str, path: str) -> dict[str, Any]:
    reply: dict[str, Any] = httpx.get(f"http://{address}{path}", trust_env=False).raise_for_status().json()
    return reply


def _post(address: str, path: str) -> None:
    httpx.post(f"http://{address}{path}", json={}, trust_env=False).raise_for_status()


def _status_at_rest(coordinator: str) -> dict[str, Any]:
    """/v1/status of a paused run that has nothing left to do; the last one seen if that never comes."""
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        status = _get(coordinator, "/v1/status")
        kinds = {service["kind"] for service in status["services"] if service["service"] in ("generation", "learner")}
        if (kinds == {"waiting"} and status["last_step"]) or time.monotonic() > deadline:
            return status
        time.sleep(_LOOK_S)


def _live_page(folder: Path) -> str:
    """What `gspo status --watch` shows on a terminal; ended as a person ends it, once it knows the learner's CPU."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "gspo.cli", "status", "--watch", "runs/demo"]
    process = subprocess.Popen(
        command, cwd=folder, env=_environment() | {"TERM": "xterm"}, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    shown, is_asked, deadline = b"", False, time.monotonic() + _PATIENCE_S
    try:
        while select.select([ours], [], [], max(0.0, deadline - time.monotonic()))[0]:
            shown += os.read(ours, 65_536)
            if not is_asked and _LEARNERS_CPU.search(_without_escapes(shown)):
                process.send_signal(signal.SIGINT)
                is_asked = True
        process.kill()
    except OSError:  # a terminal whose last program has ended
        pass
    finally:
        os.close(ours)
    assert process.wait(30) == 0, f"it did not end; Ctrl-C: {is_asked}; shown: {_without_escapes(shown)[-2000:]}"
    return _without_escapes(shown)


def _without_escapes(shown: bytes) -> str:
    """A terminal's text; a character that has not come whole is left out."""
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown.decode(errors="ignore"))


def _environment() -> dict[str, str]:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return {
        **os.environ,
        "PATH": path,
        "COLUMNS": "250",
        "LINES": "60",
        "PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}:{ROOT / 'services'}",
    }
