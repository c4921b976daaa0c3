"""The output layers in a folder's files that are no weights of their own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from gspo.common.errors import InputError
from gspo.generation.engine.tied_heads import tied_heads

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def make_folder(folder: Path, *, head: torch.Tensor | None, shards: int = 1, **config: object) -> Path:
    """A folder with the named tensors alone; with two shards the head lies in a file of its own."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", **config}))
    tensors = {EMBEDDING: torch.arange(12.0).reshape(4, 3), "model.norm.weight": torch.ones(3)}
    heads = {} if head is None else {HEAD: head}
    if shards == 1:
        save_file(tensors | heads, folder / "model.safetensors")
    else:
        save_file(tensors, folder / "model-00001-of-00002.safetensors")
        save_file(heads, folder / "model-00002-of-00002.safetensors")
    return folder


EQUAL = torch.arange(12.0).reshape(4, 3)


@pytest.mark.parametrize("shards", [1, 2])
def test_a_head_that_is_the_embedding_is_no_weight_of_its_own(tmp_path: Path, shards: int) -> None:
    folder = make_folder(tmp_path / "tied", head=EQUAL, shards=shards, tie_word_embeddings=True)
    assert tied_heads(folder) == {HEAD}


def test_an_untied_head_is_a_weight_whatever_its_values(tmp_path: Path) -> None:
    assert not tied_heads(make_folder(tmp_path / "equal", head=EQUAL, tie_word_embeddings=False))
    assert not tied_heads(make_folder(tmp_path / "other", head=EQUAL + 1, tie_word_embeddings=False))
    assert not tied_heads(make_folder(tmp_path / "none", head=None, tie_word_embeddings=True))


@pytest.mark.parametrize(
    ("head", "difference"),
    [
        (EQUAL + 1, r"lm_head.weight \(F32 \[4, 3\]\)"),
        (torch.cat([EQUAL, EQUAL[:1]]), r"lm_head.weight \(F32 \[5, 3\]\)"),
        (EQUAL.bfloat16(), r"lm_head.weight \(BF16 \[4, 3\]\)"),
    ],
    ids=["values", "rows", "dtype"],
)
def test_another_head_of_a_tied_model_is_refused_with_the_fix(
    tmp_path: Path, head: torch.Tensor, difference: str
) -> None:
    folder = make_folder(tmp_path / "two", head=head, tie_word_embeddings=True)
    with pytest.raises(InputError, match=f"{difference} beside .* Set tie_word_embeddings: false .* remove lm_head"):
        tied_heads(folder)


def test_a_folder_that_does_not_say_has_its_architectures_tie(tmp_path: Path) -> None:
    assert tied_heads(make_folder(tmp_path / "gemma", head=EQUAL, model_type="gemma3_text")) == {HEAD}
    assert not tied_heads(make_folder(tmp_path / "qwen", head=EQUAL))


def test_the_key_of_a_nested_language_model_counts(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "nested", head=EQUAL, text_config={"tie_word_embeddings": True})
    assert tied_heads(folder) == {HEAD}


def test_a_difference_in_the_last_row_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gspo.generation.engine.tied_heads._CHUNK_BYTES", 16)
    head = load_file(make_folder(tmp_path / "equal", head=EQUAL, tie_word_embeddings=True) / "model.safetensors")[HEAD]
    assert tied_heads(tmp_path / "equal") == {HEAD}
    head[3, 2] += 1
    with pytest.raises(InputError):
        tied_heads(make_folder(tmp_path / "other", head=head, tie_word_embeddings=True))
