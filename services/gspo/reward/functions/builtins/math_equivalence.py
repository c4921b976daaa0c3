"""Built-in `math_equivalence`: 1 if the answer is mathematically the right one (1/2, 0.5, \\frac{1}{2}), else 0.

math-verify finds the answer in the text (the last \\boxed{...}, LaTeX or expression) and compares. Its own
time limits need signals and are off; the sandbox ends a comparison that takes too long.
"""

from typing import Any

from math_verify import parse, verify


def compute_score(solution_str: str, ground_truth: Any, *, precision: int = 6) -> float:
    """Compare expressions, sets, intervals and the like.

    Args:
        precision: Digits behind the point that must agree if both are decimal numbers.

    Raises:
        ValueError: The right answer is not readable as mathematics.
    """
    right = str(ground_truth)
    # Bare LaTeX is read only between dollars, a bare number or expression also without.
    gold = parse(right, parsing_timeout=None) or parse(f"${right}$", parsing_timeout=None)
    if "\\" in right and "$" not in right:
        gold = parse(f"${right}$", parsing_timeout=None) or gold
    if not gold:
        raise ValueError(f"the right answer is not readable as mathematics: {right!r:.100}")
    answer = parse(solution_str, parsing_timeout=None)
    return float(verify(gold, answer, float_rounding=precision, timeout_seconds=None))
