"""Files about the functions of a run, in `log/functions`: the source of each version that scored, and its calls.

A source file is written once, under its version. The file of calls belongs to one process of the reward service, which
replaces it as it goes. The reward service writes both; readers need this module alone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gspo.common.host.durable_write import replace_file

FOLDER = "functions"
_VERSION = re.compile(r"[0-9a-f]{8,64}")
_SOURCE, _CALLS = "source-", "calls-"
# A folder of foreign files is not read without end.
_MAX_FILES, _MAX_BYTES = 10_000, 4 * 2**20


@dataclass(frozen=True)
class FunctionSource:
    """One version of a function.

    Attributes:
        version: Hash of the content, as in the column parts_json.
        kind: `reward` or `environment`.
        filename: Name of the user's file, or the address of a server.
        entry: The function that is called; empty where it is recognised by its form.
        source: Python text; empty for a server and for a reward model.
        args: Further keyword arguments of each call.
        is_tryable: Whether its source alone, in a sandbox, is the whole function.
        reads: Paths that its code may read besides.
        used_unix_s: When it was first used.
        modules: The modules that it takes along: their texts, by their paths from its folder.
    """

    name: str
    version: str
    kind: str
    filename: str
    entry: str
    source: str
    args: dict[str, Any]
    is_tryable: bool
    reads: list[str]
    used_unix_s: float
    modules: dict[str, str] = field(default_factory=dict)

    @property
    def whole_text(self) -> str:
        """The source, and behind it every module under its path."""
        return "\n\n".join([self.source, *(f"# {path}\n{text}" for path, text in self.modules.items())])


@dataclass
class FunctionCalls:
    """How the calls of one version went, in one process or in all.

    Attributes:
        answers: Rollouts and steps that the calls were about.
        seconds: Summed time of the calls.
        failures: Failed calls and answers by kind.
        printed: The end of the last output that it printed in a call without a failure.
        failure: The last failure: unix_s, kind, text, traceback, output; empty without one.
    """

    name: str
    version: str
    calls: int = 0
    answers: int = 0
    seconds: float = 0.0
    failures: dict[str, int] = field(default_factory=dict)
    printed: str = ""
    failure: dict[str, Any] = field(default_factory=dict)

    def add(self, other: FunctionCalls) -> None:
        """Add what another process counted."""
        self.calls += other.calls
        self.answers += other.answers
        self.seconds += other.seconds
        for kind, number in other.failures.items():
            self.failures[kind] = self.failures.get(kind, 0) + int(number)
        self.printed = other.printed or self.printed
        self.failure = max(self.failure, other.failure, key=lambda failure: float(failure.get("unix_s", 0.0)))


def write_source(log_folder: Path, source: FunctionSource) -> None:
    """Keep a version; one that is there stays as it is.

    Raises:
        OSError: The folder cannot be written.
    """
    _write(log_folder, f"{_SOURCE}{source.version}", asdict(source), replaces=False)


def write_calls(log_folder: Path, process: str, calls: list[FunctionCalls]) -> None:
    """Replace what a process has counted.

    Args:
        process: Its id, of letters and digits.

    Raises:
        OSError: The folder cannot be written.
    """
    _write(log_folder, f"{_CALLS}{process}", [asdict(one_version) for one_version in calls], replaces=True)


def _write(log_folder: Path, stem: str, content: Any, *, replaces: bool) -> None:
    path = log_folder / FOLDER / f"{stem}.json"
    if replaces or not path.exists():
        replace_file(path, json.dumps(content).encode())


def read_source(log_folder: Path, version: str) -> FunctionSource | None:
    """A version; None where the log has it not, or has something else in its place."""
    if not _VERSION.fullmatch(version):
        return None
    fields = _read(log_folder / FOLDER / f"{_SOURCE}{version}.json")
    try:
        return FunctionSource(**fields) if isinstance(fields, dict) else None
    except TypeError:
        return None


def read_sources(log_folder: Path) -> list[FunctionSource]:
    """Every version in the log, the first used first."""
    versions = (stem.removeprefix(_SOURCE) for stem in _stems(log_folder, _SOURCE))
    sources = (read_source(log_folder, version) for version in versions)
    return sorted((source for source in sources if source), key=lambda source: (source.used_unix_s, source.version))


def read_calls(log_folder: Path) -> dict[tuple[str, str], FunctionCalls]:
    """The calls of each name and version, of all processes of the run together."""
    totals: dict[tuple[str, str], FunctionCalls] = {}
    for stem in _stems(log_folder, _CALLS):
        records = _read(log_folder / FOLDER / f"{stem}.json")
        for fields in records if isinstance(records, list) else []:
            try:
                calls = FunctionCalls(**fields)
                totals.setdefault((calls.name, calls.version), FunctionCalls(calls.name, calls.version)).add(calls)
            except (TypeError, AttributeError, ValueError):
                continue  # a foreign file
    return totals


def _stems(log_folder: Path, prefix: str) -> Iterator[str]:
    folder = log_folder / FOLDER
    if folder.is_dir():
        paths = sorted(folder.glob(f"{prefix}*.json"))
        yield from (path.stem for path in paths[:_MAX_FILES])


def _read(path: Path) -> Any:
    try:
        if path.stat().st_size > _MAX_BYTES:
            return None
        return json.loads(path.read_text(encoding="utf-8", errors="replace"))
    except (OSError, ValueError):
        return None
