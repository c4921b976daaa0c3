"""The areas of the nightly tests: a command each, with its own time limit.

The long tests and the property tests with many examples are an area for each folder of tests that has some.
"""

from __future__ import annotations

import datetime
import re
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Exit code of a command that lacks a tool on this machine.
NOT_RUN = 3
_PYTEST = (sys.executable, "-m", "pytest", "-q")
_PAGES = ("tests/browser/pages.py", "tests/browser/run_page.py", "tests/browser/function_page.py")
_LONG_TESTS = re.compile(r"pytest\.mark\.long|^@given\(|RuleBasedStateMachine", re.MULTILINE)
# A thousand examples, each with processes, may take longer than the limit of a test in `make test`.
_MANY_EXAMPLES = (
    *("-n", "2", "--dist", "loadfile", "--no-loadscope-reorder"),
    *("-m", "long or hypothesis", "--hypothesis-profile", "many", "--timeout", "1800"),
)
# Of the day: an interrupted night continues its rounds, and the next one has other strikes.
_SEED = str(datetime.datetime.now(tz=datetime.UTC).toordinal())
_ROUNDS = ROOT / ".cache/nightly" / f"chaos-{_SEED}"
_CHAOS = (
    *("--seed", _SEED, "--rounds", "0", "--workload", "conversations", "--workload", "agents"),
    *("--results", str(_ROUNDS), "--out", str(_ROUNDS / "page")),
)


@dataclass(frozen=True)
class Area:
    """One area.

    Attributes:
        name: On the command line and in the table.
        shows: One line for people.
        command: Words; exit code 0 passes, NOT_RUN names a missing tool in the last line of its output.
        limit_min: It is ended after so many minutes, and has failed.
        tool: A program that it needs; without it the area is not run.
    """

    name: str
    shows: str
    command: tuple[str, ...]
    limit_min: float
    tool: str = ""


def _python(*words: str) -> tuple[str, ...]:
    return (sys.executable, *words)


_ATTACKS = (
    "tests/integration/reward/sandbox/test_attacks.py",
    "tests/integration/agents/test_agent_attacks.py",
    "tests/integration/environments/test_mcp_sessions.py",
    "tests/unit/reward/functions/test_json_server.py",
)
_COMMANDS = (
    Area(
        "attacks",
        "every attack of sandboxed code at each level of confinement, beside benign calls",
        (*_PYTEST, "-m", "long or not long", *_ATTACKS),
        60,
    ),
    Area("demo", "the README's first command, to its report", _python("examples/arithmetic/demo.py"), 15),
    Area("reasoning", "tasks of reasoning-gym, to the report", _python("examples/reasoning/demo.py"), 30),
    Area("site", "the documentation as a site, every link and anchor", ("make", "docs"), 10),
    Area("browser", "HTTP APIs and the page against other sites, in Chromium", (*_PYTEST, *_PAGES), 20, "chromium"),
    Area("compose", "docker-compose.yml: build, run, scale, kill", _python("-m", "tests.compose"), 40),
    Area(
        "slurm",
        "the batch file of docs/cluster.md on a real Slurm: lose a node, requeue, train on",
        (*_PYTEST, "tests/slurm/batch_job.py"),
        30,
        "slurmctld",
    ),
    Area("promises", "every promise broken on purpose, noticed by its tests", _python("-m", "tests.promises"), 180),
    Area(
        "chaos-engines",
        "a round of kills and cuts with the real engines, of conversations and of agents",
        _python("-m", "benchmarks", "chaos", *_CHAOS),
        90,
    ),
)


def all_areas() -> list[Area]:
    """Every area: the folders with long or property tests, and the commands."""
    folders = sorted(
        {_folder(path) for path in (ROOT / "tests").rglob("test_*.py") if _LONG_TESTS.search(path.read_text())}
    )
    long = [Area(name, f"long and property tests of tests/{name}", _long(name), 60) for name in folders]
    return [*long, *_COMMANDS]


def _folder(path: Path) -> str:
    """tests/unit/learner/push/test_x.py is in unit/learner."""
    return "/".join(path.relative_to(ROOT / "tests").parent.parts[:2])


def _long(folder: str) -> tuple[str, ...]:
    """The files right in `unit` are an area too, without the folders in it, which are others."""
    path = Path("tests", folder)
    if "/" in folder or not any(path.glob("*/test_*.py")):
        return (*_PYTEST, *_MANY_EXAMPLES, str(path))
    return (*_PYTEST, *_MANY_EXAMPLES, *(str(file) for file in sorted(path.glob("test_*.py"))))
