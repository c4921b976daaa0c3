"""Built-in `exact_match`: 1 if the answer is the right one, letter for letter, else 0."""

from __future__ import annotations

from typing import Any

import regex


def compute_score(
    solution_str: str, ground_truth: Any, *, extract: str = "", strip: bool = True, ignore_case: bool = False
) -> float:
    """Compare text with text.

    Args:
        extract: A pattern; the answer is the first group (or all) of its last match, and without one it is wrong.
        strip: White space around both does not count.
        ignore_case: Upper and lower case are the same.
    """
    if extract:
        matches = list(regex.finditer(extract, solution_str))
        if not matches:
            return 0.0
        solution_str = matches[-1][1 if matches[-1].re.groups else 0] or ""
    answer, right = solution_str, str(ground_truth)
    if strip:
        answer, right = answer.strip(), right.strip()
    if ignore_case:
        answer, right = answer.casefold(), right.casefold()
    return float(answer == right)
