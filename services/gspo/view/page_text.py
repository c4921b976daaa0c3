"""Texts and tokens of a model for a page: nothing hidden in them, and a class for each token's colour.

Templates escape markup; this module makes control and bidirectional characters visible.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

COLOURS = ("logp", "version", "mask")
# Tokens on one page, and characters of one text.
MAX_TOKENS, MAX_CHARS = 2000, 4000
# Least probability of each class but the last.
_PROBABILITIES = (0.9, 0.5, 0.1, 0.01)
LEGENDS = {
    "logp": ["p ≥ 0.9", "0.5 to 0.9", "0.1 to 0.5", "0.01 to 0.1", "p < 0.01"],
    "version": ["the answer's newest version", "1 version older", "2 older", "3 older", "4 or more older"],
    "mask": ["counts in the loss"],
}


class _Visible(dict[int, str]):
    """Code point -> what the page shows for it."""

    def __missing__(self, point: int) -> str:
        char = chr(point)
        hidden = unicodedata.category(char) in ("Cc", "Cf", "Co", "Cs", "Zl", "Zp") and char not in "\n\t"
        self[point] = f"⟦U+{point:04X}⟧" if hidden else char
        return self[point]


_VISIBLE = _Visible()


def visible(text: str) -> str:
    """The text with each control, formatting and bidirectional character as its code point; lines and tabs stay."""
    return text.translate(_VISIBLE)


def coloured_tokens(
    row: Mapping[str, Any], colour: str, start: int, decode: Callable[[int], str] | None
) -> list[dict[str, Any]]:
    """The tokens after the prompt from place `start`: `text`, `note` and CSS class `shade` of each.

    Args:
        row: A rollout of the log.
        colour: One of COLOURS.
        decode: Token id -> text; ids are shown where it is None.
    """
    end, newest = start + MAX_TOKENS, max(row["version"], default=-1)
    columns = (row[name][start:end] for name in ("token_ids", "logp", "version", "mask"))
    return [
        {
            "text": visible(decode(token)) if decode else str(token),
            "note": f"id {token} · log-prob {logp:.3f} · version {version}" + ("" if mask else " · not in the loss"),
            "shade": _shade(colour, logp, newest - version if version >= 0 else -1, mask=mask),
        }
        for token, logp, version, mask in zip(*columns, strict=True)
    ]


def _shade(colour: str, logp: float, lag: int, *, mask: bool) -> str:
    if lag < 0:
        return "context"
    if colour == "mask":
        return "shade-0" if mask else "context"
    if colour == "version":
        return f"shade-{min(lag, 4)}"
    return f"shade-{next((i for i, least in enumerate(_PROBABILITIES) if math.exp(logp) >= least), 4)}"


def token_decoder(folders: list[Path]) -> Callable[[int], str] | None:
    """The decoder of the first folder with a tokenizer.json that can be read; None without one. Runs no model code."""
    for folder in folders:
        path = folder / "tokenizer.json"
        if path.is_file():
            from transformers import PreTrainedTokenizerFast  # seconds, which only a rollout's page needs

            try:
                tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(path))
            except (OSError, ValueError):
                continue
            return lambda token: str(tokenizer.decode([token], clean_up_tokenization_spaces=False))
    return None
