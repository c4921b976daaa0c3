"""What a part is given, and where it puts what it measures.

Neighbours: child.py makes it, the parts fill `numbers`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from tests.gpu.sizes import SIZES, Sizes, random_model


@dataclass
class Case:
    """One part's run.

    Attributes:
        engine: Arguments of vLLM from the command line, over those of the sizes.
        numbers: Filled as they are measured, so that a part that fails keeps what it had.
    """

    part: str
    device: str
    folder: Path
    engine: dict[str, Any]
    numbers: dict[str, float | str] = field(default_factory=dict)

    @property
    def sizes(self) -> Sizes:
        """For the device."""
        return SIZES[self.device]

    @cached_property
    def model(self) -> Path:
        """The folder of the random model."""
        return random_model(self.folder / f"model-{self.device}", self.device)

    @property
    def engine_arguments(self) -> dict[str, Any]:
        """vLLM's, beside those that the service sets itself."""
        by_default = {"enforce_eager": False} if self.part == "graphs" else {}
        return {**self.sizes.engine, **by_default, **self.engine}

    def note(self, **numbers: float | str) -> None:
        """Keep numbers under names that have their unit; three digits are enough to read."""
        for name, value in numbers.items():
            self.numbers[name] = float(f"{value:.3g}") if isinstance(value, float) else value

    def require(self, holds: bool, what: str) -> None:
        """Fail the part unless something holds."""
        if not holds:
            raise PartFailed(what)


class PartFailed(Exception):  # noqa: N818 - the outcome of a part
    """What a part was to show does not hold."""
