"""The one error that a user's input can cause.

It is not for our own faults: those are tracebacks. Neighbours: config.py raises it, every `__main__` turns it
into one message and exit code 2.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

EXIT_BAD_INPUT = 2


class InputError(Exception):
    """What the user gave cannot work: names the key or file, the value, the rule and the fix.

    Args:
        where: The key, file or field, as the user wrote it.
        rule: What must hold, with the value that breaks it.
        fix: What to change.
    """

    def __init__(self, where: str, rule: str, fix: str) -> None:
        super().__init__(f"{where}: {rule}. {fix}")
        self.where, self.rule, self.fix = where, rule, fix


def nearest(word: str, known: Iterable[str]) -> str:
    """'Did you mean ...?' for an unknown word, or the known ones when none is near."""
    choices = sorted(known)
    match = difflib.get_close_matches(word, choices, n=1, cutoff=0.5)
    return f"Did you mean '{match[0]}'?" if match else f"Known are: {', '.join(choices)}."
