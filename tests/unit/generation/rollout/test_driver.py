"""Stop strings of an answer that is sampled in pieces: one that begins in a piece may end in the next."""

from __future__ import annotations

from typing import cast

import pytest
from transformers import PreTrainedTokenizerBase

from gspo.generation.engine.api import Completion
from gspo.generation.rollout.driver import cut_at_stop


class LetterTokenizer:
    """A tokenizer of one letter a token."""

    def decode(self, token_ids: list[int], skip_special_tokens: bool) -> str:
        return "".join(map(chr, token_ids))


TOKENIZER = cast("PreTrainedTokenizerBase", LetterTokenizer())
EARLIER = [ord(letter) for letter in "so </an"]


def piece_of(text: str) -> Completion:
    ids = [ord(letter) for letter in text]
    return Completion(ids, [float(-i) for i in range(len(ids))], [1] * len(ids), "length")


def test_a_stop_string_over_two_pieces_ends_the_answer_at_its_last_token() -> None:
    cut = cut_at_stop(TOKENIZER, EARLIER, piece_of("swer> and more"), ["</answer>", "!"])
    assert bytes(cut.token_ids).decode() == "swer>"
    assert (cut.finish, cut.stop_string) == ("stop_string", "</answer>")
    assert (cut.logp, cut.version) == ([0, -1, -2, -3, -4], [1] * 5)


@pytest.mark.parametrize(
    ("earlier", "text", "stops"),
    [(EARLIER, "swer and more", ["</answer>"]), ([], "swer>", ["</answer>"]), (EARLIER, "swer>", [])],
)
def test_a_piece_that_completes_no_stop_string_is_unchanged(earlier: list[int], text: str, stops: list[str]) -> None:
    piece = piece_of(text)
    assert cut_at_stop(TOKENIZER, earlier, piece, stops) is piece
