"""A service process that takes faults from outside: `python -m benchmarks.chaos.harness.faulty_service MODULE OPTIONS`.

Faults are files that faults.py writes to the folder of GSPO_CHAOS, with the process's name behind a dash. `clock-NAME`
holds seconds that are added to the time of day (never to the monotonic clock, which no administrator can set).
`corrupt-NAME` flips one bit of the next frame of weights, once. Everything else is the module as it is.
"""

from __future__ import annotations

import os
import runpy
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

VARIABLE = "GSPO_CHAOS"
_LOOK_EVERY_S = 0.1
_STAGING = "gspo.generation.engine.staging"


class MovedClock:
    """The time of day, moved by the seconds in a file."""

    def __init__(self, file: Path) -> None:
        self._file, self._true = file, time.time
        self._offset_s, self._looked_at = 0.0, 0.0

    def time(self) -> float:
        """As time.time."""
        if time.monotonic() - self._looked_at > _LOOK_EVERY_S:
            self._looked_at = time.monotonic()
            try:
                self._offset_s = float(self._file.read_text() or 0.0)
            except FileNotFoundError:
                self._offset_s = 0.0
        return self._true() + self._offset_s


class AfterImport(MetaPathFinder):
    """Changes a module right after its first import, which comes when the service imports it.

    Generation sets variables before it imports torch, and forks before it has threads.
    """

    def __init__(self, name: str, change: Callable[[ModuleType], None]) -> None:
        self._name, self._change = name, change

    def find_spec(self, fullname: str, path: object, target: object = None) -> ModuleSpec | None:  # noqa: ARG002
        """The module's own specification, whose loader also changes it."""
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_change(module: ModuleType) -> None:
                execute(module)
                self._change(module)

            spec.loader.exec_module = execute_and_change  # type: ignore[method-assign]
        return spec


def corrupt_frames(file: Path, staging: ModuleType) -> None:
    """Flip a bit in the next frame while the file is there, and remove it."""
    copies = staging.PolicyCopies
    take = copies.write, copies.change

    def is_due() -> bool:
        if not file.exists():
            return False
        file.unlink()
        return True

    def write(self: Any, name: str, offset: int, data: bytes) -> None:
        take[0](self, name, offset, _flipped(data) if is_due() else data)

    def change(self: Any, name: str, offset: int, num_elements: int, packed: Any) -> None:
        if is_due():
            packed = type(packed)(packed.num_listed, _flipped(packed.data))
        take[1](self, name, offset, num_elements, packed)

    copies.write, copies.change = write, change


def _flipped(data: bytes) -> bytes:
    changed = bytearray(data)
    changed[len(changed) // 2] ^= 0x10
    return bytes(changed)


def main() -> None:
    """Install the faults and be the module."""
    _, module, *options = sys.argv
    name, folder = options[options.index("--name") + 1], Path(os.environ[VARIABLE])
    time.time = MovedClock(folder / f"clock-{name}").time
    if name.startswith("generation"):
        sys.meta_path.insert(0, AfterImport(_STAGING, partial(corrupt_frames, folder / f"corrupt-{name}")))
    sys.argv = [module, *options]
    runpy.run_module(module, run_name="__main__")


if __name__ == "__main__":
    main()
