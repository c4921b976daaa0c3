"""One promise of the project: what breaks it, and the tests that must fail then."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Promise:
    """What holds, and a change of one file after which it does not.

    Attributes:
        old: Text that stands in `file` exactly once.
        new: What takes its place.
        tests: Names of tests (`path::test`), of which each must fail then.
    """

    promise: str
    file: str
    old: str
    new: str
    tests: list[str]


def read_promises() -> list[Promise]:
    """All of them, in their order."""
    return [Promise(**entry) for entry in yaml.safe_load((Path(__file__).parent / "promises.yml").read_text())]
