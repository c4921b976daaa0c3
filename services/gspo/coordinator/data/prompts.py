"""The prompts of a source, ready for the engine: chat template applied, tokenised, further columns as JSON.

Rows are tokenised on demand. The start reads and checks every row once, in batches, and tokenises only the rows that
may be too long.
"""

from __future__ import annotations

import json
import math
import re
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gspo.common.chat_messages import Message, final_answer, read_messages, render_chat
from gspo.common.config.schema import Config
from gspo.common.config.sources import Source
from gspo.common.data.row_reader import RowReader
from gspo.common.data.row_store import RowStore
from gspo.common.data.task_row import check_names, split_row, template_variables
from gspo.common.errors import InputError, in_yaml
from gspo_proto.rollout_pb2 import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Progress = Callable[[int, int], None]
_BATCH = 1024
# JSON, or what pandas writes of a list into CSV.
_LIKE_MESSAGES = re.compile(r"""\s*\[\s*{\s*["'](role|content)["']""")
# Templates cut thoughts out of the first's messages, and write the second's as JSON.
_REWRITTEN_ROLES = ("assistant", "tool")
# More than any tokenizer adds around a text: begin, end, a leading space.
_ADDED_TOKENS = 8
# Longer than any token, in characters: a tokenizer takes a hundred bytes of memory for a character.
_LONGEST_TOKEN = 1024


@dataclass(frozen=True)
class _Shown:
    """A prompt as the policy sees it; `messages` is empty where it is plain text."""

    text: str
    messages: Sequence[Message] = ()
    variables: Mapping[str, Any] = field(default_factory=dict)


class PromptSet:
    """The usable prompts of one or several files.

    Args:
        key: The configuration key that names the files, for messages.
        paths: The files or folders.
        config: Has the longest length of a prompt, and what happens to a longer one.
        source: Names the column of the prompts and the types of columns, and has the variables of the chat template.
        limit: Use only the first so many rows; None is all.
        progress: Called during the check with rows done and rows in all.

    Attributes:
        source: Where its columns and their types stand.
        num_rows: Usable and skipped.
        left_out: Columns of bytes that no task has -> "images" or "bytes".
        num_continued: Prompts whose last message is the assistant's, which the policy continues.
        num_like_messages: Prompts of text that begins as a list of messages does.
        left_out_roles: Role -> prompts in which the chat template leaves out what a message of it says.
        hashes: The hash of every usable prompt's text, in the file's order; those of one process can be compared.

    Raises:
        InputError: The files cannot be used; names the key, and the line where one is at fault.
    """

    def __init__(
        self,
        key: str,
        paths: Sequence[Path],
        tokenizer: PreTrainedTokenizerBase,
        config: Config,
        source: Source,
        *,
        limit: int | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.key, self.source, self._files = key, source, ", ".join(map(str, paths))
        self._tokenizer, self._on_assistant_end = tokenizer, config.data.on_assistant_end
        self._prompt_length, self._on_long_prompt = config.algorithm.prompt_length, config.data.on_long_prompt
        reader = RowReader(key, paths, source.types, types_key=source.key("types"))
        self._rows = RowStore(islice(reader, limit))
        self.num_rows, self.left_out = len(self._rows), reader.left_out
        check_names(self._rows.names, source, self._files)
        self._is_text: bool | None = None
        self.num_continued = self.num_like_messages = 0
        self.left_out_roles = Counter[str]()
        # A token stands for at least one byte of the text, unless a normalizer could lengthen the text first.
        backend = getattr(tokenizer, "backend_tokenizer", None)
        bytes_bound_tokens = backend is not None and backend.normalizer is None
        self._surely_short_bytes = self._prompt_length - _ADDED_TOKENS if bytes_bound_tokens else -1
        self._most_chars = (self._prompt_length + 1) * _LONGEST_TOKEN
        self.hashes = array("q")
        self._usable = self._check(progress)

    def __len__(self) -> int:
        return len(self._usable)

    @property
    def num_skipped(self) -> int:
        """Rows left out because they are too long."""
        return self.num_rows - len(self)

    def prompts(self, places: Sequence[int]) -> list[Prompt]:
        """The prompts at these places among the usable ones, each 0 .. len - 1."""
        rows = [self._usable[place] for place in places]
        columns = self._rows.rows(rows)
        shown = self._shown(rows, columns)
        others = [split_row(row, self.source)[1] for row in columns]
        return [self._prompt(*parts) for parts in zip(shown, self._tokenise(shown), others, strict=True)]

    def place(self, number: int) -> str:
        """File and line of a usable prompt."""
        return self._rows.place(self._usable[number])

    def _prompt(self, shown: _Shown, tokens: list[int], columns: dict[str, Any]) -> Prompt:
        text = shown.text
        if len(tokens) > self._prompt_length:
            tokens = tokens[-self._prompt_length :]
            text = self._tokenizer.decode(tokens, skip_special_tokens=False)
        messages, variables, further = (
            json.dumps(part, ensure_ascii=False) for part in (shown.messages, shown.variables, columns)
        )
        return Prompt(
            token_ids=tokens,
            text=text,
            messages_json=messages if shown.messages else "",
            columns_json=further,
            template_json=variables if shown.variables else "",
        )

    def _check(self, progress: Progress | None) -> array[int]:
        """Row numbers of the usable prompts; every row is checked once."""
        usable, long = array("q"), array("q")
        for start in range(0, self.num_rows, _BATCH):
            if progress:
                progress(start, self.num_rows)
            rows = range(start, min(start + _BATCH, self.num_rows))
            shown = self._shown(rows, self._rows.rows(rows))
            too_long = self._too_long(rows, shown)
            long.extend(sorted(too_long))
            for row, prompt in zip(rows, shown, strict=True):
                if row not in too_long:
                    usable.append(row)
                    self.hashes.append(hash(prompt.text))
        if long and self._on_long_prompt == "error":
            raise self._long_prompts(long)
        if not usable:
            raise InputError(self.key, f"every prompt in {self._files} is too long", "Raise algorithm.prompt_length")
        return usable

    def _too_long(self, rows: Sequence[int], shown: Sequence[_Shown]) -> set[int]:
        self.num_continued += sum(bool(final_answer(prompt.messages)) for prompt in shown)
        self.num_like_messages += sum(not p.messages and bool(_LIKE_MESSAGES.match(p.text)) for p in shown)
        for prompt in shown:
            self.left_out_roles.update(_left_out_roles(prompt))
        if self._on_long_prompt == "truncate":
            return set()
        unsure = [i for i, prompt in enumerate(shown) if len(prompt.text.encode()) > self._surely_short_bytes]
        tokens = self._tokenise([shown[i] for i in unsure])
        return {rows[i] for i, ids in zip(unsure, tokens, strict=True) if len(ids) > self._prompt_length}

    def _long_prompts(self, long: array[int]) -> InputError:
        first = [long[0]]
        shown = self._shown(first, self._rows.rows(first))
        size, unit = len(self._tokenise(shown)[0]), "tokens"
        if (num_chars := len(shown[0].text)) > self._most_chars:
            size, unit = num_chars, "characters"
        rule = (
            f"{len(long)} of {self.num_rows} prompts are longer than algorithm.prompt_length: {self._prompt_length} "
            f"tokens, the first in {self._rows.place(long[0])} with {size} {unit}"
        )
        return InputError(self.key, rule, "Raise algorithm.prompt_length, or set data.on_long_prompt: skip or truncate")

    def _shown(self, rows: Sequence[int], columns: Sequence[dict[str, Any]]) -> list[_Shown]:
        """The prompts of these rows as the policy sees them."""
        shown = []
        for row, values in zip(rows, columns, strict=True):
            value = values.get(self.source.prompt_column)
            try:
                shown.append(self._shown_text(value) if isinstance(value, str) else self._shown_chat(value, values))
            except ValueError as error:
                fix = "A prompt is text, or a list of messages, each with a role and a content of text"
                raise InputError(self.key, f"{self._rows.place(row)}: {error}", fix) from error
        return shown

    def _shown_text(self, value: str) -> _Shown:
        if not value:
            raise ValueError("the prompt is empty")
        self._check_kind(value, is_text=True)
        source = self.source
        if source.environment.descriptions or source.chat_template_kwargs:
            key = source.key("chat_template_kwargs")
            if source.environment.descriptions:
                key = f"{source.key('environment')}.{'mcp' if source.environment.mcp.used else 'tools'}"
            raise InputError(
                key,
                f"{self._files} holds prompts as text, and only chat messages get a chat template, which reads it",
                "Give prompts as chat messages, or leave it out",
            )
        return _Shown(value)

    def _shown_chat(self, value: Any, columns: dict[str, Any]) -> _Shown:
        if not isinstance(value, list):
            raise ValueError(f"the prompt is neither text nor a list of messages, but {in_yaml(value):.80}")
        if not value:
            raise ValueError("the list of messages is empty")
        self._check_kind(value, is_text=False)
        if not self._tokenizer.chat_template:
            raise InputError(
                self.key,
                f"{self._files} holds chat messages, and the tokenizer in model.path has no chat template",
                "Give prompts as text, or add chat_template to the model's tokenizer_config.json",
            )
        messages, variables = read_messages(value), template_variables(columns, self.source)
        if messages[-1]["role"] == "assistant":
            if self._on_assistant_end == "error":
                raise ValueError("the last message is the assistant's, and data.on_assistant_end is error")
            if not final_answer(messages) or messages[-1].get("tool_calls"):
                raise ValueError(
                    "the last message is the assistant's, and the policy cannot continue it: it has calls or no text"
                )
        return _Shown(render_chat(self._tokenizer, messages, variables), messages, variables)

    def _check_kind(self, value: Any, *, is_text: bool) -> None:
        """A file is tokenised in one way: a template writes its own special tokens, text gets the tokenizer's."""
        self._is_text = is_text if self._is_text is None else self._is_text
        if is_text != self._is_text:
            here, first = ("text", "messages") if is_text else ("messages", "text")
            raise ValueError(f"the prompt is {here}, and the file's first one is {first}: {in_yaml(value):.80}")

    def _tokenise(self, shown: Sequence[_Shown]) -> list[list[int]]:
        """A template writes its own special tokens; plain text gets those that the tokenizer puts around a text.

        Of a text that is longer than prompt_length for sure, the end alone is tokenised.
        """
        if not shown:
            return []
        encoded = self._tokenizer(
            [prompt.text[-self._most_chars :] for prompt in shown],
            add_special_tokens=not shown[0].messages,
            return_attention_mask=False,
            verbose=False,
        )
        return list(encoded["input_ids"])


def _left_out_roles(prompt: _Shown) -> set[str]:
    """The roles of messages whose text is not in the prompt: the template does not know them."""
    plain = (message for message in prompt.messages if message["role"] not in _REWRITTEN_ROLES)
    return {message["role"] for message in plain if message["content"].strip() not in prompt.text}


def training_prompts(
    config: Config, tokenizer: PreTrainedTokenizerBase, progress: Progress | None = None
) -> list[PromptSet]:
    """The training prompts of each source.

    Raises:
        InputError: They cannot be used, or are too few for a curriculum.
    """
    sets = [
        PromptSet(source.key("prompts"), source.prompts, tokenizer, config, source, progress=progress)
        for source in config.sources
    ]
    if config.data.curriculum != "none":
        _check_lengths(config, sets)
    return sets


def _check_lengths(config: Config, sets: Sequence[PromptSet]) -> None:
    """Refuse a source with fewer prompts than groups in a step: whole passes would end without a result."""
    total = sum(source.weight for source in config.sources)
    for source, prompts in zip(config.sources, sets, strict=True):
        num_groups = math.ceil(config.algorithm.rollout_batch_size * source.weight / total)
        if len(prompts) < num_groups:
            raise InputError(
                prompts.key,
                f"has {len(prompts)} usable prompts, and a step takes {num_groups} groups of them: under "
                f"data.curriculum: {config.data.curriculum} a pass must not end before the results of a step",
                f"Give {num_groups} prompts or more, lower algorithm.rollout_batch_size, or set data.curriculum: none",
            )


def held_out_prompts(
    config: Config, tokenizer: PreTrainedTokenizerBase, progress: Progress | None = None
) -> dict[str, PromptSet]:
    """The prompts of each file of evaluation.prompts, by its name; empty where the run has none."""
    evaluation = config.evaluation
    return {
        name: PromptSet(
            evaluation.key_of(name),
            [path],
            tokenizer,
            config,
            config.source_of(name),
            limit=evaluation.limit,
            progress=progress,
        )
        for name, path in evaluation.files.items()
    }
