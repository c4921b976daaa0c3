"""Prompts of every format, and the messages for invalid ones. One token is one character."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import PreTrainedTokenizerFast

from gspo.common.config.loading import parse_config
from gspo.common.errors import InputError
from gspo.coordinator.data.prompt_checks import prompt_findings
from gspo.coordinator.data.prompts import PromptSet, training_prompts
from tests.support.tiny_model import make_tokenizer

OpenSet = Callable[..., PromptSet]
ROWS = [{"prompt": "1+2=", "answer": 3}, {"prompt": "20+22=", "answer": 42}]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def chat(*contents: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": content} for content in contents]


def write_format(folder: Path, name: str) -> Path:
    path = folder / name
    if name.endswith(".jsonl"):
        write(path, ROWS)
    elif name.endswith(".json"):
        path.write_text(json.dumps(ROWS))
    elif name.endswith(".csv"):
        path.write_text("prompt,answer\n1+2=,3\n20+22=,42\n")
    elif name.endswith(".parquet"):
        pq.write_table(pa.Table.from_pylist(ROWS), path)
    elif name == "saved":
        datasets.Dataset.from_list(ROWS).save_to_disk(path)
    elif name == "saved_splits":
        rows = datasets.Dataset.from_list(ROWS)
        datasets.DatasetDict({"train": rows, "test": rows.select([0])}).save_to_disk(path)
    else:
        path.mkdir()
        write(path / "train.jsonl", ROWS)
    return path


@pytest.mark.parametrize("name", ["p.jsonl", "p.json", "p.csv", "p.parquet", "saved", "saved_splits", "folder"])
def test_every_format_gives_the_same_prompts(tmp_path: Path, name: str, open_set: OpenSet) -> None:
    prompts = open_set(write_format(tmp_path, name))
    second, first = prompts.prompts([1, 0])
    assert len(prompts) == 2
    assert (first.text, second.text) == ("1+2=", "20+22=")
    assert (len(first.token_ids), len(second.token_ids)) == (4, 6)
    assert first.messages_json == ""
    assert json.loads(second.columns_json) == {"answer": "42" if name == "p.csv" else 42}


def test_messages_get_the_chat_template_and_a_place_for_the_answer(tmp_path: Path, open_set: OpenSet) -> None:
    messages = [{"role": "system", "content": "add"}, {"role": "user", "content": "1+2="}]
    path = write(tmp_path / "p.jsonl", [{"prompt": messages, "extra": {"a": [1, 2]}}])
    (prompt,) = open_set(path).prompts([0])
    text = "<|im_start|>system\nadd<|im_end|>\n<|im_start|>user\n1+2=<|im_end|>\n<|im_start|>assistant\n"
    assert prompt.text == text
    # A marker is one token, every other character is one.
    assert len(prompt.token_ids) == len("Ssystem\naddE\nSuser\n1+2=E\nSassistant\n")
    assert json.loads(prompt.messages_json) == messages
    assert json.loads(prompt.columns_json) == {"extra": {"a": [1, 2]}}


def test_a_key_that_only_some_messages_have_is_no_part_of_the_others(tmp_path: Path, open_set: OpenSet) -> None:
    rows = [{"prompt": chat("a")}, {"prompt": [{"role": "user", "content": "b", "name": "x"}]}]
    first, second = open_set(write(tmp_path / "p.jsonl", rows)).prompts([0, 1])
    assert json.loads(first.messages_json) == chat("a")
    assert json.loads(second.messages_json)[0]["name"] == "x"


SHOWING = make_tokenizer()
SHOWING.chat_template = "{% for t in tools or [] %}[{{ t['name'] }}]{% endfor %}{{ mood }}" + SHOWING.chat_template


def test_the_template_gets_the_variables_of_key_and_row(tmp_path: Path, open_set: OpenSet) -> None:
    """The columns are TRL's; as text they are JSON."""
    rows: list[dict[str, Any]] = [
        {"prompt": chat("a")},
        {"prompt": chat("b"), "chat_template_kwargs": {"mood": "sad"}, "tools": [{"name": "f"}]},
        {"prompt": chat("c"), "chat_template_kwargs": '{"mood": "odd"}', "tools": '[{"name": "g"}]'},
    ]
    path = write(tmp_path / "p.jsonl", rows)
    prompts = open_set(path, tokenizer=SHOWING, chat_template_kwargs={"mood": "fine"}).prompts([0, 1, 2])
    assert [prompt.text.split("<|im_start|>")[0] for prompt in prompts] == ["fine", "[f]sad", "[g]odd"]
    assert [json.loads(prompt.template_json) for prompt in prompts][1] == {"mood": "sad", "tools": [{"name": "f"}]}


@pytest.mark.parametrize(
    ("row", "keys", "problem"),
    [
        ({"tools": "add"}, {}, "line 1: the column tools is not a list of tool descriptions"),
        (
            {"tools": [{"name": "f"}]},
            {"environment": {"builtin": "tools", "tools": ["calculator"]}},
            "tools describes other tools than environ",
        ),
        ({"chat_template_kwargs": [1]}, {}, "the column chat_template_kwargs is not a mapping"),
        ({"chat_template_kwargs": {"tokenize": True}}, {}, "chat_template_kwargs has tokenize"),
        (
            {"prompt": "a"},
            {"chat_template_kwargs": {"mood": 1}},
            r"data.chat_template_kwargs: .* prompts as text",
        ),
    ],
)
def test_variables_that_cannot_be_used_are_refused(
    tmp_path: Path, open_set: OpenSet, row: dict[str, Any], keys: dict[str, Any], problem: str
) -> None:
    with pytest.raises(InputError, match=problem):
        open_set(write(tmp_path / "p.jsonl", [{"prompt": chat("a")} | row]), tokenizer=SHOWING, **keys)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("tools", r"chat_template_kwargs.tools: .*are not the same in every prompt"),
        ("tokenize", "belongs to the call of the"),
    ],
)
def test_keys_that_are_no_variables_are_refused(tmp_path: Path, open_set: OpenSet, name: str, problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        open_set(write(tmp_path / "p.jsonl", [{"prompt": chat("a")}]), chat_template_kwargs={name: 1})


ENDING = [*chat("1+1="), {"role": "assistant", "content": "1"}]


def test_an_assistants_last_message_is_continued_or_refused(tmp_path: Path, open_set: OpenSet) -> None:
    path = write(tmp_path / "p.jsonl", [{"prompt": chat("1+1=")}, {"prompt": ENDING}])
    prompts = open_set(path)
    plain, continued = prompts.prompts([0, 1])
    assert plain.text + "1" == continued.text
    assert prompts.num_continued == 1
    with pytest.raises(InputError, match=r"line 2: the last message is the assistant's, and data\.on_assistant"):
        open_set(path, on_assistant_end="error")
    calls = [*chat("a"), {"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{}"}]}]
    with pytest.raises(InputError, match="cannot continue it"):
        open_set(write(tmp_path / "p.jsonl", [{"prompt": calls}]))


def test_text_that_begins_as_a_list_of_messages_does_is_a_finding(tmp_path: Path, open_set: OpenSet) -> None:
    texts = [json.dumps(chat("1+1=")), str(chat("1+1=")), '[{"a": 1}]', "1+1="]
    [finding] = prompt_findings([open_set(write(tmp_path / "p.jsonl", [{"prompt": text} for text in texts]))], [])
    assert "data.prompts: 2 of 4 prompts are text that begins as a list of messages does" in finding.text
    assert "Try data.types: {prompt: json}" in finding.text
    assert not prompt_findings([open_set(write(tmp_path / "p.jsonl", [{"prompt": chat("1+1=")}]))], [])


def test_messages_that_the_template_leaves_out_are_a_finding(tmp_path: Path, open_set: OpenSet) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m['role'] in ('user', 'tool') %}{{ m['content'] | trim }}{% endif %}{% endfor %}"
    )
    human, answer = {"role": "human", "content": "2+2="}, {"role": "assistant", "content": "thoughts"}
    rows = [[*chat(" 1+1= "), answer, *chat("and 2?")], [human, *chat("x")], [human, human]]
    prompts = open_set(write(tmp_path / "p.jsonl", [{"prompt": row} for row in rows]), tokenizer=tokenizer)
    assert prompts.left_out_roles == {"human": 2}
    [finding] = prompt_findings([prompts], [])
    assert "leaves out what messages of the role 'human' say, in 2 of 3 prompts" in finding.text


def test_a_limit_takes_the_first_rows(tmp_path: Path, open_set: OpenSet) -> None:
    rows = [{"prompt": str(number)} for number in range(9)]
    prompts = open_set(write(tmp_path / "p.jsonl", rows), limit=3)
    assert [prompt.text for prompt in prompts.prompts(range(3))] == ["0", "1", "2"]
    assert len(prompts) == 3


LENGTHS = [4, 5, 3, 9, 5]


def write_lengths(folder: Path) -> Path:
    return write(folder / "p.jsonl", [{"prompt": "abcdefghi"[:length]} for length in LENGTHS])


def test_a_long_prompt_is_an_error_with_count_and_first_line(tmp_path: Path, open_set: OpenSet) -> None:
    with pytest.raises(InputError) as caught:
        open_set(write_lengths(tmp_path), prompt_length=4)
    message = str(caught.value)
    assert message.startswith("data.prompts: 3 of 5 prompts are longer than algorithm.prompt_length: 4 tokens")
    assert "line 2 with 5 tokens" in message


def test_long_prompts_are_skipped(tmp_path: Path, open_set: OpenSet) -> None:
    prompts = open_set(write_lengths(tmp_path), prompt_length=4, on_long_prompt="skip")
    assert [prompt.text for prompt in prompts.prompts(range(len(prompts)))] == ["abcd", "abc"]
    assert prompts.num_skipped == 3


def test_long_prompts_keep_their_end(tmp_path: Path, open_set: OpenSet) -> None:
    prompts = open_set(write_lengths(tmp_path), prompt_length=4, on_long_prompt="truncate")
    texts = [prompt.text for prompt in prompts.prompts(range(5))]
    assert texts == ["abcd", "bcde", "abc", "fghi", "bcde"]
    assert [len(prompt.token_ids) for prompt in prompts.prompts(range(5))] == [4, 4, 3, 4, 4]


def test_of_a_huge_prompt_the_end_alone_is_tokenised(
    tmp_path: Path, open_set: OpenSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, most = write(tmp_path / "p.jsonl", [{"prompt": "x" * 100_000 + "abcd"}, {"prompt": "1"}]), 5 * 1024
    encode = PreTrainedTokenizerFast.__call__
    lengths: list[int] = []

    def watch(self: PreTrainedTokenizerFast, texts: list[str], **options: Any) -> Any:
        lengths.extend(map(len, texts))
        return encode(self, texts, **options)

    monkeypatch.setattr(PreTrainedTokenizerFast, "__call__", watch)
    with pytest.raises(InputError, match="line 1 with 100004 characters"):
        open_set(path, prompt_length=4)
    assert open_set(path, prompt_length=4, on_long_prompt="skip").num_skipped == 1
    (prompt,) = open_set(path, prompt_length=4, on_long_prompt="truncate").prompts([0])
    assert (prompt.text, max(lengths)) == ("abcd", most)


def test_the_longest_prompt_allowed_is_allowed(tmp_path: Path, open_set: OpenSet) -> None:
    path = write(tmp_path / "p.jsonl", [{"prompt": "x" * 40}])
    assert len(open_set(path, prompt_length=40)) == 1
    with pytest.raises(InputError, match="line 1 with 40 tokens"):
        open_set(path, prompt_length=39)


def without_template() -> PreTrainedTokenizerFast:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = None
    return tokenizer


def refusing() -> PreTrainedTokenizerFast:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m['content'] == 'b' %}{{ raise_exception('no b') }}{% endif %}{% endfor %}x"
    )
    return tokenizer


BAD: dict[str, tuple[list[Any], dict[str, Any], str]] = {
    "empty set": ([], {}, "no rows|it is empty"),
    "missing column": ([{"promt": "1"}], {}, r"no column 'prompt'.*Did you mean 'promt'"),
    "empty prompt": ([{"prompt": "1"}, {"prompt": ""}], {}, "line 2: the prompt is empty"),
    "null": ([{"prompt": "1"}, {"prompt": None}], {}, "line 2: the prompt is neither text nor"),
    "number": ([{"prompt": 17}], {}, "line 1: the prompt is neither text nor a list of messages, but 17"),
    "no messages": ([{"prompt": chat("a")}, {"prompt": []}], {}, "line 2: the list of messages is empty"),
    "no role": ([{"prompt": [{"content": "a"}]}], {}, "line 1: message 1 has no role that is text"),
    "no content": (
        [{"prompt": chat("a")}, {"prompt": [*chat("a"), {"role": "user"}]}],
        {},
        "line 2: message 2 has no content that is text",
    ),
    "no template": ([{"prompt": chat("a")}], {"tokenizer": without_template}, "has no chat template"),
    "refused": (
        [{"prompt": chat("a")}, {"prompt": chat("b")}],
        {"tokenizer": refusing},
        r"line 2: the model's chat template refuses the messages \(no b\)",
    ),
    "all too long": (
        [{"prompt": "12345"}],
        {"prompt_length": 4, "on_long_prompt": "skip"},
        "every prompt in .* is too long",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_used_is_named(tmp_path: Path, case: str, open_set: OpenSet) -> None:
    rows, changes, message = BAD[case]
    changes = {key: value() if key == "tokenizer" else value for key, value in changes.items()}
    with pytest.raises(InputError, match=message):
        open_set(write(tmp_path / "p.jsonl", rows), **changes)


def test_files_that_cannot_be_read(tmp_path: Path, open_set: OpenSet) -> None:
    with pytest.raises(InputError, match="does not exist"):
        open_set(tmp_path / "none.jsonl")
    with pytest.raises(InputError, match=r"gsm8k does not exist\. .*; datasets\.load_dataset\(NAME"):
        open_set(tmp_path / "openai/gsm8k")
    (tmp_path / "p.txt").write_text("1+2=")
    with pytest.raises(InputError, match=r"is none of \.jsonl"):
        open_set(tmp_path / "p.txt")
    (tmp_path / "broken.jsonl").write_text('{"prompt": "a"}\n{"prompt": \n')
    with pytest.raises(InputError, match=r"broken\.jsonl, line 2, character 11: is not JSON"):
        open_set(tmp_path / "broken.jsonl")
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 not really")
    with pytest.raises(InputError, match=r"broken\.parquet cannot be read"):
        open_set(tmp_path / "broken.parquet")
    (tmp_path / "nothing").mkdir()
    with pytest.raises(InputError, match="nothing cannot be read"):
        open_set(tmp_path / "nothing")
    rows = datasets.Dataset.from_list(ROWS)
    datasets.DatasetDict({"easy": rows, "hard": rows}).save_to_disk(tmp_path / "splits")
    with pytest.raises(InputError, match="has the splits easy, hard and none is 'train'"):
        open_set(tmp_path / "splits")


def test_a_file_is_text_or_messages_throughout(tmp_path: Path, open_set: OpenSet) -> None:
    path = write(tmp_path / "p.jsonl", [{"prompt": chat("1+2=")}, {"prompt": "1+2="}])
    with pytest.raises(InputError, match=r"line 2: the prompt is text, and the file's first one is messages"):
        open_set(path)


def test_bytes_that_are_no_text_are_found_in_any_column(tmp_path: Path, open_set: OpenSet) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'{"prompt": "1", "answer": "2"}\n{"prompt": "1", "answer": "\xff"}\n')
    with pytest.raises(InputError, match=r"line 2: is not UTF-8"):
        open_set(path)


def test_the_configuration_names_the_column_of_the_prompt(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    write(tmp_path / "p.jsonl", [{"question": "1+2=", "prompt": "other"}])
    keys = {
        "name": "r",
        "model": {"path": "model"},
        "data": {"prompts": "p.jsonl", "prompt_column": "question"},
        "reward": {"functions": [{"path": "reward.py"}]},
        "run": {"total_steps": 3},
    }
    (prompts,) = training_prompts(parse_config(keys, tmp_path), tokenizer)
    (prompt,) = prompts.prompts([0])
    assert (prompt.text, json.loads(prompt.columns_json)) == ("1+2=", {"prompt": "other"})


def test_blank_lines_are_no_rows(tmp_path: Path, open_set: OpenSet) -> None:
    (tmp_path / "p.jsonl").write_text("\n \n")
    with pytest.raises(InputError, match="has no rows"):
        open_set(tmp_path / "p.jsonl")


def test_hashes_are_those_of_the_texts_of_usable_prompts(tmp_path: Path, open_set: OpenSet) -> None:
    prompts = open_set(write_lengths(tmp_path), prompt_length=4, on_long_prompt="skip")
    assert list(prompts.hashes) == [hash("abcd"), hash("abc")]
