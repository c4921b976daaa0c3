"""Stop strings of an answer that is sampled in pieces: one that begins in a piece may end in the next.

vLLM looks at the text of one request alone. Neighbour: rollouts.py, after each piece that goes on from earlier tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from transformers import PreTrainedTokenizerBase

from gspo.generation.engine.api import Completion

# A character of UTF-8 has four bytes at most, and a token at least one.
_TOKENS_PER_CHARACTER = 4


def cut_at_stop(
    tokenizer: PreTrainedTokenizerBase, earlier_token_ids: Sequence[int], piece: Completion, stops: Sequence[str]
) -> Completion:
    """The piece, cut after the token that completes a stop string which the earlier tokens began."""
    reach = _TOKENS_PER_CHARACTER * (max(map(len, stops)) - 1)
    tail = list(earlier_token_ids[-reach:]) if reach else []
    for num_kept in range(1, min(reach, len(piece.token_ids)) + 1 if tail else 0):
        text = tokenizer.decode(tail + piece.token_ids[:num_kept], skip_special_tokens=True)
        if found := next((stop for stop in stops if stop in text), None):
            return replace(
                piece,
                token_ids=piece.token_ids[:num_kept],
                logp=piece.logp[:num_kept],
                version=piece.version[:num_kept],
                finish="stop_string",
                stop_string=found,
            )
    return piece
