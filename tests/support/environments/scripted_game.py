"""A policy that says its lines, and the guessing game as a function: what rollouts with servers are compared with."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from importlib import import_module
from typing import Any, cast

from gspo.common.config.engines import GenerationConfig
from gspo.common.config.reward import EnvironmentConfig, RewardConfig
from gspo.common.config.sources import Source
from gspo.environments.environment import Environment
from gspo.environments.server_environment import environments_on_servers
from gspo.generation.engine import api
from gspo.generation.engine.api import Completion, EngineLike
from gspo.generation.rollout.driver import RolloutDriver
from gspo.generation.rollout.episodes import Episodes
from gspo.generation.rollout.in_flight import InFlightRollout
from gspo_proto.reward_pb2 import EnvironmentReply, ResetRequest, StepRequest
from gspo_proto.rollout_pb2 import GroupTask, Play, Prompt, Rollout, Sampling
from tests.support.chat_templates import TOKENIZERS
from tests.support.environments.game_server import GUESS

TOKENIZER = TOKENIZERS["chatml"]
NUMBER = 20
LINES = ("8", "x", "24", "20")


class LinesEngine:
    """Says its lines in each conversation, the next one where the prompt has one more turn."""

    version, is_asleep = 3, False

    def __init__(self, lines: tuple[str, ...] = LINES, turn_s: float = 0.0) -> None:
        self._lines, self._turn_s, self.num_requests = lines, turn_s, 0

    async def generate(self, request_id: str, prompt_token_ids: list[int], sampling: api.EngineSampling) -> Completion:
        self.num_requests += 1
        await asyncio.sleep(self._turn_s)
        num_said = TOKENIZER.decode(prompt_token_ids).count("<|im_start|>assistant") - 1
        ids = [*TOKENIZER.encode(self._lines[min(num_said, len(self._lines) - 1)]), TOKENIZER.eos_token_id]
        return Completion(ids, [-float(token) for token in ids], [self.version] * len(ids), "stop")

    def num_sampled(self, request_id: str) -> int:
        """None of a line is seen before its end."""
        return 0

    def partial_output(self, request_id: str, first: int = 0) -> api.Tokens:
        """As `num_sampled`."""
        return api.Tokens([], [], [])

    async def abort(self, request_id: str) -> None:
        raise AssertionError("no rollout here takes so long")


class GameFunction(Environment):
    """The game as a function."""

    async def begin(self, request: ResetRequest, timeout_s: float) -> EnvironmentReply:
        state, observation = game().reset(json.loads(request.task_json))
        return EnvironmentReply(state_json=json.dumps(state), observation_json=json.dumps(observation), version="v1")

    async def step(self, request: StepRequest, timeout_s: float, task_json: str) -> EnvironmentReply:
        state, observation, reward, done = game().step(json.loads(request.state_json), request.action)
        state_json, observation_json = json.dumps(state), json.dumps(observation)
        return EnvironmentReply(
            state_json=state_json, observation_json=observation_json, reward=reward, done=done, version="v1"
        )


def game() -> Any:
    """The module of the game."""
    sys.path.insert(0, str(GUESS))
    try:
        return import_module("game")
    finally:
        sys.path.remove(str(GUESS))


@asynccontextmanager
async def on_server(config: EnvironmentConfig) -> AsyncIterator[Mapping[str, Environment]]:
    """The game on a server, whose sessions end with the block."""
    async with environments_on_servers([Source(environment=config)], RewardConfig()) as environments:
        yield environments


def driver_of(
    environments: Mapping[str, Environment] | None, engine: LinesEngine, max_attempts: int = 3
) -> RolloutDriver:
    """A driver whose environment is the game: on a server, or as a function."""
    episodes = Episodes(GameFunction(), TOKENIZER, environments, max_attempts)
    return RolloutDriver(cast("EngineLike", engine), TOKENIZER, GenerationConfig(), episodes)


def in_flight_of(number: int = 0, saved: bytes | None = None, **play: Any) -> InFlightRollout:
    """A rollout of a prompt to guess NUMBER."""
    messages = [{"role": "user", "content": "Guess"}]
    text = TOKENIZER.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    prompt = Prompt(
        token_ids=ids, text=text, messages_json=json.dumps(messages), columns_json=json.dumps({"number": NUMBER})
    )
    limits = {"max_turns": 8, "step_timeout_s": 2.0, "total_timeout_s": 60.0, "prompt_length": 256, **play}
    sampling = Sampling(temperature=1.0, max_tokens=400)
    task = GroupTask(num_rollouts=1, prompt=prompt, sampling=sampling, environment="game", play=Play(**limits))
    return InFlightRollout(task, number, "generation-0", saved)


async def played(driver: RolloutDriver, rollout: InFlightRollout) -> Rollout:
    """The finished rollout."""
    finished = await driver.drive(rollout)
    assert finished is not None
    return finished
