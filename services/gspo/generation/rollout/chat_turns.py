"""The tokens between two turns of the policy: an observation in the form of the chat template.

Token in, token out: the policy's own text is neither rendered nor tokenised, so no template can drop or trim it. An
observation is rendered behind a fixed example conversation.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from gspo.common.chat_messages import Message, MessageError, read_messages, render_chat
from gspo.common.model.answer_place import ANSWER, tokens_behind_answer
from gspo_proto.rollout_pb2 import Prompt

# A call as the chat template would show it in an answer, and what then says its format, by vLLM's names.
_EXAMPLE_TOOL = "example_tool"
_EXAMPLE_CALL: Message = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": {"name": _EXAMPLE_TOOL, "arguments": {"a": 1}}}],
}
_CALL_FORMATS = {"hermes": re.compile(r"<tool_call>\s*\{"), "qwen3_coder": re.compile(r"<function=")}
_BEFORE: list[Message] = [{"role": "user", "content": "a"}, ANSWER]


class ObservationError(Exception):
    """An observation that cannot be shown to the policy; the message completes 'the observation ...'."""


class ChatTurns:
    """Renders observations by one tokenizer's chat template.

    Args:
        tools: Descriptions that the template puts into every prompt.
        variables: The template's, which the prompt has beside them.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        tools: Sequence[dict[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
    ) -> None:
        self._tokenizer, self._tools = tokenizer, list(tools)
        self._variables = {**(variables or {}), **({"tools": self._tools} if self._tools else {})}

    def opening(self, prompt: Prompt, observation: Any) -> Prompt:
        """The prompt, followed by the first observation of `reset`.

        Raises:
            ObservationError: The template does not take it.
        """
        messages = [*json.loads(prompt.messages_json), *as_messages(observation, "user")]
        text = self._render(messages)
        opening = Prompt(text=text, messages_json=json.dumps(messages, ensure_ascii=False))
        opening.token_ids.extend(self._tokenizer.encode(text, add_special_tokens=False))
        opening.columns_json, opening.template_json = prompt.columns_json, prompt.template_json
        return opening

    def between(self, observation: Any, role: str, last_token_id: int | None) -> list[int]:
        """The tokens from the end of the policy's turn to where its next one begins.

        Args:
            observation: Text, which becomes a message of `role`, or messages.
            last_token_id: The last token of the policy's turn. If it is the template's own end of a turn, that is not
                repeated.

        Raises:
            ObservationError: The template does not take it.
        """
        text = self._render([*_BEFORE, *as_messages(observation, role)])
        token_ids = tokens_behind_answer(self._tokenizer, text, last_token_id)
        if token_ids is None:
            raise ObservationError("cannot be placed: the chat template does not show answers unchanged")
        return token_ids

    def hidden_tools(self) -> list[str]:
        """Names of the tools that the template does not describe in a prompt.

        Raises:
            ObservationError: The template does not take them.
        """
        text = self._render(_BEFORE[:1])
        return [name for tool in self._tools if (name := str(tool["function"]["name"])) not in text]

    def call_format(self) -> str | None:
        """The format in which the template shows calls: empty for an unknown one, None where it shows no call."""
        try:
            text = self._render([*_BEFORE[:1], _EXAMPLE_CALL])
        except ObservationError:
            return None
        formats = [name for name, form in _CALL_FORMATS.items() if form.search(text)]
        return (formats or [""])[0] if _EXAMPLE_TOOL in text else None

    def _render(self, messages: list[Message]) -> str:
        try:
            return render_chat(self._tokenizer, messages, self._variables)
        except MessageError as error:
            raise ObservationError(f"cannot be shown: {error}") from error


class PlainTurns:
    """Observations behind prompts that are plain text: their text, as it is."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer

    def opening(self, prompt: Prompt, observation: Any) -> Prompt:
        """The prompt, followed by the first observation of `reset`.

        Raises:
            ObservationError: It is messages.
        """
        token_ids = [*prompt.token_ids, *self.between(observation, "user", None)]
        return Prompt(token_ids=token_ids, text=f"{prompt.text}{observation}", columns_json=prompt.columns_json)

    def between(self, observation: Any, role: str, last_token_id: int | None) -> list[int]:  # noqa: ARG002 - as above
        """The observation's tokens.

        Raises:
            ObservationError: It is messages.
        """
        if not isinstance(observation, str):
            raise ObservationError("is chat messages, and the prompts of this run are plain text")
        return list(self._tokenizer.encode(observation, add_special_tokens=False))


def as_messages(observation: Any, role: str) -> list[Message]:
    """An observation as chat messages: text is one message of `role`."""
    return [{"role": role, "content": observation}] if isinstance(observation, str) else read_messages(observation)
