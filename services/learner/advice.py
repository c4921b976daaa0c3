"""What the figures of the last steps call for, as the learner logs it. Neighbour: services.common.advice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from services.common import advice as shared
from services.common.config import Config


def advice(figures: Sequence[Mapping[str, float]], config: Config) -> list[str]:
    """Sentences for the newest step, given the figures of the steps up to it, oldest first."""
    return list(shared.advice(figures, config).values())
