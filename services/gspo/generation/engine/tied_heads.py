"""Output layers in the files of a tied model, which are the embedding once more and no weights of their own.

config.json may tie the output layer to the embedding while the files hold one as well. Both engines read the folder;
they have one policy only where the files say the same as config.json.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gspo.common.errors import InputError
from gspo.common.model.files import weight_files
from gspo.common.plain_json import read_json_file

_HEAD = "lm_head.weight"
# The names of the input embedding in the architectures.
EMBEDDING = re.compile(r"(^|\.)(embed_tokens|wte|embed_in|word_embeddings|tok_embeddings)\.weight$")
# A large one is compared piece by piece.
_CHUNK_BYTES = 1 << 24


@dataclass(frozen=True)
class _StoredTensor:
    """A tensor in a safetensors file; `start` and `end` are bytes of the file."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    def __str__(self) -> str:
        return f"{self.name} ({self.dtype} {list(self.shape)})"


def tied_heads(folder: Path, *, trust_remote_code: bool = False) -> frozenset[str]:
    """The output layers in a folder's files that are the embedding once more: they are no weights of their own.

    Compares their values, a second for each GiB; most folders have none.

    Raises:
        InputError: config.json ties a head that is not the embedding: nothing says which of the two counts.
    """
    stored = _stored_tensors(folder)
    heads = [tensor for name, tensor in stored.items() if f".{name}".endswith(f".{_HEAD}")]
    embedding = next((tensor for name, tensor in stored.items() if EMBEDDING.search(name)), None)
    if not heads or embedding is None or not _is_tied(folder, trust_remote_code):
        return frozenset()
    for head in heads:
        if not _is_copy(head, embedding):
            raise InputError(
                "model.path",
                f"{folder}: config.json ties the output layer to the embedding (tie_word_embeddings: true), and the "
                f"weights hold {head} beside {embedding} with other values",
                f"Set tie_word_embeddings: false in config.json if the model was trained or merged with this head; if "
                f"it is a leftover, remove {head.name} from the weights",
            )
    return frozenset(head.name for head in heads)


def _is_tied(folder: Path, trust_remote_code: bool) -> bool:
    """Whether config.json ties the output layer; where it does not say, the architecture's default holds."""
    config: Mapping[str, Any] = read_json_file(folder / "config.json")
    inner = config.get("text_config")
    for facts in (config, inner if isinstance(inner, dict) else {}):
        if "tie_word_embeddings" in facts:
            return bool(facts["tie_word_embeddings"])
    from transformers import AutoConfig  # here: it takes a second to import, and few folders need it

    facts = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code).get_text_config()
    return bool(getattr(facts, "tie_word_embeddings", False))


def _stored_tensors(folder: Path) -> dict[str, _StoredTensor]:
    """Every tensor of a folder's safetensors files by name; none of a file whose header cannot be read."""
    stored = {}
    for file in weight_files(folder):
        with file.open("rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            try:
                header = json.loads(stream.read(min(size, file.stat().st_size)))
            except ValueError:
                continue  # files.py names it
        for name, facts in header.items():
            if name != "__metadata__":
                start, end = (8 + size + offset for offset in facts["data_offsets"])
                stored[name] = _StoredTensor(name, file, facts["dtype"], tuple(facts["shape"]), start, end)
    return stored


def _is_copy(first: _StoredTensor, second: _StoredTensor) -> bool:
    """Whether two tensors have the same dtype, shape and bits."""
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        return False
    with first.file.open("rb") as own, second.file.open("rb") as other:
        own.seek(first.start)
        other.seek(second.start)
        num_left = first.end - first.start
        while num_left > 0:
            size = min(_CHUNK_BYTES, num_left)
            if own.read(size) != other.read(size):
                return False
            num_left -= size
    return True
