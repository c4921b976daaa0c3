"""The text of an answer from its tokens: the tokenizer's own decoding, and faster for byte-level tokenizers.

A byte-level tokenizer (GPT-2's kind, which most models have) gives a token the same bytes at every place. Those are
looked up here; any other tokenizer decodes itself.
"""

import json
from collections.abc import Callable, Iterable

import numpy as np
from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

# Answers of random tokens on which the pieces must give what the tokenizer gives, and how many tokens each has.
_NUM_TRIED, _TOKENS_TRIED = 32, 64


class Detokenizer:
    """Decodes answers as the tokenizer does with skip_special_tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._pieces = _pieces_of(tokenizer)
        if self._pieces and not self._decodes_as_the_tokenizer():
            self._pieces = None

    @property
    def looks_up(self) -> bool:
        """Whether tokens are looked up instead of decoded by the tokenizer."""
        return self._pieces is not None

    def text(self, token_ids: Iterable[int]) -> str:
        """The text of an answer or of the policy's turn; unknown tokens have no text."""
        if self._pieces is None:
            # As an array: of a list the tokenizer makes one first, which costs as much as the decoding.
            return str(self._tokenizer.decode(np.array(token_ids, np.int64), skip_special_tokens=True))
        return b"".join(map(self._pieces.__getitem__, token_ids)).decode(errors="replace")

    def _decodes_as_the_tokenizer(self) -> bool:
        tried = np.random.default_rng(0).integers(0, len(self._tokenizer), (_NUM_TRIED, _TOKENS_TRIED)).tolist()
        return all(self.text(answer) == self._tokenizer.decode(answer, skip_special_tokens=True) for answer in tried)


class _Pieces(dict[int, bytes]):
    """Token -> its bytes; none for an unknown token, since models have more rows than their tokenizers."""

    def __missing__(self, token: int) -> bytes:
        return b""


def _pieces_of(tokenizer: PreTrainedTokenizerBase) -> _Pieces | None:
    """The bytes of every token, if the decoder only concatenates them; special tokens have none."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or tokenizer.clean_up_tokenization_spaces:
        return None
    parts = json.loads(backend.to_str())
    decoder = parts["decoder"] or {}
    encoders: dict[str, Callable[[str], bytes]] = {"ByteLevel": _from_byte_level, "Fuse": str.encode}
    if (encode := encoders.get(decoder.get("type", ""))) is None:
        return None
    # More than the tokenizer names: Llama's reserved tokens, for one.
    special = {token["id"] for token in parts["added_tokens"] if token["special"]}
    vocabulary = backend.get_vocab(with_added_tokens=True)
    return _Pieces((token, b"" if token in special else encode(text)) for text, token in vocabulary.items())


_BYTES = {character: byte for byte, character in bytes_to_unicode().items()}


def _from_byte_level(text: str) -> bytes:
    """Characters stand for bytes; a token with a character that stands for none (an added one) is plain text."""
    try:
        return bytes(map(_BYTES.__getitem__, text))
    except KeyError:
        return text.encode()
