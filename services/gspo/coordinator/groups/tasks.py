"""The tasks for generation: the prompt of each group, with its sampling, environment and reward functions."""

import asyncio
import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from gspo.common.config.evaluation import EvaluationConfig
from gspo.common.config.reward import EnvironmentConfig
from gspo.common.config.schema import Config
from gspo.common.config.sources import Source
from gspo.common.reward_uses import reward_uses
from gspo.common.streams.entries import SCHEMA
from gspo.coordinator.data.prompts import PromptSet
from gspo.coordinator.groups.curriculum import Curriculum
from gspo.coordinator.groups.prompt_order import FixedOrder
from gspo_proto.rollout_pb2 import GroupTask, Play, Prompt, Sampling


class TrainingTasks:
    """Makes the tasks of training groups, and reads their prompts ahead.

    Args:
        prompts: The usable training prompts of each source.

    Attributes:
        order: The prompt of each group.
    """

    def __init__(self, config: Config, prompts: Sequence[PromptSet]) -> None:
        self._config, self._sources, self._prompts = config, config.sources, prompts
        kind = FixedOrder if config.data.curriculum == "none" else Curriculum
        self.order: FixedOrder | Curriculum = kind(config, [len(own) for own in prompts])
        self._prepared: dict[int, Prompt] = {}

    async def prepare(self, groups: Iterable[int]) -> None:
        """Read and tokenise the prompts of groups, in a thread: a slow disk must not delay the events."""
        if missing := [group for group in groups if group not in self._prepared]:
            self._prepared |= await asyncio.to_thread(self._read, missing)

    async def make(self, groups: Iterable[int]) -> dict[int, GroupTask]:
        """The tasks of groups, without their attempts, times and versions, which ledger.py fills in."""
        groups = list(groups)
        await self.prepare(groups)
        return {group: self._make(group, self._prepared.pop(group)) for group in groups}

    def _make(self, group: int, prompt: Prompt) -> GroupTask:
        return training_task(self._config, self._sources[self.order.place(group).source], group, prompt)

    def _read(self, groups: Iterable[int]) -> dict[int, Prompt]:
        places: defaultdict[int, dict[int, int]] = defaultdict(dict)
        for group in groups:
            source, place = self.order.place(group)
            places[source][group] = place
        prompts: dict[int, Prompt] = {}
        for source, own in places.items():
            prompts |= zip(own, self._prompts[source].prompts(list(own.values())), strict=True)
        return prompts


def training_task(config: Config, source: Source, group: int, prompt: Prompt) -> GroupTask:
    """A task without its attempt, times and version."""
    return GroupTask(
        schema=SCHEMA,
        group=group,
        num_rollouts=config.algorithm.num_return_sequences_in_group,
        prompt=prompt,
        sampling=_sampling(config, source, source.temperature),
        rewards=reward_uses(source),
        **_episode(config, source.environment),
    )


def evaluation_tasks(
    config: Config, source: Source, row: int, prompt: Prompt, *, label: str, version: int
) -> list[GroupTask]:
    """Group 2 * row sampled, as in training by default, and group 2 * row + 1 greedy under evaluation.greedy."""
    own = config.evaluation.temperature
    kinds = [(2 * row, config.evaluation.num_answers, source.temperature if own is None else own)]
    if config.evaluation.greedy:
        kinds.append((2 * row + 1, 1, 0.0))
    return [
        GroupTask(
            schema=SCHEMA,
            group=group,
            attempt=1,
            num_rollouts=num_rollouts,
            prompt=prompt,
            sampling=_sampling(config, source, temperature, config.evaluation),
            rewards=reward_uses(source),
            **_episode(config, source.environment),
            min_version=version,
            evaluation=label,
        )
        for group, num_rollouts, temperature in kinds
    ]


def _sampling(
    config: Config, source: Source, temperature: float, evaluation: EvaluationConfig | None = None
) -> Sampling:
    top_p = config.sampling.top_p
    if evaluation and evaluation.top_p is not None:
        top_p = evaluation.top_p
    # The seed stays the engine's own: a generator for each request slows the sampling of a whole batch.
    return Sampling(
        temperature=temperature,
        max_tokens=config.algorithm.response_length,
        top_p=top_p,
        top_k=max(0, config.sampling.top_k),
        min_p=config.sampling.min_p,
        stop=source.stop,
        keep_sets=config.sampling.cuts and not evaluation,
    )


def _episode(config: Config, environment: EnvironmentConfig) -> dict[str, Any]:
    """The fields of a task that name its environment and its limits; empty without an environment."""
    if not environment.used:
        return {}
    play = Play(
        version=environment.version or "",
        tools_json=json.dumps(environment.descriptions) if environment.tools else "",
        tool_format=environment.tool_format if environment.tools else "",
        max_turns=environment.max_turns,
        turn_tokens=environment.turn_tokens or 0,
        end_long_turns=environment.long_turn == "end",
        step_timeout_s=environment.longest_step_s,
        total_timeout_s=environment.total_timeout_s,
        prompt_length=config.algorithm.prompt_length,
        max_calls=environment.mcp.max_calls or 0,
    )
    return {"environment": environment.label, "play": play}
