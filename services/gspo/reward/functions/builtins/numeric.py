"""Built-in `numeric`: 1 if the last number of the answer is the right one within a tolerance, else 0."""

from __future__ import annotations

import math
from typing import Any

import regex

_NUMBER = regex.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?")


def compute_score(
    solution_str: str, ground_truth: Any, *, tolerance: float = 1e-6, relative_tolerance: float = 0.0
) -> float:
    """Compare numbers, written as 1234.5, 1,234.5 or 1.2345e3.

    Args:
        tolerance: Largest difference that is right.
        relative_tolerance: Largest difference that is right, as a share of the larger of the two.

    Raises:
        ValueError: The right answer is not a number.
    """
    right = float(str(ground_truth).replace(",", ""))
    numbers = _NUMBER.findall(solution_str)
    if not numbers:
        return 0.0
    answer = float(numbers[-1].replace(",", ""))
    return float(math.isclose(answer, right, abs_tol=tolerance, rel_tol=relative_tolerance))
