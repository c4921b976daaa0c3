"""Runs of the arithmetic example with a planted fault each, made anew, and what the rules say of them.

CI reads their recorded figures (tests/unit/common/telemetry/test_planted_runs.py).
"""

from __future__ import annotations

import pytest

from tests.planted.__main__ import record
from tests.planted.faults import FAULTS
from tests.planted.judged import judge


@pytest.mark.long
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_named_within_ten_steps(name: str) -> None:
    judge(name, record(name))
