"""From a task to rollouts: what the engine is asked, and what is made of its answers.

It writes to no stream.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count

from transformers import PreTrainedTokenizerBase

from gspo.common.config.schema import GenerationConfig
from gspo.common.streams.entries import SCHEMA
from gspo.common.telemetry import metrics
from gspo.generation.engine.api import Completion, EngineLike, Finish, Sampling
from gspo.generation.rollout.detokenizer import Detokenizer
from gspo.generation.rollout.episodes import Episodes, end_conversation, seconds_left
from gspo.generation.rollout.in_flight import InFlightRollout
from gspo.generation.rollout.stop_strings import cut_at_stop
from gspo_proto import rollout_pb2
from gspo_proto.rollout_pb2 import GroupTask, Rollout

_OUTCOMES = {
    "stop": rollout_pb2.OUTCOME_EOS,
    "stop_string": rollout_pb2.OUTCOME_STOP_STRING,
    "length": rollout_pb2.OUTCOME_TRUNCATED,
}


class RolloutAbortedError(RuntimeError):
    """The engine ended a request before its answer was whole."""


class Rollouts:
    """Makes rollouts with one engine.

    Args:
        generator: This generator's name, as the rollouts carry it.
        episodes: Plays the environments of tasks that name one; None where no task does.
    """

    def __init__(
        self,
        engine: EngineLike,
        tokenizer: PreTrainedTokenizerBase,
        config: GenerationConfig,
        generator: str,
        episodes: Episodes | None = None,
    ) -> None:
        self._episodes = episodes
        self._abort_tasks: set[asyncio.Future[None]] = set()  # held, or they could be collected before they are done
        self._engine, self._tokenizer, self._generator = engine, tokenizer, generator
        self._detokenizer = Detokenizer(tokenizer)
        self._restarts = config.on_update == "restart"
        self._request_numbers = count()

    def begin(self, task: GroupTask, number: int, saved: bytes | None = None) -> InFlightRollout:
        """A rollout of a task, from its beginning or from what was saved of it."""
        return InFlightRollout(task, number, self._generator, saved)

    async def generate(self, task: GroupTask, number: int) -> Rollout:
        """One rollout of a task, from its beginning to its end; errors as in `play`."""
        rollout = self.begin(task, number)
        await self.play(rollout)
        return self.finished(rollout)

    async def play(self, rollout: InFlightRollout, segment_tokens: int | None = None) -> bool:
        """Go on with a rollout; whether it has ended. If not, it has used up `segment_tokens`, its tokens of a step.

        Raises:
            ValueError: The engine refuses the request, such as a prompt that is too long for it.
            RolloutAbortedError: The request was ended from outside.
        """
        rollout.begin_segment()
        while not rollout.ended:
            self._restart_if_outdated(rollout)
            if rollout.environment_is_next:
                await self._ask_environment(rollout)
                continue
            most = rollout.may_sample(self._engine.version, segment_tokens)
            if not most and rollout.tokens_left and rollout.turn_tokens_left:
                return False
            await self._take_turn(rollout, most)
        return True

    def finished(self, rollout: InFlightRollout) -> Rollout:
        """A rollout that has ended, as it goes into the stream; counted."""
        task, state = rollout.task, rollout.state
        text = self._detokenizer.text(state.token_ids[state.turn_start :])
        if task.environment:
            text = end_conversation(state, text)
        finished = Rollout(
            schema=SCHEMA,
            group=task.group,
            number=rollout.number,
            attempt=task.attempt,
            num_rollouts=task.num_rollouts,
            prompt=rollout.prompt,
            token_ids=state.token_ids,
            logp=state.logp,
            version=state.version,
            mask=state.mask,
            text=text,
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
            episode=state.episode if task.environment else None,
        )
        _count(finished)
        return finished

    async def _take_turn(self, rollout: InFlightRollout, most: int) -> None:
        """Have the model go on for `most` tokens at most, and end its turn where it ends it."""
        state = rollout.state
        if rollout.task.environment and not seconds_left(rollout):
            state.outcome = rollout_pb2.OUTCOME_TIME_LIMIT
        elif not most:  # a saved one, and a limit is less than it was
            _end_turn(rollout, "length", "")
        elif completion := await self._sample(rollout, most):
            _end_turn(rollout, completion.finish, completion.stop_string or "")

    async def _ask_environment(self, rollout: InFlightRollout) -> None:
        if self._episodes is None:
            raise ValueError(f"task of group {rollout.task.group} names an environment, and this generator has none")
        if rollout.state.turn_ended:
            await self._episodes.respond(rollout)
        else:
            await self._episodes.begin(rollout)

    async def _sample(self, rollout: InFlightRollout, most: int) -> Completion | None:
        """Append what the engine samples next; None where a change of weights had it begin anew."""
        num_before = len(rollout.state.token_ids)
        # Unique: what is under way is looked up by it, and two tasks of one group may be here at a time. The last
        # number says where in the answer the piece begins.
        rollout.request_id = f"{rollout.rollout_key}:{rollout.task.attempt}.{next(self._request_numbers)}.{num_before}"
        sampling = _sampling(rollout.task.sampling, most, num_before)
        try:
            with self._time_limit(rollout):
                completion = await self._engine.generate(rollout.request_id, rollout.context, sampling)
        finally:
            rollout.request_id = ""
        if completion.finish == "aborted" and not rollout.out_of_time:
            raise RolloutAbortedError(f"rollout {rollout.rollout_key} was aborted in the engine")
        if completion.finish == "restart":
            metrics.TOKENS_RESTARTED.inc(rollout.restart() + len(completion.token_ids))
            return None
        if sampling.stop:
            earlier = list(rollout.state.token_ids[rollout.state.turn_start :])
            completion = cut_at_stop(self._tokenizer, earlier, completion, sampling.stop)
        rollout.append(completion)
        return completion

    @contextmanager
    def _time_limit(self, rollout: InFlightRollout) -> Iterator[None]:
        """Ends the request when the conversation's time is over; what it has sampled by then counts."""
        if not rollout.task.environment or (left := seconds_left(rollout)) == math.inf:
            yield
            return
        timer = asyncio.get_running_loop().call_later(left, self._out_of_time, rollout)
        try:
            yield
        finally:
            timer.cancel()

    def _out_of_time(self, rollout: InFlightRollout) -> None:
        rollout.out_of_time = True
        aborting = asyncio.ensure_future(self._engine.abort(rollout.request_id))
        self._abort_tasks.add(aborting)
        aborting.add_done_callback(self._abort_tasks.discard)

    def _restart_if_outdated(self, rollout: InFlightRollout) -> None:
        """Under on_update: restart nothing goes on that older weights began."""
        oldest = rollout.oldest_version if self._restarts else None
        if oldest is not None and oldest < self._engine.version:
            metrics.TOKENS_RESTARTED.inc(rollout.restart())


def _end_turn(rollout: InFlightRollout, finish: Finish, stop_string: str) -> None:
    """What the end of a piece means: the rollout's, the turn's for its environment to answer, or nothing yet."""
    state, play, is_cut = rollout.state, rollout.task.play, finish == "length"
    if is_cut and rollout.tokens_left and rollout.turn_tokens_left:
        return
    if not rollout.task.environment:
        state.outcome, state.stop = _OUTCOMES[finish], stop_string
    elif finish == "aborted":
        state.outcome = rollout_pb2.OUTCOME_TIME_LIMIT
    elif is_cut and not rollout.tokens_left:
        state.outcome = rollout_pb2.OUTCOME_TRUNCATED
    elif is_cut and play.end_long_turns:
        state.outcome = rollout_pb2.OUTCOME_TURN_TOKEN_LIMIT
    else:
        state.episode.num_cut_turns += is_cut
        state.turn_ended, state.stop = True, stop_string


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
    if rollout.environment:
        metrics.TURNS.inc(rollout.num_turns)
