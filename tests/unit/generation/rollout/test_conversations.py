"""Conversations token for token, under three chat templates: the prompts of the engine, and the rollout.

The engine is scripted, so that the policy says the test's lines; it keeps every prompt.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
from transformers import PreTrainedTokenizerFast

from gspo.common.config.engines import GenerationConfig
from gspo.common.config.reward import BUILTIN_TOOLS
from gspo.environments.environment import Environment
from gspo.generation.engine import api
from gspo.generation.engine.api import Completion, EngineLike
from gspo.generation.rollout.chat_turns import ChatTurns, ObservationError, PlainTurns
from gspo.generation.rollout.driver import RolloutDriver
from gspo.generation.rollout.episodes import Episodes
from gspo.generation.rollout.in_flight import InFlightRollout
from gspo_proto import rollout_pb2
from gspo_proto.reward_pb2 import EnvironmentFailure, EnvironmentReply, ResetRequest, StepRequest
from gspo_proto.rollout_pb2 import GroupTask, Play, Prompt, Rollout, Sampling
from tests.support.chat_templates import CHATML, IM, THOUGHT, TOKENIZERS, tokenizer_of

# Three turns of the policy: one complete, one cut off after its fourth token, one that ends the game.
TRANSCRIPT = {
    "chatml": f"<|im_start|>user\nGuess<|im_end|>\n<|im_start|>assistant\n{THOUGHT}<|im_end|>\n"
    "<|im_start|>user\n higher <|im_end|>\n<|im_start|>assistant\n24 o<|im_end|>\n"
    "<|im_start|>user\n lower <|im_end|>\n<|im_start|>assistant\n20<|im_end|>",
    "llama3": "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nGuess<|eot_id|>"
    f"<|start_header_id|>assistant<|end_header_id|>\n\n{THOUGHT}<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nhigher<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n24 o<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nlower<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n20<|eot_id|>",
}
TRANSCRIPT["qwen3"] = TRANSCRIPT["chatml"]


@dataclass
class ScriptedEngine:
    """Samples its lines one after the other; a line is cut at the request's limit."""

    tokenizer: PreTrainedTokenizerFast
    lines: list[str]
    prompts: list[list[int]] = field(default_factory=list)
    sampled: list[list[int]] = field(default_factory=list)
    version: int = 3
    hangs: asyncio.Event | None = None

    async def generate(self, request_id: str, prompt_token_ids: list[int], sampling: api.EngineSampling) -> Completion:
        self.prompts.append(prompt_token_ids)
        if self.hangs is not None:
            await self.hangs.wait()
            return Completion([65], [-0.5], [self.version], "aborted")
        line = [*self.tokenizer.encode(self.lines[len(self.sampled)]), self.tokenizer.eos_token_id]
        ids = line[: sampling.max_tokens]
        self.sampled.append(ids)
        logp = [-float(token) for token in ids]
        return Completion(ids, logp, [self.version] * len(ids), "stop" if ids == line else "length")

    async def abort(self, request_id: str) -> None:
        assert self.hangs is not None
        self.hangs.set()


@dataclass
class ScriptedGame(Environment):
    """An environment that has all its answers ready; the state counts the turns."""

    answers: list[EnvironmentReply]
    opening: str = '""'
    actions: list[str] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    tasks: list[Any] = field(default_factory=list)

    async def begin(self, request: ResetRequest, timeout_s: float) -> EnvironmentReply:
        self.tasks.append(json.loads(request.task_json))
        return EnvironmentReply(state_json="0", observation_json=self.opening, version="v1")

    async def step(self, request: StepRequest, timeout_s: float, task_json: str) -> EnvironmentReply:
        self.actions.append(request.action)
        self.calls.append(request.calls_json)
        assert request.version == "v1"
        turn = int(request.state_json)
        reply = EnvironmentReply(state_json=str(turn + 1), version="v1")
        reply.MergeFrom(self.answers[turn])
        return reply


def says(observation: Any, reward: float = 0.0, *, done: bool = False) -> EnvironmentReply:
    return EnvironmentReply(observation_json=json.dumps(observation), reward=reward, done=done)


GUESSING = [says(" higher "), says(" lower ", 0.25), says("right", 0.5, done=True)]


def task_of(tokenizer: PreTrainedTokenizerFast, max_tokens: int = 400, **play: Any) -> GroupTask:
    messages = [{"role": "user", "content": "Guess"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    prompt = Prompt(
        token_ids=tokenizer.encode(text, add_special_tokens=False),
        text=text,
        messages_json=json.dumps(messages),
        columns_json='{"number": 20}',
    )
    limits = {"max_turns": 8, "step_timeout_s": 1.0, "total_timeout_s": 60.0, "prompt_length": 256, **play}
    sampling = Sampling(temperature=1.0, max_tokens=max_tokens)
    return GroupTask(group=7, num_rollouts=1, prompt=prompt, sampling=sampling, environment="game", play=Play(**limits))


def driver_of(engine: ScriptedEngine, game: ScriptedGame) -> RolloutDriver:
    episodes = Episodes(game, engine.tokenizer)
    return RolloutDriver(cast("EngineLike", engine), engine.tokenizer, GenerationConfig(), episodes)


def in_flight_of(task: GroupTask, saved: bytes | None = None) -> InFlightRollout:
    return InFlightRollout(task, 0, "generation-0", saved)


async def finished(driver: RolloutDriver, in_flight: InFlightRollout) -> Rollout:
    rollout = await driver.drive(in_flight)
    assert rollout is not None
    return rollout


async def played(engine: ScriptedEngine, game: ScriptedGame, task: GroupTask) -> Rollout:
    return await finished(driver_of(engine, game), in_flight_of(task))


@pytest.mark.parametrize("name", TOKENIZERS)
async def test_the_turns_add_up_to_what_the_engine_saw(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    engine = ScriptedEngine(tokenizer, [THOUGHT, "24 or so", "20"])
    game = ScriptedGame(GUESSING)
    # The policy's turn may have as many tokens as the limit without being cut.
    limit = len(tokenizer.encode(THOUGHT)) + 1
    first = await played(engine, ScriptedGame(GUESSING), task_of(tokenizer, turn_tokens=limit))
    assert first.episode.num_cut_turns == 0
    engine = ScriptedEngine(tokenizer, [THOUGHT, "24 or so", "20"])
    driver = driver_of(engine, game)
    task = task_of(tokenizer)
    in_flight = in_flight_of(task)
    task.play.turn_tokens = limit
    original = engine.generate

    async def cut_second(request_id: str, prompt_token_ids: list[int], sampling: api.EngineSampling) -> Completion:
        # As a turn_tokens of 4 does, to this turn alone.
        task.play.turn_tokens = 4 if len(engine.sampled) == 1 else limit
        most = api.EngineSampling(max_tokens=min(sampling.max_tokens, task.play.turn_tokens))
        return await original(request_id, prompt_token_ids, most)

    engine.generate = cut_second  # type: ignore[method-assign]
    rollout = await finished(driver, in_flight)

    tokens = [*rollout.prompt.token_ids, *rollout.token_ids]
    # Each prompt of the engine, followed by its samples, is the beginning of the next prompt.
    for prompt, sampled in zip(engine.prompts, engine.sampled, strict=True):
        assert tokens[: len(prompt) + len(sampled)] == [*prompt, *sampled]
    assert len(tokens) == len(engine.prompts[-1]) + len(engine.sampled[-1])
    assert tokenizer.decode(tokens, skip_special_tokens=False) == TRANSCRIPT[name]

    policy = [token for token, counts in zip(rollout.token_ids, rollout.mask, strict=True) if counts]
    assert policy == [token for turn in engine.sampled for token in turn]
    for token, counts, logp, version in zip(
        rollout.token_ids, rollout.mask, rollout.logp, rollout.version, strict=True
    ):
        assert (logp, version) == ((-float(token), 3) if counts else (0.0, -1))
    assert (rollout.num_turns, rollout.episode.num_cut_turns, rollout.text) == (3, 1, "20")
    assert (rollout.episode.reward, rollout.state_json, rollout.episode.version) == (0.75, "3", "v1")
    assert rollout.outcome == rollout_pb2.OUTCOME_ENVIRONMENT_DONE
    assert game.actions == [THOUGHT, "24 o", "20"]
    assert game.tasks == [{"prompt": [{"role": "user", "content": "Guess"}], "number": 20}]
    if name == "qwen3":
        # To render the whole conversation anew would have lost what the policy thought.
        turns = [{"role": "user", "content": "Guess"}, *json.loads(rollout.episode.turns_json)]
        assert "half of it?" not in tokenizer.apply_chat_template(turns, tokenize=False)


async def test_a_rollout_goes_on_from_any_save() -> None:
    tokenizer, lines = TOKENIZERS["chatml"], [THOUGHT, "24", "20"]
    whole = await played(ScriptedEngine(tokenizer, lines), ScriptedGame(GUESSING), task_of(tokenizer))
    saves: list[bytes] = []
    engine, game = ScriptedEngine(tokenizer, lines), ScriptedGame(GUESSING)
    first = driver_of(engine, game)
    in_flight = in_flight_of(task_of(tokenizer))
    nothing = api.Tokens([], [], [])
    for asked in (engine, game):
        for name in ("generate",) if asked is engine else ("begin", "step"):
            call = getattr(asked, name)

            async def saved_before(*args: Any, call: Any = call) -> Any:
                saves.append(in_flight.snapshot(nothing, 1).SerializeToString())
                return await call(*args)

            setattr(asked, name, saved_before)
    await first.drive(in_flight)
    assert len(saves) == 7
    for save in saves:
        again = ScriptedEngine(tokenizer, lines)
        state = rollout_pb2.RolloutState.FromString(save)
        again.sampled = [[]] * (state.num_turns - (not state.turn_ended))
        driver = driver_of(again, ScriptedGame(GUESSING))
        rollout = await finished(driver, in_flight_of(task_of(tokenizer), save))
        for there in (rollout, whole):
            there.started_unix_s = there.finished_unix_s = 0.0
        assert rollout == whole


@pytest.mark.parametrize(
    ("limit", "outcome", "num_turns"),
    [
        ({"max_turns": 2}, "TURN_LIMIT", 2),
        ({"turn_tokens": 2, "end_long_turns": True}, "TURN_TOKEN_LIMIT", 1),
        ({"max_tokens": 2}, "TRUNCATED", 1),  # within the policy's turn
        ({"max_tokens": 10}, "TRUNCATED", 1),  # the observation would be too long
        ({"total_timeout_s": 1e-6}, "TIME_LIMIT", 1),
    ],
)
async def test_each_limit_is_an_outcome_with_a_score(limit: dict[str, Any], outcome: str, num_turns: int) -> None:
    tokenizer = TOKENIZERS["chatml"]
    game = ScriptedGame([says("higher", 0.125), says("higher", 0.25), says("higher")])
    rollout = await played(ScriptedEngine(tokenizer, ["16", "24", "20"]), game, task_of(tokenizer, **limit))
    assert rollout_pb2.Outcome.Name(rollout.outcome) == f"OUTCOME_{outcome}"
    assert rollout.num_turns == num_turns
    assert not rollout.episode.failure_kind
    assert len(rollout.token_ids) <= limit.get("max_tokens", 400)
    assert rollout.episode.reward == {2: 0.375, 1: 0.125 if limit.get("max_tokens") == 10 else 0.0}[num_turns]


async def test_time_that_is_over_while_it_samples_keeps_what_was_sampled() -> None:
    tokenizer = TOKENIZERS["chatml"]
    engine = ScriptedEngine(tokenizer, [], hangs=asyncio.Event())
    rollout = await played(engine, ScriptedGame(GUESSING), task_of(tokenizer, total_timeout_s=0.05))
    assert rollout.outcome == rollout_pb2.OUTCOME_TIME_LIMIT
    assert (list(rollout.token_ids), rollout.text) == ([65], tokenizer.decode([65]))


@pytest.mark.parametrize(
    ("kind", "outcome"), [("timeout", "STEP_TIME_LIMIT"), ("exception", "ENVIRONMENT_FAILED"), ("crash", None)]
)
async def test_a_failed_step_is_in_the_rollout_with_its_kind(kind: str, outcome: str | None) -> None:
    tokenizer = TOKENIZERS["chatml"]
    failed = EnvironmentReply(failure=EnvironmentFailure(kind=kind, text="what was wrong"))
    rollout = await played(ScriptedEngine(tokenizer, ["16"]), ScriptedGame([failed]), task_of(tokenizer))
    assert (rollout.episode.failure_kind, rollout.episode.failure) == (kind, "what was wrong")
    assert rollout_pb2.Outcome.Name(rollout.outcome) == f"OUTCOME_{outcome or 'ENVIRONMENT_FAILED'}"
    assert rollout.text == "16"


async def test_what_reset_says_stands_in_the_prompt() -> None:
    tokenizer = TOKENIZERS["chatml"]
    game = ScriptedGame([says("", 1.0, done=True)], opening='"It is even."')
    rollout = await played(ScriptedEngine(tokenizer, ["16"]), game, task_of(tokenizer))
    text = "<|im_start|>user\nGuess<|im_end|>\n<|im_start|>user\nIt is even.<|im_end|>\n<|im_start|>assistant\n"
    assert rollout.prompt.text == text == tokenizer.decode(rollout.prompt.token_ids)
    assert rollout.mask == b"\x01" * 3
    long = await played(ScriptedEngine(tokenizer, ["16"]), game, task_of(tokenizer, prompt_length=40))
    assert "at most 40 are allowed" in long.episode.failure


async def test_observations_get_the_variables_of_the_prompts_template() -> None:
    thinks_not = "{% if enable_thinking is defined and not enable_thinking %}{{ '<think></think>' }}{% endif %}"
    tokenizer = tokenizer_of(CHATML.replace("assistant\n' }}", "assistant\n' }}" + thinks_not), IM, "<|im_end|>")
    task = task_of(tokenizer)
    task.prompt.template_json = '{"enable_thinking": false}'
    parts = [{"type": "text", "text": "It is"}, {"type": "text", "text": "even."}]
    game = ScriptedGame(
        [says([{"role": "user", "content": parts}]), says("", done=True)],
        opening=json.dumps([{"role": "user", "content": parts}]),
    )
    rollout = await played(ScriptedEngine(tokenizer, ["16", "20"]), game, task)
    asked = "<|im_start|>user\nIt is\neven.<|im_end|>\n<|im_start|>assistant\n<think></think>"
    assert rollout.prompt.text == f"<|im_start|>user\nGuess<|im_end|>\n{asked}"
    assert tokenizer.decode(rollout.token_ids) == f"16<|im_end|>\n{asked}20<|im_end|>"


async def test_text_prompts_get_observations_as_they_are() -> None:
    tokenizer = TOKENIZERS["chatml"]
    task = task_of(tokenizer)
    task.prompt.CopyFrom(Prompt(token_ids=tokenizer.encode("Guess:"), text="Guess:"))
    task.play.turn_tokens = 2
    rollout = await played(
        ScriptedEngine(tokenizer, ["16 or", "20"]), ScriptedGame([says(" no\n"), says("", 1, done=True)]), task
    )
    assert tokenizer.decode(rollout.token_ids) == "16 no\n20"
    assert rollout.mask == b"\x01\x01\x00\x00\x00\x00\x01\x01"
    with pytest.raises(ObservationError, match="is chat messages"):
        PlainTurns(tokenizer).between([{"role": "user", "content": "no"}], "user", None)


def test_a_template_that_hides_answers_is_refused() -> None:
    hides = tokenizer_of("{% for m in messages %}{{ m['role'] }}{% endfor %}", IM, "<|im_end|>")
    with pytest.raises(ObservationError, match="does not show answers"):
        ChatTurns(hides).between("a", "user", None)
    raises = tokenizer_of("{{ raise_exception('no tools') }}", IM, "<|im_end|>")
    with pytest.raises(ObservationError, match="no tools"):
        ChatTurns(raises).between("a", "tool", None)


CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "2*3"}}\n</tool_call>'
XML = "<tool_call>\n<function=calculator>\n<parameter=expression>\n2*3\n</parameter>\n</function>\n</tool_call>"


@pytest.mark.parametrize(("form", "call"), [("hermes", CALL), ("qwen3_coder", XML)])
async def test_tool_calls_reach_the_environment_and_bad_ones_are_answered(form: str, call: str) -> None:
    tokenizer = TOKENIZERS["qwen3"]
    lines = ["<tool_call>\nthe product", call.replace("calculator", "abacus"), f"<think>{call}</think>So: {call}", "6"]
    tool_says = [{"role": "tool", "name": "calculator", "content": "6"}]
    game = ScriptedGame([says(tool_says), says("", done=True)])
    tools = json.dumps([BUILTIN_TOOLS["calculator"]])
    engine = ScriptedEngine(tokenizer, lines)
    rollout = await played(engine, game, task_of(tokenizer, max_tokens=1500, tools_json=tools, tool_format=form))
    assert [json.loads(calls) for calls in game.calls] == [
        [{"name": "calculator", "arguments": {"expression": "2*3"}}],
        [],
    ]
    assert (rollout.episode.num_malformed, rollout.episode.num_tool_calls, rollout.num_turns) == (2, 1, 4)
    turns = json.loads(rollout.episode.turns_json)
    assert [turn["role"] for turn in turns] == ["assistant", "tool"] * 3 + ["assistant"]
    assert "cannot be read; write <tool_call>" in turns[1]["content"]
    assert "names 'abacus', which is not a tool; there are calculator" in turns[3]["content"]
    ending = "<|im_start|>user\n<tool_response>\n6\n</tool_response><|im_end|>\n<|im_start|>assistant\n6<|im_end|>"
    assert tokenizer.decode(rollout.token_ids, skip_special_tokens=False).endswith(ending)


async def test_a_restart_begins_the_conversation_anew() -> None:
    tokenizer = TOKENIZERS["chatml"]
    game = ScriptedGame([says("no"), says("", done=True)])
    driver = driver_of(ScriptedEngine(tokenizer, ["16", "20"]), game)
    rollout = in_flight_of(task_of(tokenizer))
    await driver._episodes.reset(rollout)
    rollout.on_sampled(Completion([65], [-1.0], [3], "length"))
    rollout.restart()
    message = await finished(driver, rollout)
    assert (len(game.tasks), message.num_turns) == (2, 2)
