"""Contexts of agents' requests: the tokens of the turn that a request continues, and the new ones behind them.

vLLM's serving classes render every request anew. Here the text that they render decides what a request continues, and
the stored tokens take its place.
"""

from collections.abc import Sequence
from typing import Any

from vllm.exceptions import VLLMValidationError
from vllm.renderers import BaseRenderer, ChatParams

from gspo.common.model.answer_place import ANSWER, tokens_behind_answer
from gspo.gateway.sessions.recorder import Recorder
from gspo.gateway.sessions.turns import Message, RecordedTurn, prefix_digests


class SessionRenderer:
    """A renderer of vLLM for one request; an agent's gets the tokens of the turns before.

    Args:
        renderer: Renders; everything that is not here is its.
        recorder: Records the request, if it is an agent's.
    """

    def __init__(self, renderer: BaseRenderer, recorder: Recorder | None) -> None:
        self._renderer, self._recorder = renderer, recorder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._renderer, name)

    async def render_chat_async(
        self, conversations: Sequence[list[Any]], chat_params: ChatParams, *args: Any, **keys: Any
    ) -> tuple[list[Any], list[Any]]:
        """As vLLM's; the prompt of an agent's request has the tokens of its session.

        Raises:
            VLLMValidationError: The messages are nested too deeply.
        """
        if (recorder := self._recorder) is not None:
            chat_params = chat_params.with_defaults(recorder.session.variables)
        try:
            rendered, prompts = await self._renderer.render_chat_async(conversations, chat_params, *args, **keys)
        except RecursionError as error:  # of vLLM's reader of a call's arguments
            rule = "the messages are nested too deeply. Shorten them"
            raise VLLMValidationError(rule, parameter="messages") from error
        if recorder is not None:
            for messages, prompt in zip(conversations, prompts, strict=True):
                await self._record_chat(recorder, [_plain(message) for message in messages], chat_params, prompt)
        return rendered, prompts

    async def render_cmpl_async(self, *args: Any, **keys: Any) -> Any:
        """As vLLM's; the prompt of an agent's request has the tokens of its session."""
        prompts = await self._renderer.render_cmpl_async(*args, **keys)
        if self._recorder is not None and len(prompts) == 1:
            await self._record_text(self._recorder, prompts[0])
        return prompts

    async def _record_chat(
        self, recorder: Recorder, messages: list[Message], chat_params: ChatParams, prompt: dict[str, Any]
    ) -> None:
        recorder.template = chat_params.chat_template_kwargs
        digests = prefix_digests(messages, chat_params.chat_template_kwargs)
        token_ids, conversation = list(prompt["prompt_token_ids"]), await recorder.conversation()
        shown = self._renderer.get_tokenizer().decode(token_ids)
        turn, new, context = None, messages, token_ids
        if continued := conversation.continued(messages, digests, shown):
            before, place = continued
            behind = await self._behind(before, messages, place, chat_params)
            if behind is not None:
                turn, new, context = before, messages[place + 1 :], behind
        prompt["prompt_token_ids"] = recorder.continues(conversation, turn, context, digests[-1], new)

    async def _behind(
        self, turn: RecordedTurn, messages: list[Message], place: int, chat_params: ChatParams
    ) -> list[int] | None:
        """The tokens that the template puts behind the reply at a place; None where it does not show the reply."""
        with_answer = [*messages[:place], ANSWER, *messages[place + 1 :]]
        _, prompt = await self._renderer.render_messages_async(with_answer, chat_params)
        text, tokenizer = prompt["prompt"] if isinstance(prompt, dict) else prompt, self._renderer.get_tokenizer()
        if not isinstance(text, str):
            text = tokenizer.decode(text)
        return tokens_behind_answer(tokenizer, text, turn.token_ids[-1] if turn.token_ids else None)

    async def _record_text(self, recorder: Recorder, prompt: dict[str, Any]) -> None:
        token_ids, conversation = list(prompt["prompt_token_ids"]), await recorder.conversation()
        turn = conversation.continued_text(token_ids)
        context = token_ids[len(turn.all_token_ids) if turn else 0 :]
        text = self._renderer.get_tokenizer().decode(context)
        recorder.continues(conversation, turn, context, "", [{"role": "user", "content": text}])


def _plain(message: Any) -> Message:
    """A message as a mapping; vLLM's APIs have some as models."""
    return dict(message.model_dump(exclude_none=True)) if hasattr(message, "model_dump") else dict(message)
