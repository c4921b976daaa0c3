"""The record of one request of an agent: what it continues, and its tokens, which are saved before they are sent."""

import asyncio
import json
import time
import uuid
from collections.abc import Awaitable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.exceptions import VLLMValidationError
from vllm.parser.abstract_parser import Parser
from vllm.sampling_params import SamplingParams
from vllm.tokenizers import TokenizerLike

from gspo.common.config.schema import Config
from gspo.common.streams.entries import SAMPLED
from gspo.common.telemetry import metrics
from gspo.gateway.sessions.session_store import RolloutTooLargeError, Session, SessionLostError, SessionStore
from gspo.gateway.sessions.turns import Conversation, Message, RecordedTurn, message_digest, stored_message
from gspo_proto.agent_pb2 import TurnBegin, TurnEnd, TurnEntry, TurnTokens
from gspo_proto.generation_pb2 import SampledTokens

# Below this vLLM takes the likeliest token.
_LEAST_TEMPERATURE = 1e-5
# How often it is seen whether requests side by side have freed tokens.
_LOOK_EVERY_S = 0.1
T = TypeVar("T")


@dataclass
class Recorder:
    """Records one request of a session.

    Attributes:
        parser: Reads calls and thoughts in the text, for the client's message (whole_parser). None keeps text.
        begin: What the request continues; None before it is rendered.
        template: What the chat template gets beside the messages, such as tools.
        has_calls: Whether the answer may have calls; the client may refuse them.
    """

    session: Session
    store: SessionStore
    config: Config
    tokenizer: TokenizerLike
    parser: type[Parser] | None
    begin: TurnBegin | None = None
    template: dict[str, Any] = field(default_factory=dict)
    has_calls: bool = True
    _turn: str = field(default_factory=lambda: uuid.uuid4().hex)
    _prompt: list[int] = field(default_factory=list)
    _token_ids: list[int] = field(default_factory=list)
    _num_entries: int = 0  # of the turn, so far
    _num_behind: int = 0  # tokens of the branch behind its first context, with the new context
    _num_added: int = 0  # tokens that the context adds to the rollout
    _holds: bool = False  # tokens of the rollout, from `started` to the end of the request

    @property
    def keeps_sets(self) -> bool:
        """Whether its rollout needs the tokens that top_k, top_p and min_p kept at each place."""
        return self.session.task.sampling.keep_sets

    async def conversation(self) -> Conversation:
        """The rollout's turns so far."""
        return Conversation(await self.store.turns(self.session.name))

    def continues(
        self,
        conversation: Conversation,
        turn: RecordedTurn | None,
        context: Sequence[int],
        asked: str,
        messages: Sequence[Message],
    ) -> list[int]:
        """Note what the request continues; returns the tokens of its prompt.

        Args:
            conversation: The one that `turn` is of.
            context: The tokens behind those of `turn`, or all of a new branch.
            asked: Digest of all messages.
            messages: The new ones.

        Raises:
            VLLMValidationError: The context of the first branch is longer than a prompt may be.
        """
        longest = self.config.algorithm.prompt_length
        if turn is None and len(context) > longest:
            raise VLLMValidationError(
                f"the request has {len(context)} tokens, and a branch of a rollout begins with at most {longest} "
                "(algorithm.prompt_length of the run). Shorten it, or raise that key",
                parameter="messages",
            )
        # If another request continues the turn too, the tokens up to it are in two branches.
        is_second = conversation.is_continued(turn)
        if is_second or (turn is None and conversation.turns):
            metrics.AGENT_BRANCHES.inc()
        before = turn.all_token_ids if turn else []
        first = len(turn.line[0].begin.context) if turn else len(context)
        self._num_behind = len(before) + len(context) - first
        self._num_added = len(context) + (len(before) if is_second else 0)
        self.begin = TurnBegin(
            continues=turn.name if turn else "",
            context=context,
            asked=asked,
            messages_json=json.dumps([*map(stored_message, messages)], ensure_ascii=False, default=str),
            unix_s=time.time(),
        )
        self._prompt = [*before, *context]
        return self._prompt

    async def started(self, params: SamplingParams) -> SamplingParams:
        """Write the beginning of the turn; returns the sampling of the run in place of the client's.

        Raises:
            VLLMValidationError: The rollout has used up its tokens or bytes, or has ended; or the client's sampling
                cannot be trained on (agent.sampling: client).
        """
        if self.begin is None:
            raise VLLMValidationError("an agent's key is for requests of one text or chat", parameter="prompt")
        is_client = self.config.agent.sampling == "client" and not self.session.task.evaluation
        if is_client:
            await self._check_sampling(params)
        sampling = self.session.task.sampling
        algorithm, num_free = self.config.algorithm, sampling.max_tokens - self._num_behind
        most = min(params.max_tokens or num_free, self.config.agent.answer_tokens or num_free, num_free)
        granted = await self._reserve(most) if most > 0 else 0
        if not granted:
            limit = f"the rollout has used its {algorithm.longest_rollout} tokens (algorithm.rollout_length of the run)"
            if num_free < 1:
                limit = f"the conversation has {sampling.max_tokens} tokens (algorithm.response_length of the run)"
            raise VLLMValidationError(f"{limit}. Finish the task", parameter="messages")
        await self._append(begin=self.begin)
        params = params.clone()
        params.seed, params.max_tokens = None, granted  # with one seed a group's rollouts would be the same
        if not is_client:
            params.temperature, params.top_p, params.min_p = sampling.temperature, sampling.top_p, sampling.min_p
            params.top_k = sampling.top_k
        return params

    async def _check_sampling(self, params: SamplingParams) -> None:
        """Refuse a client's sampling that is not of the policy's whole distribution at one temperature."""
        for name, off in (("top_p", (1.0,)), ("top_k", (0, -1)), ("min_p", (0.0,))):
            if getattr(params, name) not in off:
                raise VLLMValidationError(
                    f"{name} cuts the distribution, and the rollout's log-probs are of the whole one. Leave it out",
                    parameter=name,
                )
        if params.temperature < _LEAST_TEMPERATURE:
            raise VLLMValidationError(
                "temperature 0 samples nothing that can be trained on. Set one above 0, or agent.sampling: run, under "
                "which the run's temperature is used",
                parameter="temperature",
            )
        if not await self._written(self.store.agree(self.session.key, params.temperature)):
            raise VLLMValidationError(
                f"temperature {params.temperature:g} is not that of the rollout's first request, and it has one. "
                "Set the same in every request of a task",
                parameter="temperature",
            )

    async def add(self, piece: SampledTokens) -> None:
        """Save tokens.

        Raises:
            VLLMValidationError: The rollout has used up its bytes, or has ended.
        """
        self._token_ids += piece.token_ids
        await self._append(tokens=TurnTokens(**{name: getattr(piece, name) for name in SAMPLED}))

    async def end(self, finish: str, stop: str, *, skip_special_tokens: bool) -> None:
        """Save the end of the answer, with the message that the client is sent.

        Args:
            finish: stop, stop_string or length.
            skip_special_tokens: Whether that message leaves them out.

        Raises:
            VLLMValidationError: The rollout has ended.
        """
        # vLLM shows no end token, also where it shows other special tokens.
        shown_ids = self._token_ids[:-1] if finish == "stop" else self._token_ids
        text = self.tokenizer.decode(shown_ids, skip_special_tokens=skip_special_tokens)
        text = text.rpartition(stop)[0] if stop else text
        message, thoughts = self._message(text)
        shown = [shown.strip() for shown in (thoughts, message["content"]) if shown.strip()]
        replies = {message_digest(message), message_digest({"role": "assistant", "content": text})}
        message_json = json.dumps(message, ensure_ascii=False)
        end = TurnEnd(finish=finish, stop=stop, replies=sorted(replies), shown=shown, message_json=message_json)
        await self._append(end=end)
        await self._settle(self._num_added + len(self._token_ids))

    async def close(self) -> None:
        """Free the tokens that the request holds: unless its answer has ended, the rollout does not have them."""
        with suppress(VLLMValidationError):  # the rollout has ended
            await self._settle(0)

    async def _reserve(self, most: int) -> int:
        """Hold tokens for the answer, and wait while requests side by side hold all that are left; 0: none are left."""
        deadline_s = time.monotonic() + self.config.gateway.request_timeout_s
        while time.monotonic() < deadline_s:
            granted = await self._written(self.store.reserve(self.session.key, self._turn, self._num_added, most))
            if granted is not None:
                self._holds = bool(granted)
                return int(granted)
            await asyncio.sleep(_LOOK_EVERY_S)
        return 0

    async def _settle(self, used_tokens: int) -> None:
        if self._holds:
            self._holds = False
            await self._written(self.store.settle(self.session.key, self._turn, used_tokens))

    def _message(self, text: str) -> tuple[Message, str]:
        """The assistant's message of a text, and its thoughts."""
        plain: Message = {"role": "assistant", "content": text}
        if self.parser is None:
            return plain, ""
        tools = (self.template.get("tools") or None) if self.has_calls else None
        request = ChatCompletionRequest(messages=[{"role": "user", "content": ""}], model="", tools=tools)
        parser = self.parser(self.tokenizer, request.tools, chat_template_kwargs=self.template)
        parser.set_prompt_token_ids(self._prompt)
        thoughts, content, calls = parser.parse(
            text, request, enable_auto_tools=bool(tools), model_output_token_ids=self._token_ids
        )
        message: Message = {"role": "assistant", "content": content or ""}
        if calls:
            message["tool_calls"] = [
                {"type": "function", "function": {"name": call.name, "arguments": call.arguments}} for call in calls
            ]
        return message, thoughts or ""

    async def _append(self, **what: Any) -> None:
        number, self._num_entries = self._num_entries, self._num_entries + 1
        await self._written(self.store.append(self.session.key, TurnEntry(turn=self._turn, **what), number))

    async def _written(self, write: Awaitable[T]) -> T:
        try:
            return await write
        except (RolloutTooLargeError, SessionLostError) as error:
            raise VLLMValidationError(str(error)) from error
