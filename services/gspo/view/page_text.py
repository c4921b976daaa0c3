"""Texts and tokens of a model for a page: nothing hidden in them, and a class for each token's colour.

Templates escape markup; this module makes control and bidirectional characters visible.
"""

import math
import unicodedata
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

COLOURS = ("logp", "version", "mask")
# Of runs with learner.token_records.
RECORDED_COLOURS = ("ratio", "entropy")
# Tokens on one page, and characters of one text.
MAX_TOKENS, MAX_CHARS = 2000, 4000
# Least probability of each class but the last.
_PROBABILITIES = (0.9, 0.5, 0.1, 0.01)
LEGENDS = {
    "logp": ["p ≥ 0.9", "0.5 to 0.9", "0.1 to 0.5", "0.01 to 0.1", "p < 0.01"],
    "version": ["the answer's newest version", "1 version older", "2 older", "3 older", "4 or more older"],
    "mask": ["counts in the loss"],
    "ratio": ["ratio within 1 %", "within 5 %", "within 20 %", "within a factor of 2", "beyond a factor of 2"],
    "entropy": ["entropy below 0.1 nats", "0.1 to 0.5", "0.5 to 1", "1 to 2", "2 or more"],
}
# Largest |log-ratio|, and largest entropy in nats, of each class but the last.
_LOG_RATIOS = (0.01, 0.05, 0.2, math.log(2))
_ENTROPIES = (0.1, 0.5, 1.0, 2.0)
_BOUNDS = {
    "logp": tuple(-math.log(probability) for probability in _PROBABILITIES),
    "version": (0, 1, 2, 3),
    "ratio": _LOG_RATIOS,
    "entropy": _ENTROPIES,
}
_LARGEST_SHOWN = 20.0


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
        colour: One of COLOURS; where the row has a token record, also one of RECORDED_COLOURS.
        decode: Token id -> text; ids are shown where it is None.
    """
    end, newest = start + MAX_TOKENS, max(row["version"], default=-1)
    nothing = [None] * len(row["token_ids"])
    columns = [row[name] for name in ("token_ids", "logp", "version", "mask")]
    columns += [row.get(name) or nothing for name in ("learner_logp", "entropy")]
    tokens = []
    for token, logp, version, mask, learner_logp, entropy in zip(
        *(values[start:end] for values in columns), strict=True
    ):
        note = f"id {token} · log-prob {logp:.3f} · version {version}" + ("" if mask else " · not in the loss")
        values = {"logp": -logp, "version": newest - version}
        if mask and learner_logp is not None:
            values |= {"ratio": abs(learner_logp - logp), "entropy": entropy}
            note += f" · ratio {_ratio(learner_logp - logp)} · entropy {entropy:.3f}"
        shade = _shade(colour, values.get(colour), is_sampled=version >= 0, mask=mask)
        tokens.append({"text": visible(decode(token)) if decode else str(token), "note": note, "shade": shade})
    return tokens


def _ratio(log_ratio: float) -> str:
    return f"{math.exp(log_ratio):.3f}" if abs(log_ratio) < _LARGEST_SHOWN else f"exp({log_ratio:.1f})"


def _shade(colour: str, value: float | None, *, is_sampled: bool, mask: bool) -> str:
    """The class of a token; a greater value is darker."""
    if not is_sampled or (colour == "mask" and not mask):
        return "context"
    if colour == "mask":
        return "shade-0"
    if value is None:
        return "context"
    return f"shade-{next((i for i, most in enumerate(_BOUNDS[colour]) if value <= most), 4)}"


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
