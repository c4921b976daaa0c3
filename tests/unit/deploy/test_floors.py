"""The floors of pyproject.toml are the versions of deploy/requirements-lowest.lock, with which a long test runs."""

from __future__ import annotations

import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[3]
# torch is not in the lock: deploy/setup.sh installs its build for CPUs.
EXTRAS, APART = ("cpu", "tensorboard", "wandb", "dev"), {"torch"}


def test_each_floor_is_the_version_that_was_run() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    texts = sum((project["optional-dependencies"][extra] for extra in EXTRAS), start=project["dependencies"])
    lines = [Requirement(line) for line in (ROOT / "deploy/requirements-lowest.lock").read_text().splitlines()]
    run = {canonicalize_name(line.name): Version(str(line.specifier).removeprefix("==")) for line in lines}
    wrong = {
        f"{required.name}{bound}": str(run[canonicalize_name(required.name)])
        for required in map(Requirement, texts)
        for bound in required.specifier
        if bound.operator in (">=", "==") and required.name not in APART
        if Version(bound.version) != run[canonicalize_name(required.name)]
    }
    assert not wrong, "write the version that was run into pyproject.toml, or delete its line of the lock: make lock"
