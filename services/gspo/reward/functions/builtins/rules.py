"""Built-ins that judge an answer by its text or its length alone; each function has the name of its built-in."""

import math
from typing import Any

import regex as patterns

_NUMBER = patterns.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?")


def exact_match(
    solution_str: str, ground_truth: Any, *, extract: str = "", strip: bool = True, ignore_case: bool = False
) -> float:
    """1 if the answer is the right one, letter for letter, else 0.

    Args:
        extract: A pattern; the answer is the first group (or all) of its last match, and without one it is wrong.
        strip: White space around both does not count.
        ignore_case: Upper and lower case are the same.
    """
    if extract:
        matches = list(patterns.finditer(extract, solution_str))
        if not matches:
            return 0.0
        solution_str = matches[-1][1 if matches[-1].re.groups else 0] or ""
    answer, right = solution_str, str(ground_truth)
    if strip:
        answer, right = answer.strip(), right.strip()
    if ignore_case:
        answer, right = answer.casefold(), right.casefold()
    return float(answer == right)


def numeric(solution_str: str, ground_truth: Any, *, tolerance: float = 1e-6, relative_tolerance: float = 0.0) -> float:
    """1 if the last number of the answer (1234.5, 1,234.5 or 1.2345e3) is the right one within a tolerance, else 0.

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


def regex(completions: list[Any], *, pattern: str, full: bool = False) -> list[float]:
    """1 if a pattern matches the answer, else 0: tags in their order, one boxed answer.

    Args:
        pattern: By the rules of the `regex` package; . matches line ends too.
        full: The whole answer must match; else it is searched.
    """
    compiled = patterns.compile(pattern, patterns.DOTALL)
    match = compiled.fullmatch if full else compiled.search
    return [float(match(text_of(completion)) is not None) for completion in completions]


def length_penalty(
    completion_ids: list[list[int]], *, max_tokens: int, buffer_tokens: int, penalty: float = 1.0
) -> list[float]:
    """0 up to a length, then down to -penalty at the longest one: DAPO (arXiv 2503.14476), formula 13.

    Args:
        max_tokens: From here on the whole penalty.
        buffer_tokens: The penalty begins so many tokens before that, and grows evenly.
        penalty: The largest; it is subtracted.
    """
    free = max_tokens - buffer_tokens
    shares = [min(max(len(ids) - free, 0) / max(buffer_tokens, 1), 1.0) for ids in completion_ids]
    return [-penalty * share for share in shares]


def repetition_penalty(completions: list[Any], *, ngram: int = 3, penalty: float = 1.0) -> list[float]:
    """Down to -penalty by the share of an answer's n-grams of words, case apart, that occur earlier in it.

    Args:
        ngram: Words in one.
        penalty: The largest; it is subtracted.
    """
    return [-penalty * repeated_share(text_of(text).casefold().split(), ngram) for text in completions]


def repeated_share(words: list[str], ngram: int) -> float:
    """1 - different n-grams / all n-grams; 0 if there are none."""
    ngrams = [tuple(words[i : i + ngram]) for i in range(len(words) - ngram + 1)]
    return 1 - len(set(ngrams)) / len(ngrams) if ngrams else 0.0


def text_of(completion: Any) -> str:
    """An answer as text, also if it is a chat message."""
    return completion if isinstance(completion, str) else str(completion[-1]["content"])
