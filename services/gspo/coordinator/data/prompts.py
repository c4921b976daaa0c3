"""The prompts of a source, ready for the engine: chat template applied, tokenised, further columns as JSON.

Rows are tokenised on demand. The start reads and checks every row once, in batches, and tokenises only the rows that
may be too long.
"""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gspo.common.config.schema import Config
from gspo.common.config.sources import Source
from gspo.common.data.row_reader import RowReader
from gspo.common.data.row_store import RowStore
from gspo.common.data.task_row import check_names, split_row
from gspo.common.errors import InputError, in_yaml
from gspo_proto.rollout_pb2 import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Progress = Callable[[int, int], None]
_BATCH = 1024
# More than any tokenizer adds around a text: begin, end, a leading space.
_ADDED_TOKENS = 8


class PromptSet:
    """The usable prompts of one or several files.

    Args:
        key: The configuration key that names the files, for messages.
        paths: The files or folders.
        config: Has the longest length of a prompt, and what happens to a longer one.
        source: Names the column of the prompts and the types of columns, and the tools that the chat template describes
            in every prompt.
        limit: Use only the first so many rows; None is all.
        progress: Called during the check with rows done and rows in all.

    Attributes:
        num_rows: Usable and skipped.
        left_out: Columns of bytes that no task has -> "images" or "bytes".

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
        self.key, self._source, self._files = key, source, ", ".join(map(str, paths))
        self._tokenizer, self._tools = tokenizer, list(source.environment.descriptions) or None
        self._prompt_length, self._on_long_prompt = config.algorithm.prompt_length, config.data.on_long_prompt
        reader = RowReader(key, paths, source.types, types_key=source.types_key)
        self._rows = RowStore(islice(reader, limit))
        self.num_rows, self.left_out = len(self._rows), reader.left_out
        check_names(self._rows.names, source, self._files)
        self._is_text: bool | None = None
        # A token stands for at least one byte of the text, unless a normalizer could lengthen the text first.
        backend = getattr(tokenizer, "backend_tokenizer", None)
        bytes_bound_tokens = backend is not None and backend.normalizer is None
        self._surely_short_bytes = self._prompt_length - _ADDED_TOKENS if bytes_bound_tokens else -1
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
        if not rows:
            return []
        values, columns = zip(*(split_row(row, self._source) for row in self._rows.rows(rows)), strict=True)
        texts = self._render(list(values), rows)
        tokens = self._tokenise(texts, list(values))
        return [self._prompt(*parts) for parts in zip(values, texts, tokens, columns, strict=True)]

    def place(self, number: int) -> str:
        """File and line of a usable prompt."""
        return self._rows.place(self._usable[number])

    def texts(self) -> Iterator[str]:
        """The text of every usable prompt, in the file's order; batch by batch."""
        for start in range(0, len(self), _BATCH):
            rows = list(self._usable[start : start + _BATCH])
            yield from self._render(self._values(rows), rows)

    def _values(self, rows: Sequence[int]) -> list[Any]:
        return self._rows.values(self._source.prompt_column, rows)

    def _prompt(self, value: Any, text: str, tokens: list[int], columns: dict[str, Any]) -> Prompt:
        if len(tokens) > self._prompt_length:
            tokens = tokens[-self._prompt_length :]
            text = self._tokenizer.decode(tokens, skip_special_tokens=False)
        messages = "" if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        further = json.dumps(columns, ensure_ascii=False)
        return Prompt(token_ids=tokens, text=text, messages_json=messages, columns_json=further)

    def _check(self, progress: Progress | None) -> array[int]:
        """Row numbers of the usable prompts; every row is checked once."""
        usable, long = array("q"), array("q")
        for start in range(0, self.num_rows, _BATCH):
            if progress:
                progress(start, self.num_rows)
            rows = range(start, min(start + _BATCH, self.num_rows))
            too_long = self._too_long(self._values(rows), rows)
            long.extend(sorted(too_long))
            usable.extend(row for row in rows if row not in too_long)
        if long and self._on_long_prompt == "error":
            raise self._long_prompts(long)
        if not usable:
            raise InputError(self.key, f"every prompt in {self._files} is too long", "Raise algorithm.prompt_length")
        return usable

    def _too_long(self, values: list[Any], rows: Sequence[int]) -> set[int]:
        texts = self._render(values, rows)
        if self._on_long_prompt == "truncate":
            return set()
        unsure = [i for i, text in enumerate(texts) if len(text.encode()) > self._surely_short_bytes]
        tokens = self._tokenise([texts[i] for i in unsure], [values[i] for i in unsure])
        return {rows[i] for i, ids in zip(unsure, tokens, strict=True) if len(ids) > self._prompt_length}

    def _long_prompts(self, long: array[int]) -> InputError:
        values = self._values([long[0]])
        tokens = self._tokenise(self._render(values, [long[0]]), values)[0]
        rule = (
            f"{len(long)} of {self.num_rows} prompts are longer than algorithm.prompt_length: {self._prompt_length} "
            f"tokens, the first in {self._rows.place(long[0])} with {len(tokens)} tokens"
        )
        return InputError(self.key, rule, "Raise algorithm.prompt_length, or set data.on_long_prompt: skip or truncate")

    def _render(self, values: list[Any], rows: Sequence[int]) -> list[str]:
        """The text of each value, given as text or as messages."""
        for value, row in zip(values, rows, strict=True):
            self._check_form(value, row)
        if not isinstance(values[0], str):
            return self._apply_template(values, rows)
        if self._tools:
            raise InputError(
                f"{self._source.environment_key}.{'mcp' if self._source.environment.mcp.used else 'tools'}",
                f"{self._files} holds prompts as text, and only a chat template describes tools to the policy",
                "Give prompts as chat messages, or leave the tools out",
            )
        return values

    def _check_form(self, value: Any, row: int) -> None:
        if isinstance(value, str):
            problem = "the prompt is empty" if not value else ""
        elif not isinstance(value, list):
            problem = f"the prompt is neither text nor a list of messages, but {in_yaml(value):.80}"
        else:
            problem = _message_problem(value)
        # A file is tokenised in one way: a template writes its own special tokens, plain text gets the tokenizer's.
        self._is_text = isinstance(value, str) if self._is_text is None else self._is_text
        if not problem and isinstance(value, str) != self._is_text:
            here, first = ("text", "messages") if isinstance(value, str) else ("messages", "text")
            problem = f"the prompt is {here}, and the file's first one is {first}: {in_yaml(value):.80}"
        if problem:
            fix = "A prompt is text, or a list of messages, each with a role and a content of text"
            raise InputError(self.key, f"{self._rows.place(row)}: {problem}", fix)

    def _apply_template(self, conversations: list[list[dict[str, Any]]], rows: Sequence[int]) -> list[str]:
        from jinja2 import TemplateError

        if not self._tokenizer.chat_template:
            raise InputError(
                self.key,
                f"{self._files} holds chat messages, and the tokenizer in model.path has no chat template",
                "Give prompts as text, or add chat_template to the model's tokenizer_config.json",
            )
        try:
            return list(
                self._tokenizer.apply_chat_template(
                    conversations, tools=self._tools, tokenize=False, add_generation_prompt=True
                )
            )
        except (TemplateError, TypeError, ValueError) as error:
            if len(conversations) > 1:  # find the invalid one
                return [
                    self._apply_template([messages], [row])[0]
                    for messages, row in zip(conversations, rows, strict=True)
                ]
            raise InputError(
                self.key,
                f"{self._rows.place(rows[0])}: the model's chat template refuses the messages ({error})",
                "Change the messages to a form that the template takes, or correct the template",
            ) from error

    def _tokenise(self, texts: list[str], values: list[Any]) -> list[list[int]]:
        """A template writes its own special tokens; plain text gets those that the tokenizer puts around a text."""
        if not texts:
            return []
        plain = isinstance(values[0], str)
        encoded = self._tokenizer(texts, add_special_tokens=plain, return_attention_mask=False, verbose=False)
        return list(encoded["input_ids"])


def training_prompts(
    config: Config, tokenizer: PreTrainedTokenizerBase, progress: Progress | None = None
) -> list[PromptSet]:
    """The training prompts of each source.

    Raises:
        InputError: They cannot be used, or are too few for a curriculum.
    """
    sets = [
        PromptSet(source.prompts_key, source.prompts, tokenizer, config, source, progress=progress)
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


def _message_problem(messages: list[Any]) -> str:
    if not messages:
        return "the list of messages is empty"
    for number, message in enumerate(messages, start=1):
        for name in ("role", "content"):
            if not isinstance(message, dict) or not isinstance(message.get(name), str):
                return f"message {number} has no {name} that is text: {in_yaml(message):.80}"
    return ""
