"""Tokenizers of strangers are refused in seconds, before a service encodes a text with them; others pass."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors

from gspo.common.errors import InputError
from gspo.common.model.tokenizer_trial import check_tokenizer_files
from tests.support.tiny_model import make_tiny_model


def _tokenizer() -> Tokenizer:
    return Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))


def _multiplying() -> Any:
    tokenizer = _tokenizer()
    tokenizer.normalizer = normalizers.Sequence([normalizers.Replace("a", "a" * 10)] * 9)
    return json.loads(tokenizer.to_str())


def _repeating() -> Any:
    tokenizer = _tokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(single=["$A"] * 5000)
    return json.loads(tokenizer.to_str())


def _searching() -> Any:
    tokenizer = _tokenizer()
    # Groups within groups: each further character doubles the ways to fail.
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("((a+)+)+((a+)+)+$b"), "isolated")
    return json.loads(tokenizer.to_str())


@pytest.mark.parametrize(
    ("content", "words"),
    [
        pytest.param(_multiplying, "takes more than 20 s of a processor, or 2 GiB", id="multiplies"),
        pytest.param(_searching, r"fails \(.*retry-limit-in-match over\)", id="searches"),
        pytest.param(_repeating, "gives more than 4,096 tokens", id="repeats"),
    ],
)
def test_a_tokenizer_that_multiplies_a_text_is_refused(tmp_path: Path, content: Any, words: str) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps(content()))
    with pytest.raises(InputError, match=f"model.path: the tokenizer of .*tokenizer.json {words}"):
        check_tokenizer_files(tmp_path)


@pytest.mark.parametrize("content", ["", "{}", "[" * 100_000, '{"model": 1}'])
def test_a_file_that_cannot_be_read_is_left_to_its_reader(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    check_tokenizer_files(tmp_path)


def test_a_tokenizer_passes(tmp_path: Path) -> None:
    check_tokenizer_files(make_tiny_model(tmp_path / "model"))
    check_tokenizer_files(tmp_path)
