"""`gspo`, with the four services replaced by fake_service.py; everything else is the real command line."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

from services.cli import checks, lineup, session
from services.cli.__main__ import main
from services.cli.processes import Program

FAKE = str(Path(__file__).parent / "fake_service.py")


def fake_command(command: tuple[str, ...]) -> tuple[str, ...]:
    """`python -m services.X ...` becomes `python fake_service.py X ...`."""
    service = command[2].removeprefix("services.")
    return (command[0], FAKE, service, *command[3:])


def fake_programs(job: lineup.Job, redis_url: str) -> list[Program]:
    """The real lineup with other programs."""
    real = lineup.service_programs(job, redis_url)
    return [replace(program, command=fake_command(program.command)) for program in real]


def fake_check(service: str, config_file: Path) -> tuple[str, ...]:
    """The check of a fake service."""
    return (sys.executable, FAKE, service, "--check", str(config_file))


def fake_report(run_dir: Path, **_facts: Any) -> dict[str, Any]:
    """The fake learner logs nothing that a report could be made of."""
    return {"accuracy_before": 0.25, "accuracy_after": 0.75, "steps": 3, "policy_version": 3, "groups": {"trained": 3}}


session.service_programs = fake_programs
checks.check_command = fake_check
report = ModuleType("services.cli.report")
report.write_report = fake_report  # type: ignore[attr-defined]
sys.modules[report.__name__] = report
main()
