"""Shared by the tests of the reward service: the machine's level is tried once, not by each of them.

The trial itself is tested in test_sandbox.py, and every service that a test starts as a process makes its own.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gspo.reward.functions import configured
from gspo.reward.sandbox import levels
from gspo.reward.sandbox.launch import ConfinementLevel, LevelName


@pytest.fixture(scope="package", autouse=True)
def confinement_level_once() -> Iterator[None]:
    """`open_library` gets the result of the first trial of a minimum."""
    confinements: dict[LevelName, ConfinementLevel] = {}

    async def find_level(minimum: LevelName) -> ConfinementLevel:
        if minimum not in confinements:
            confinements[minimum] = await levels.find_level(minimum)
        return confinements[minimum]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(configured, "find_level", find_level)
        yield
