"""Capture against a model: any order of requests, retries, cancelled streams and rewritten histories, on a real Redis.

After each step the rollout has the tokens of the finished requests, each once, behind the tokens that the engine had
before it. Not here: vLLM's APIs (tests/integration/generation/test_agents.py).
"""

from __future__ import annotations

import asyncio
import itertools
import re
import uuid
from collections import Counter
from collections.abc import Awaitable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from redis.asyncio import Redis
from vllm import SamplingParams
from vllm.renderers import ChatParams

from gspo.common.streams.keys import GATEWAY, Keys
from gspo.gateway.sessions.agent_rollout import NO_TURN, agent_rollout
from gspo.gateway.sessions.recorder import Recorder
from gspo.gateway.sessions.session_renderer import SessionRenderer
from gspo.gateway.sessions.session_store import SessionStore
from gspo.gateway.sessions.turns import Conversation, Message
from gspo_proto.agent_pb2 import AgentResult
from gspo_proto.generation_pb2 import SampledTokens
from gspo_proto.rollout_pb2 import GroupTask, Prompt, Sampling
from tests.support.service_process import make_run
from tests.support.tiny_model import make_tokenizer

TOKENIZER = make_tokenizer()
END, BEGIN = TOKENIZER.convert_tokens_to_ids(["<|im_end|>", "<|im_start|>"])
LENGTHS = {"prompt_length": 8192, "response_length": 8192, "rollout_length": 1_000_000}
ASKED: Message = {"role": "user", "content": "Begin."}
WORDS = st.sampled_from(["a", "b", " c", "d ", "the-answer-of-the-policy", "\n"])
OTHER_TEXT = "the engine sees another text than the client sent"
T = TypeVar("T")


class TemplateRenderer:
    """Renders by the tokenizer's chat template, as vLLM's renderer does."""

    def get_tokenizer(self) -> Any:
        """The tokenizer."""
        return TOKENIZER

    async def render_messages_async(self, messages: list[Message], _params: Any) -> tuple[Any, dict[str, Any]]:
        """The text."""
        return messages, {"prompt": rendered(messages)}

    async def render_chat_async(self, conversations: list[list[Message]], _params: Any) -> tuple[Any, list[Any]]:
        """The tokens of each."""
        texts = [rendered(messages) for messages in conversations]
        return conversations, [{"prompt_token_ids": TOKENIZER.encode(text, add_special_tokens=False)} for text in texts]


def rendered(messages: list[Message]) -> str:
    return str(TOKENIZER.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))


def stripped(messages: list[Message]) -> list[Message]:
    return [{**message, "content": message["content"].strip()} for message in messages]


def begins_with(messages: list[Message], history: list[Message]) -> bool:
    return messages[: len(history)] == history


def without_white_space(text: str) -> str:
    """A rendered text without the white space at the ends of its messages."""
    return re.sub(r"(<\|im_start\|>\w+\n)\s*|\s*(<\|im_end\|>\n)", r"\1\2", text)


@dataclass
class Asked:
    """A request, and what the engine samples for it.

    Attributes:
        is_exact: The engine has the white space that the client sent.
    """

    messages: list[Message]
    recorder: Recorder
    context: list[int]
    is_exact: bool
    token_ids: list[int] = field(default_factory=list)
    logp: list[float] = field(default_factory=list)

    @property
    def history(self) -> list[Message]:
        """The messages with the answer, as the policy wrote it."""
        text = TOKENIZER.decode(self.token_ids, skip_special_tokens=True)
        return [*self.messages, {"role": "assistant", "content": text}]


class Agent(RuleBasedStateMachine):
    """An agent that plays one rollout, with requests side by side."""

    url, folder = "", Path()

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.redis = Redis.from_url(self.url, protocol=2)
        agents: dict[str, Any] = {"gateway": {"replicas": 1}, "agent": {"external": True}}
        self.config = make_run(self.folder, self.folder, algorithm=LENGTHS, **agents)
        keys = Keys(f"capture-{uuid.uuid4().hex}")
        self.store = SessionStore(self.redis, keys, 600.0, "gateway1")
        task = GroupTask(group=1, num_rollouts=1, prompt=Prompt(token_ids=[1]), sampling=Sampling(temperature=1.0))
        task.sampling.max_tokens = LENGTHS["response_length"]
        self.run(self.redis.set(keys.instance(GATEWAY, "gateway1"), "{}"))
        self.run(self.redis.hset(keys.open, "1", "{}"))
        self.run(self.store.open(task, 0, LENGTHS["rollout_length"]))
        session = self.run(self.store.lease("worker"))
        assert session is not None
        self.session = session
        self.numbers = itertools.count(1)
        self.sent: list[list[Message]] = []
        self.histories: list[list[Message]] = [[ASKED]]
        self.in_flight: list[Asked] = []
        self.finished: list[Asked] = []
        self.is_plain = True

    def run(self, work: Awaitable[T]) -> T:
        """The result of a coroutine."""
        return self.loop.run_until_complete(work)

    @rule(number=st.integers(0), words=WORDS)
    def ask(self, number: int, words: str) -> None:
        """Go on with one of the histories so far, or with the first question."""
        history = self.histories[number % len(self.histories)]
        is_answered = history[-1]["role"] == "assistant"
        self._send([*history, {"role": "user", "content": words}] if is_answered else history)

    @precondition(lambda self: self.sent)
    @rule(number=st.integers(0))
    def retry(self, number: int) -> None:
        """Send a request again, whether it was answered, cancelled or is in flight."""
        self._send(self.sent[number % len(self.sent)])

    @precondition(lambda self: self.sent)
    @rule(number=st.integers(0), place=st.integers(0), words=WORDS)
    def rewrite(self, number: int, place: int, words: str) -> None:
        """Send a history with another text in one place."""
        messages = list(self.sent[number % len(self.sent)])
        place %= len(messages)
        messages[place] = {**messages[place], "content": words}
        self._send(messages)

    @precondition(lambda self: self.in_flight)
    @rule(number=st.integers(0), text=st.text("xy \n", min_size=1, max_size=3), opens=st.integers(0, 19))
    def sample(self, number: int, text: str, opens: int) -> None:
        """A piece of an answer; one of twenty has the token that begins a message."""
        token_ids = TOKENIZER.encode(text, add_special_tokens=False)
        if not opens:
            token_ids.append(BEGIN)
            self.is_plain = False
        self._add(self.in_flight[number % len(self.in_flight)], token_ids, "")

    @precondition(lambda self: self.in_flight)
    @rule(number=st.integers(0), is_whole=st.booleans(), strips=st.booleans())
    def finish(self, number: int, is_whole: bool, strips: bool) -> None:
        """The end of an answer, by the policy's own token or cut off; clients may strip its text."""
        asked = self.in_flight.pop(number % len(self.in_flight))
        finish = "stop" if is_whole else "length"
        if is_whole or not asked.token_ids:
            self._add(asked, [END] if is_whole else TOKENIZER.encode("z", add_special_tokens=False), finish)
        self.run(asked.recorder.end(finish, "", skip_special_tokens=True))
        self.run(asked.recorder.close())
        self.finished.append(asked)
        *messages, reply = asked.history
        self.histories.append([*messages, *(stripped([reply]) if strips else [reply])])

    @precondition(lambda self: self.in_flight)
    @rule(number=st.integers(0))
    def cancel(self, number: int) -> None:
        """The client hangs up."""
        self.run(self.in_flight.pop(number % len(self.in_flight)).recorder.close())

    @invariant()
    def each_token_of_a_finished_request_is_trained_once_behind_what_the_engine_had(self) -> None:
        """The rollout of the turns so far."""
        turns = Conversation(self.run(self.store.turns(self.session.name)))
        rollout = agent_rollout(self.session, turns, AgentResult(reward=1.0), "worker", LENGTHS["rollout_length"])
        if not self.finished:
            assert rollout.episode.failure_kind == NO_TURN
            return
        lines = {
            logp: [*asked.context, *asked.token_ids[: place + 1]]
            for asked in self.finished
            for place, logp in enumerate(asked.logp)
        }
        trained = [logp for logp, counts in zip(rollout.logp, rollout.mask, strict=True) if counts]
        assert Counter(trained) == Counter(list(lines))
        bounds = [0, *rollout.branch_starts, len(rollout.token_ids)]
        for number, (first, last) in enumerate(pairwise(bounds)):
            before = [] if number else list(rollout.prompt.token_ids)
            branch = [*before, *rollout.token_ids[first:last]]
            for place in range(first, last):
                if rollout.mask[place]:
                    assert branch[: len(before) + place - first + 1] == lines[rollout.logp[place]]
                    assert rollout.version[place] == 5
                else:
                    assert (rollout.logp[place], rollout.version[place]) == (0.0, -1)

    @invariant()
    def what_is_not_in_flight_holds_no_tokens(self) -> None:
        """The rollout's free tokens are those that its finished requests do not have."""
        fields: Any = self.run(self.redis.hgetall(self.store._hash(self.session.name)))
        assert sum(field.startswith(b"reserved:") for field in fields) == len(self.in_flight)

    def teardown(self) -> None:
        """Leave nothing."""
        self.run(self.store.forget([self.session.name]))
        self.run(self.redis.aclose())
        self.loop.close()

    def _send(self, messages: list[Message]) -> None:
        recorder = Recorder(self.session, self.store, self.config, TOKENIZER, None)

        async def started() -> list[int]:
            params = ChatParams(chat_template_kwargs={"tools": None})
            renderer = SessionRenderer(TemplateRenderer(), recorder)
            _, (prompt,) = await renderer.render_chat_async([messages], params)
            await recorder.started(SamplingParams(max_tokens=100))
            return list(prompt["prompt_token_ids"])

        context = self.run(started())
        engine, client = TOKENIZER.decode(context), rendered(messages)
        if self.is_plain:
            assert without_white_space(engine) == without_white_space(client), OTHER_TEXT
            assert engine == client or not self._is_known_exactly(messages), OTHER_TEXT
        self.sent.append(messages)
        self.in_flight.append(Asked(messages, recorder, context, engine == client))

    def _is_known_exactly(self, messages: list[Message]) -> bool:
        """Whether the engine is to have the white space that the client sends: no answer has the text without it alone.

        A request continues the answer with most of its messages. White space may differ: of several, it is one with
        the same white space.
        """
        answers = [asked for asked in self.finished if begins_with(stripped(messages), stripped(asked.history))]
        most = max((len(asked.history) for asked in answers), default=0)
        longest = [asked for asked in answers if len(asked.history) == most]
        return not longest or any(asked.is_exact and begins_with(messages, asked.history) for asked in longest)

    def _add(self, asked: Asked, token_ids: list[int], finish: str) -> None:
        logp = [-next(self.numbers) / 1024 for _ in token_ids]
        version = [5] * len(token_ids)
        self.run(asked.recorder.add(SampledTokens(token_ids=token_ids, logp=logp, version=version, finish=finish)))
        asked.token_ids += token_ids
        asked.logp += logp


@pytest.mark.timeout(600)
def test_the_branches_are_exactly_what_was_sampled(redis_url: str, tmp_path: Path) -> None:
    Agent.url, Agent.folder = redis_url, tmp_path
    few = settings(stateful_step_count=25, suppress_health_check=list(HealthCheck))
    run_state_machine_as_test(Agent, settings=few)


def test_of_answers_that_differ_in_white_space_the_engine_has_the_one_that_the_client_sent(
    redis_url: str, tmp_path: Path
) -> None:
    Agent.url, Agent.folder = redis_url, tmp_path
    agent = Agent()
    try:
        for _ in range(3):
            agent.ask(0, "a")
        agent.finish(2, is_whole=True, strips=False)
        agent.finish(0, is_whole=False, strips=False)
        agent.sample(0, " ", 1)
        agent.finish(0, is_whole=False, strips=False)
        for number, text in enumerate(("", "z", " "), start=1):
            agent.ask(number, "a")
            assert agent.in_flight[-1].messages[1]["content"] == text
            assert agent.in_flight[-1].is_exact
        for _ in range(3):
            agent.finish(0, is_whole=True, strips=False)
        for number in (4, 5, 6):
            agent.ask(number, "a")
            assert agent.in_flight[-1].is_exact
        agent.each_token_of_a_finished_request_is_trained_once_behind_what_the_engine_had()
    finally:
        agent.teardown()
