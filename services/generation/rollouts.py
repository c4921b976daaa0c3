"""From a task to rollouts: what the engine is asked, and what is made of its answers.

It writes to no stream. Neighbours: worker.py and door.py ask for rollouts, engine.py samples, under_way.py holds what
was sampled so far.
"""

from __future__ import annotations

import time
from itertools import count

import numpy as np
from transformers import PreTrainedTokenizerBase

from gspo_proto import rollout_pb2
from gspo_proto.rollout_pb2 import GroupTask, Rollout
from services.common import metrics
from services.common.config import GenerationConfig
from services.common.entries import SCHEMA
from services.generation.engine_api import Completion, EngineLike, Sampling
from services.generation.stop_strings import cut_at_stop
from services.generation.under_way import UnderWay

_OUTCOMES = {
    "stop": rollout_pb2.OUTCOME_EOS,
    "stop_string": rollout_pb2.OUTCOME_STOP_STRING,
    "length": rollout_pb2.OUTCOME_TRUNCATED,
}


class AbortedError(RuntimeError):
    """The engine ended a request before its answer was whole."""


class Rollouts:
    """Makes rollouts with one engine.

    Args:
        generator: This generator's name, as the rollouts carry it.
    """

    def __init__(
        self, engine: EngineLike, tokenizer: PreTrainedTokenizerBase, config: GenerationConfig, generator: str
    ) -> None:
        self._engine, self._tokenizer, self._generator = engine, tokenizer, generator
        self._restarts = config.on_update == "restart"
        self._request_numbers = count()

    def begin(self, task: GroupTask, number: int, saved: bytes | None = None) -> UnderWay:
        """A rollout of a task, from its beginning or from what was saved of it."""
        return UnderWay(task, number, self._generator, saved)

    async def generate(self, task: GroupTask, number: int) -> Rollout:
        """One rollout of a task, from its beginning to its end; errors as in `play`."""
        rollout = self.begin(task, number)
        await self.play(rollout)
        return self.finished(rollout)

    async def play(self, rollout: UnderWay, segment_tokens: int | None = None) -> bool:
        """Go on with a rollout; whether it has ended. If not, it has used up `segment_tokens`, its tokens of a step.

        Raises:
            ValueError: The engine refuses the request, such as a prompt that is too long for it.
            AbortedError: The request was ended from outside.
        """
        rollout.begin_segment()
        while not rollout.ended:
            self._restart_if_outdated(rollout)
            most = rollout.may_sample(self._engine.version, segment_tokens)
            if not most and rollout.tokens_left:
                return False
            await self._take_turn(rollout, most)
        return True

    def finished(self, rollout: UnderWay) -> Rollout:
        """A rollout that has ended, as it goes into the stream; counted."""
        task, state = rollout.task, rollout.state
        # In C: a thousand tokens one by one would take as long as all else here.
        policy_token_ids = np.array(state.token_ids)[np.frombuffer(state.mask, np.bool_)].tolist()
        finished = Rollout(
            schema=SCHEMA,
            group=task.group,
            number=rollout.number,
            attempt=task.attempt,
            num_rollouts=task.num_rollouts,
            prompt=task.prompt,
            token_ids=state.token_ids,
            logp=state.logp,
            version=state.version,
            mask=state.mask,
            text=self._tokenizer.decode(policy_token_ids, skip_special_tokens=True),
            outcome=state.outcome,
            stop=state.stop,
            rewards=task.rewards,
            environment=task.environment,
            state_json=state.state_json,
            num_turns=state.num_turns,
            generator=state.generator,
            evaluation=task.evaluation,
            issued_unix_s=task.issued_unix_s,
            started_unix_s=state.started_unix_s,
            finished_unix_s=time.time(),
            temperature=task.sampling.temperature,
        )
        _count(finished)
        return finished

    async def _take_turn(self, rollout: UnderWay, most: int) -> None:
        """Have the model go on for `most` tokens at most, and end its turn where it ends it."""
        if not most:  # a saved one, and algorithm.response_length is less than it was
            rollout.state.outcome = rollout_pb2.OUTCOME_TRUNCATED
            return
        completion = await self._sample(rollout, most)
        if completion and (completion.finish != "length" or not rollout.tokens_left):
            rollout.state.outcome = _OUTCOMES[completion.finish]
            rollout.state.stop = completion.stop_string or ""

    async def _sample(self, rollout: UnderWay, most: int) -> Completion | None:
        """Append what the engine samples next; None where a change of weights had it begin anew."""
        num_before = len(rollout.state.token_ids)
        # Unique: what is under way is looked up by it, and two tasks of one group may be here at a time. The last
        # number says where in the answer the piece begins.
        rollout.request_id = f"{rollout.mark}:{rollout.task.attempt}.{next(self._request_numbers)}.{num_before}"
        sampling = _sampling(rollout.task.sampling, most, num_before)
        try:
            completion = await self._engine.generate(rollout.request_id, rollout.context, sampling)
        finally:
            rollout.request_id = ""
        if completion.finish == "aborted":
            raise AbortedError(f"rollout {rollout.mark} was aborted in the engine")
        if completion.finish == "restart":
            metrics.TOKENS_RESTARTED.inc(rollout.restart() + len(completion.token_ids))
            return None
        if sampling.stop:
            earlier = list(rollout.state.token_ids[rollout.state.turn_start :])
            completion = cut_at_stop(self._tokenizer, earlier, completion, sampling.stop)
        rollout.append(completion)
        return completion

    def _restart_if_outdated(self, rollout: UnderWay) -> None:
        """Under on_update: restart nothing goes on that older weights began."""
        oldest = rollout.oldest_version if self._restarts else None
        if oldest is not None and oldest < self._engine.version:
            metrics.TOKENS_RESTARTED.inc(rollout.restart())


def _sampling(sampling: rollout_pb2.Sampling, max_tokens: int, num_before: int) -> Sampling:
    return Sampling(
        max_tokens=max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p or 1.0,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        stop=tuple(sampling.stop),
        # With the same seed the second piece would be drawn with the random numbers of the first.
        seed=sampling.seed + num_before if sampling.seed else None,
    )


def _count(rollout: Rollout) -> None:
    evaluation = "yes" if rollout.evaluation else "no"
    outcome = rollout_pb2.Outcome.Name(rollout.outcome).removeprefix("OUTCOME_").lower()
    metrics.ROLLOUTS_GENERATED.labels(outcome, evaluation).inc()
    num_policy_tokens = rollout.mask.count(1)
    metrics.TOKENS_GENERATED.labels(evaluation).inc(num_policy_tokens)
    metrics.ROLLOUT_QUEUE_SECONDS.observe(max(0.0, rollout.started_unix_s - rollout.issued_unix_s))
    metrics.ROLLOUT_SECONDS.observe(rollout.finished_unix_s - rollout.started_unix_s)
    metrics.RESPONSE_TOKENS.observe(num_policy_tokens)
