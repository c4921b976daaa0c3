"""Chat messages in the forms in which OpenAI's API, TRL and transformers have them, as the form that templates take.

Data files, environments and the run itself render conversations by this module; the gateway's clients get the same
from vLLM.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from gspo.common.errors import in_yaml

Message = dict[str, Any]
# Arguments of transformers' apply_chat_template that are no variables of a template; tools have a column of their own.
RESERVED_VARIABLES = frozenset(
    {"conversation", "messages", "chat_template", "add_generation_prompt", "continue_final_message", "tokenize"}
    | {"padding", "truncation", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask"}
    | {"tokenizer_kwargs", "tools"}
)

# Words in the types of parts: image_url and input_image of OpenAI's APIs, image and document of Anthropic's.
_MEDIA = ("image", "audio", "video", "file", "document")


class MessageError(ValueError):
    """Messages that cannot be shown to the policy; the text says which, and why."""


class ChatTokenizer(Protocol):
    """A tokenizer of transformers, for its chat template."""

    def apply_chat_template(self, conversation: Any, **variables: Any) -> Any:
        """The conversation as text."""


def read_messages(values: Sequence[Any]) -> list[Message]:
    """Messages with a content of text, and calls whose arguments are an object.

    Args:
        values: Each has `role` and `content`: text, a list of text parts, or null beside calls. The arguments of a
            call may be the JSON text of an object, as in OpenAI's API.

    Raises:
        MessageError: One has another form.
    """
    return [_read_message(number, value) for number, value in enumerate(values, start=1)]


def is_media(kind: Any) -> bool:
    """Whether the type of a part of a message says that it has an image, sound, a film or a file."""
    return isinstance(kind, str) and any(word in kind for word in _MEDIA)


def is_observation(value: Any) -> bool:
    """Whether an environment may show it to the policy: text, or a list of chat messages."""
    if not isinstance(value, list):
        return isinstance(value, str)
    try:
        read_messages(value)
    except MessageError:
        return False
    return True


def final_answer(messages: Sequence[Message]) -> str:
    """The text of a last message of the assistant, which the policy continues; empty without one."""
    return str(messages[-1]["content"]) if messages and messages[-1]["role"] == "assistant" else ""


def render_chat(
    tokenizer: ChatTokenizer, messages: Sequence[Message], variables: Mapping[str, Any] | None = None
) -> str:
    """The text of a conversation up to where the policy's answer begins.

    A last message of the assistant is continued: its turn stays open, as TRL has it.

    Args:
        messages: As `read_messages` returns them.
        variables: The template's, such as `tools`.

    Raises:
        MessageError: The template refuses them.
    """
    from jinja2 import TemplateError  # here: the checks of data without messages need no templates

    continues = bool(final_answer(messages))
    try:
        text = tokenizer.apply_chat_template(
            list(messages),
            tokenize=False,
            add_generation_prompt=not continues,
            continue_final_message=continues,
            **(variables or {}),
        )
    except (TemplateError, TypeError, ValueError, KeyError) as error:
        raise MessageError(f"the model's chat template refuses the messages ({error})") from error
    return str(text)


def _read_message(number: int, value: Any) -> Message:
    if not isinstance(value, Mapping) or not isinstance(value.get("role"), str):
        raise MessageError(f"message {number} has no role that is text: {in_yaml(value):.80}")
    message = {name: part for name, part in value.items() if part is not None}
    calls = message.pop("tool_calls", None) or []
    if not isinstance(calls, list):
        raise MessageError(f"the tool_calls of message {number} are not a list: {in_yaml(calls):.80}")
    if "content" not in message and calls:
        message["content"] = ""
    message["content"] = _text(number, message.get("content"))
    return message | ({"tool_calls": [_read_call(number, call) for call in calls]} if calls else {})


def _text(number: int, content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise MessageError(f"message {number} has no content that is text: {in_yaml(content):.80}")
    # Joined as vLLM joins them.
    return "\n".join(_text_part(number, part) for part in content)


def _text_part(number: int, part: Any) -> str:
    text = part.get("text") if isinstance(part, Mapping) else part
    if not isinstance(text, str):
        kind = part.get("type", part) if isinstance(part, Mapping) else part
        rule = f"the content of message {number} has a part that is not text: {in_yaml(kind):.80}"
        raise MessageError(f"{rule}, and the policy reads text alone" if is_media(kind) else rule)
    return text


def _read_call(number: int, call: Any) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise MessageError(f"a tool call of message {number} has no function with a name: {in_yaml(call):.80}")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(arguments, Mapping):
        problem = f"the arguments of the call '{function['name']}' in message {number} are not a JSON object"
        raise MessageError(f"{problem}: {in_yaml(function['arguments']):.80}")
    ids = {"id": call["id"]} if call.get("id") is not None else {}
    return {**ids, "type": "function", "function": {"name": function["name"], "arguments": dict(arguments)}}
