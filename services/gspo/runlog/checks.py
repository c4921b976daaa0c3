"""The findings about prompts and first answers: the lines of `log/checks.jsonl`, which each start writes anew."""

import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from pydantic import TypeAdapter

from gspo.common.host.durable_write import replace_file
from gspo.common.telemetry.findings import Finding

CHECKS = "checks.jsonl"
READ_CHECK = TypeAdapter(Finding).validate_python


def write_checks(folder: Path, findings: Iterable[Finding]) -> None:
    """Replace the checks of the run with this log folder."""
    folder.mkdir(parents=True, exist_ok=True)
    replace_file(folder / CHECKS, "".join(f"{json.dumps(asdict(finding))}\n" for finding in findings).encode())
