"""Drives rollouts to their end: carries out the actions of each state machine with the engine and the environment.

The decisions are in `in_flight.py`. This file writes to no stream.
"""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import count

from transformers import PreTrainedTokenizerBase

from gspo.common.config.engines import GenerationConfig
from gspo.common.streams.entries import tokens_between
from gspo.common.telemetry import metrics
from gspo.generation.engine.api import Completion, EngineLike, EngineSampling
from gspo.generation.rollout.detokenizer import Detokenizer
from gspo.generation.rollout.episodes import Episodes
from gspo.generation.rollout.in_flight import InFlightRollout, PlainAction, SampleAction
from gspo_proto import rollout_pb2
from gspo_proto.rollout_pb2 import Rollout

# A character of UTF-8 has four bytes at most, and a token at least one.
_TOKENS_PER_CHARACTER = 4


class RolloutAbortedError(RuntimeError):
    """The engine ended a request before its answer was complete."""


class RolloutDriver:
    """Makes rollouts with one engine.

    Args:
        episodes: Asks the environments of tasks that name one.
    """

    def __init__(
        self,
        engine: EngineLike,
        tokenizer: PreTrainedTokenizerBase,
        config: GenerationConfig,
        episodes: Episodes,
    ) -> None:
        self._engine, self._tokenizer, self._episodes = engine, tokenizer, episodes
        self._detokenizer = Detokenizer(tokenizer)
        self._restarts = config.on_update == "restart"
        self._request_numbers = count()
        self._abort_tasks: set[asyncio.Future[None]] = set()  # the event loop keeps only weak references to tasks

    async def drive(self, rollout: InFlightRollout, segment_tokens: int | None = None) -> Rollout | None:
        """Carry out a rollout's actions until it finishes or pauses.

        Args:
            segment_tokens: Tokens of one segment, after which the rollout pauses; None for any number.

        Returns:
            The finished rollout; None where it pauses.

        Raises:
            ValueError: The engine refuses the request, for example because the prompt is too long.
            RolloutAbortedError: The engine's request was ended from outside.
        """
        rollout.begin_segment()
        await self._episodes.resume(rollout)
        while True:
            if self._restarts and rollout.is_outdated(self._engine.version):
                self._restart(rollout)
            match rollout.next_action(self._engine.version, segment_tokens, time.time()):
                case SampleAction() as action:
                    await self._sample(rollout, action)
                case PlainAction.RESET:
                    await self._episodes.reset(rollout)
                case PlainAction.STEP:
                    await self._episodes.step(rollout)
                case PlainAction.PAUSE:
                    return None
                case PlainAction.FINISH:
                    self._episodes.end(rollout)
                    finished = rollout.finished(self._detokenizer.text(rollout.policy_turn), time.time())
                    _count(finished)
                    return finished

    def hand_over(self, rollout: InFlightRollout, is_needed: Callable[[], Awaitable[bool]] | None) -> None:
        """Leave an unfinished rollout whose `drive` was cancelled; `is_needed` as in Episodes."""
        self._episodes.hand_over(rollout, is_needed)

    def _restart(self, rollout: InFlightRollout, num_unsaved: int = 0) -> None:
        self._episodes.end(rollout)
        metrics.TOKENS_RESTARTED.inc(rollout.restart() + num_unsaved)

    async def _sample(self, rollout: InFlightRollout, action: SampleAction) -> None:
        """Ask the engine for the next piece. A weight update under `on_update: restart` drops the rollout's tokens."""
        num_before = len(rollout.state.token_ids)
        # Unique, because the engine finds requests by it, and two tasks of one group may run here at a time. The last
        # number is the place in the answer where the piece begins.
        rollout.request_id = f"{rollout.rollout_key}:{rollout.task.attempt}.{next(self._request_numbers)}.{num_before}"
        sampling = engine_sampling(rollout.task.sampling, action.max_tokens, num_before)
        try:
            with self._time_limit(rollout.request_id, action.timeout_s) as fired:
                piece = await self._engine.generate(rollout.request_id, rollout.context, sampling)
        finally:
            rollout.request_id = ""
        rollout.num_sampled += len(piece.token_ids)
        if piece.finish == "restart":
            self._restart(rollout, len(piece.token_ids))
            return
        if piece.finish == "aborted" and not fired.is_set():
            raise RolloutAbortedError(f"rollout {rollout.rollout_key} was aborted in the engine")
        piece = cut_at_stop(self._tokenizer, rollout.policy_turn, piece, sampling.stop)
        rollout.on_sampled(piece)

    @contextmanager
    def _time_limit(self, request_id: str, timeout_s: float) -> Iterator[asyncio.Event]:
        """Abort a request in the engine after `timeout_s`, which keeps its tokens; yields whether that has happened."""
        fired = asyncio.Event()
        if timeout_s == math.inf:
            yield fired
            return

        def abort() -> None:
            fired.set()
            aborting = asyncio.ensure_future(self._engine.abort(request_id))
            self._abort_tasks.add(aborting)
            aborting.add_done_callback(self._abort_tasks.discard)

        timer = asyncio.get_running_loop().call_later(timeout_s, abort)
        try:
            yield fired
        finally:
            timer.cancel()


def cut_at_stop(
    tokenizer: PreTrainedTokenizerBase, earlier_token_ids: Sequence[int], piece: Completion, stops: Sequence[str]
) -> Completion:
    """The piece, cut after the token that completes a stop string which earlier tokens began.

    vLLM searches the text of one request alone, and an answer that is sampled in pieces has several requests.
    """
    reach = _TOKENS_PER_CHARACTER * (max(map(len, stops), default=1) - 1)
    tail = list(earlier_token_ids[-reach:]) if reach else []
    for num_kept in range(1, min(reach, len(piece.token_ids)) + 1 if tail else 0):
        text = tokenizer.decode(tail + piece.token_ids[:num_kept], skip_special_tokens=True)
        if stop_string := next((stop for stop in stops if stop in text), None):
            kept = tokens_between(piece, 0, num_kept)
            return replace(piece, **kept, finish="stop_string", stop_string=stop_string)
    return piece


def engine_sampling(sampling: rollout_pb2.Sampling, max_tokens: int, num_before: int) -> EngineSampling:
    """The engine's form of a task's sampling, for the next `max_tokens` tokens of an answer that has `num_before`."""
    return EngineSampling(
        max_tokens=max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p or 1.0,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        stop=tuple(sampling.stop),
        # With the same seed the second piece would be drawn with the random numbers of the first.
        seed=sampling.seed + num_before if sampling.seed else None,
        keep_sets=sampling.keep_sets,
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
