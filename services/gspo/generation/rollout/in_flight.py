"""One rollout under way: what was sampled so far, what it may still sample, and what is saved of it.

Plain bookkeeping on a RolloutState; it asks no engine and writes to no stream. A state that another generator saved is
taken up as it is: its tokens keep their log-probs and versions.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from gspo.common.streams.entries import SCHEMA, saved_state
from gspo.common.streams.keys import rollout_id
from gspo.generation.engine.api import Tokens
from gspo_proto import rollout_pb2
from gspo_proto.rollout_pb2 import GroupTask, Prompt, RolloutState


def rollout_key(task: GroupTask, number: int) -> str:
    """The name under which a rollout is saved, and finished once: its id, apart for every evaluation."""
    rollout_key = rollout_id(task.group, number)
    return f"{task.evaluation}:{rollout_key}" if task.evaluation else rollout_key


class InFlightRollout:
    """A rollout that is not finished.

    Args:
        saved: What an earlier worker saved of it, if any did.

    Attributes:
        request_id: The request that samples for it now; empty while none does.
        out_of_time: Whether its request was ended because a conversation's time is over.
        num_saved: Tokens in what was saved last.
        saved_s: When that was, by the monotonic clock.
    """

    def __init__(self, task: GroupTask, number: int, generator: str, saved: bytes | None = None) -> None:
        self.task, self.number, self.rollout_key = task, number, rollout_key(task, number)
        self.state = saved_state(saved) or _fresh(time.time())
        self.state.generator = generator
        self.request_id = ""
        self.out_of_time = False
        self.num_saved, self.saved_s = len(self.state.token_ids), time.monotonic()
        self._segment_start = 0

    @property
    def ended(self) -> bool:
        """Whether its outcome is known."""
        return self.state.outcome != rollout_pb2.OUTCOME_UNSPECIFIED

    @property
    def context(self) -> list[int]:
        """The prompt and every token after it: what the engine goes on from."""
        return [*self.prompt.token_ids, *self.state.token_ids]

    @property
    def prompt(self) -> Prompt:
        """The task's, or what an environment's reset has made of it."""
        return self.state.prompt if self.state.HasField("prompt") else self.task.prompt

    @property
    def environment_is_next(self) -> bool:
        """Whether it is not the policy that goes on: an environment has to begin, or to answer a turn."""
        return bool(self.task.environment) and (self.state.turn_ended or not self.state.HasField("episode"))

    @property
    def turn_tokens_left(self) -> int:
        """Tokens until the turn is as long as one may be."""
        most = self.task.play.turn_tokens or self.task.sampling.max_tokens
        return max(0, most - (len(self.state.token_ids) - self.state.turn_start))

    @property
    def oldest_version(self) -> int | None:
        """The oldest version that sampled a token of it; None where none was sampled."""
        return min((version for version in self.state.version if version >= 0), default=None)

    @property
    def tokens_left(self) -> int:
        """Tokens until it is as long as an answer may be."""
        return max(0, self.task.sampling.max_tokens - len(self.state.token_ids))

    def begin_segment(self) -> None:
        """Its tokens of one step are counted from here on."""
        self._segment_start = len(self.state.token_ids)

    def may_sample(self, version: int, segment_tokens: int | None) -> int:
        """Tokens that the engine may add now, under `version`; 0 where those of this step are used up."""
        left = min(self.tokens_left, self.turn_tokens_left)
        if segment_tokens is None:
            return left
        used = sum(of == version for of in self.state.version[self._segment_start :])
        return max(0, min(left, segment_tokens - used))

    def append(self, sampled: Tokens) -> None:
        """Add tokens that the policy sampled."""
        _append(self.state, sampled)

    def begin_turn(self, observed_token_ids: Sequence[int]) -> None:
        """Add what the policy sees next, which is none of its own, and begin its turn behind it."""
        state, num = self.state, len(observed_token_ids)
        state.token_ids.extend(observed_token_ids)
        state.logp.extend([0.0] * num)
        state.version.extend([-1] * num)
        state.mask += b"\x00" * num
        state.turn_start, state.turn_ended = len(state.token_ids), False
        state.num_turns += 1

    def snapshot(self, running: Tokens, delivery: int) -> RolloutState:
        """The state with what a running request has sampled on top; the rollout itself stays as it is."""
        state = RolloutState()
        state.CopyFrom(self.state)
        state.delivery = delivery
        _append(state, running)
        return state

    def restart(self) -> int:
        """Drop everything that was sampled: it begins anew under the same id. Returns the tokens dropped."""
        dropped = sum(version >= 0 for version in self.state.version)
        generator = self.state.generator
        self.state = _fresh(self.state.started_unix_s)
        self.state.generator = generator
        self.num_saved = self._segment_start = 0
        return dropped


def _fresh(started_unix_s: float) -> RolloutState:
    return RolloutState(schema=SCHEMA, started_unix_s=started_unix_s, num_turns=1)


def _append(state: RolloutState, sampled: Tokens) -> None:
    state.token_ids.extend(sampled.token_ids)
    state.logp.extend(sampled.logp)
    state.version.extend(sampled.version)
    state.mask += b"\x01" * len(sampled.token_ids)
