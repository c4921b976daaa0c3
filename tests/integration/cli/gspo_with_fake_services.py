"""`gspo`, with the services replaced by fake_service.py; everything else is the real command line.

`FAKE_SERVICES` names those that take part.
"""

from __future__ import annotations

import functools
import os
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

from gspo.cli.__main__ import main
from gspo.cli.processes import preflight, programs
from gspo.cli.processes.child import Program
from gspo.cli.run import session, training

FAKE = str(Path(__file__).parent / "fake_service.py")


def fake_programs(job: programs.Job, redis_url: str) -> list[Program]:
    """The real programs with `python -P -m gspo.SERVICE ...` become `python -P fake_service.py SERVICE ...`."""
    return [
        replace(program, command=(*program.command[:2], FAKE, program.name[:-2], *program.command[4:]))
        for program in programs.service_programs(job, redis_url)
    ]


def fake_check(service: str, config_file: Path) -> tuple[str, ...]:
    """The check of a fake service."""
    return (sys.executable, "-P", FAKE, service, "--check", str(config_file))


def fake_report(run_dir: Path, **_facts: Any) -> dict[str, Any]:
    """The fake learner logs nothing that a report could be made of."""
    before, after = ({"sampled_mean": mean, "sampled_stderr": 0.03} for mean in (0.25, 0.75))
    held_out = {"sums": {"before": before, "after": after}}
    return {"held_out": held_out, "steps": 3, "policy_version": 3, "groups": {"trained": 3}}


session.service_programs = fake_programs  # type: ignore[attr-defined]
preflight.check_command = fake_check
training.run_services = functools.partial(training.run_services, services=tuple(os.environ["FAKE_SERVICES"].split()))
report = ModuleType("gspo.view.picture.page")
report.write_report = fake_report  # type: ignore[attr-defined]
sys.modules[report.__name__] = report
main()
