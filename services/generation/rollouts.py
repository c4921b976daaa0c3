"""From a task to rollouts: what the engine is asked, and what is made of its answers.

It writes to no stream. Neighbours: worker.py and door.py ask for rollouts, engine.py samples.
"""

from __future__ import annotations

import time

from transformers import PreTrainedTokenizerBase

from gspo_proto import rollout_pb2
from gspo_proto.rollout_pb2 import GroupTask, Rollout
from services.common import metrics
from services.common.events import SCHEMA
from services.common.keys import rollout_id
from services.generation.engine_api import Completion, EngineLike, Sampling

_OUTCOMES = {
    "stop": rollout_pb2.OUTCOME_EOS,
    "stop_string": rollout_pb2.OUTCOME_STOP_STRING,
    "length": rollout_pb2.OUTCOME_TRUNCATED,
}


class AbortedError(RuntimeError):
    """The engine ended a request before its answer was whole."""


def mark_of(task: GroupTask, number: int) -> str:
    """The name under which a rollout is finished once: its id, apart for every evaluation."""
    mark = rollout_id(task.group, number)
    return f"{task.evaluation}:{mark}" if task.evaluation else mark


class Rollouts:
    """Makes rollouts with one engine.

    Args:
        generator: This generator's name, as the rollouts carry it.
    """

    def __init__(self, engine: EngineLike, tokenizer: PreTrainedTokenizerBase, generator: str) -> None:
        self._engine, self._tokenizer, self._generator = engine, tokenizer, generator

    async def generate(self, task: GroupTask, number: int) -> Rollout:
        """One rollout of a task.

        Raises:
            ValueError: The engine refuses the request, such as a prompt that is too long for it.
            AbortedError: The request was ended from outside.
        """
        started_unix_s = time.time()
        prompt = list(task.prompt.token_ids)
        completion = await self._engine.generate(
            f"{mark_of(task, number)}:{task.attempt}", prompt, _sampling(task.sampling)
        )
        if completion.finish == "aborted":
            raise AbortedError(f"rollout {mark_of(task, number)} was aborted in the engine")
        rollout = self._rollout(task, number, completion, started_unix_s)
        _count(rollout)
        return rollout

    def _rollout(self, task: GroupTask, number: int, completion: Completion, started_unix_s: float) -> Rollout:
        return Rollout(
            schema=SCHEMA,
            group=task.group,
            number=number,
            attempt=task.attempt,
            num_rollouts=task.num_rollouts,
            prompt=task.prompt,
            token_ids=completion.token_ids,
            logp=completion.logp,
            version=completion.version,
            mask=b"\x01" * len(completion.token_ids),
            text=self._tokenizer.decode(completion.token_ids, skip_special_tokens=True),
            outcome=_OUTCOMES[completion.finish],
            stop=completion.stop_string or "",
            rewards=task.rewards,
            environment=task.environment,
            num_turns=1,
            generator=self._generator,
            evaluation=task.evaluation,
            issued_unix_s=task.issued_unix_s,
            started_unix_s=started_unix_s,
            finished_unix_s=time.time(),
            temperature=task.sampling.temperature,
        )


def _sampling(sampling: rollout_pb2.Sampling) -> Sampling:
    return Sampling(
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p or 1.0,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        stop=tuple(sampling.stop),
        seed=sampling.seed or None,
    )


def _count(rollout: Rollout) -> None:
    evaluation = "yes" if rollout.evaluation else "no"
    outcome = rollout_pb2.Outcome.Name(rollout.outcome).removeprefix("OUTCOME_").lower()
    metrics.ROLLOUTS_GENERATED.labels(outcome, evaluation).inc()
    metrics.TOKENS_GENERATED.labels(evaluation).inc(len(rollout.token_ids))
    metrics.ROLLOUT_SECONDS.observe(rollout.finished_unix_s - rollout.started_unix_s)
    metrics.RESPONSE_TOKENS.observe(len(rollout.token_ids))
