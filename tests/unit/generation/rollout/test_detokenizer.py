"""The text of answers beside the tokenizer's own, token for token."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from examples.arithmetic.chat_tokenizer import build_tokenizer
from gspo.generation.rollout.detokenizer import Detokenizer
from tests.support.tiny_model import make_tokenizer


def word_pieces() -> PreTrainedTokenizerFast:
    """A tokenizer that puts spaces between its tokens: what a piece is depends on where it stands."""
    backend = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2, "!": 3}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]")


def with_reserved() -> PreTrainedTokenizerFast:
    """One with special tokens that it names nowhere, and an added one that is not special."""
    tokenizer = build_tokenizer()
    tokenizer.backend_tokenizer.add_special_tokens([f"<|reserved_{number}|>" for number in range(4)])
    tokenizer.backend_tokenizer.add_tokens(["<tool_call>"])
    return tokenizer


TOKENIZERS = {
    "bytes": build_tokenizer(),
    "reserved": with_reserved(),
    "characters": make_tokenizer(),
    "words": word_pieces(),
}
LOOKED_UP = {"bytes": True, "reserved": True, "characters": True, "words": False}
DETOKENIZERS = {name: Detokenizer(tokenizer) for name, tokenizer in TOKENIZERS.items()}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_pieces_are_looked_up_where_they_only_lie_end_to_end(name: str) -> None:
    assert DETOKENIZERS[name].looks_up is LOOKED_UP[name]


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data())
def test_any_tokens_have_the_text_that_the_tokenizer_gives(name: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[name]
    # Some beyond the tokenizer's own: the rows of models are often more.
    answer = data.draw(st.lists(st.integers(0, len(tokenizer) + 8), max_size=80))
    assert DETOKENIZERS[name].text(answer) == tokenizer.decode(answer, skip_special_tokens=True)


@given(text=st.text(max_size=40), cut=st.integers(0, 3))
def test_text_in_bytes_comes_back_and_a_character_cut_in_two_is_replaced(text: str, cut: int) -> None:
    tokenizer = TOKENIZERS["bytes"]
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    kept = token_ids[: len(token_ids) - cut]
    assert DETOKENIZERS["bytes"].text(token_ids) == text
    assert DETOKENIZERS["bytes"].text(kept) == tokenizer.decode(kept, skip_special_tokens=True)


def test_a_tokenizer_that_decodes_otherwise_than_its_pieces_is_asked() -> None:
    tokenizer = make_tokenizer()
    tokenizer.clean_up_tokenization_spaces = True
    detokenizer = Detokenizer(tokenizer)
    answer = tokenizer.encode("a , b .", add_special_tokens=False)
    assert not detokenizer.looks_up
    assert detokenizer.text(answer) == tokenizer.decode(answer, skip_special_tokens=True) == "a, b."
