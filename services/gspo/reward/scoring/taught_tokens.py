"""The log-probs of sampled tokens by the run's teacher, a vLLM server at teacher.address.

Rollouts are scored as they come, beside their rewards, so that the learner waits for no server. It knows no stream.
waits for: the server, for teacher.timeout_s and then for ever, since the run ends meanwhile.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from itertools import chain, pairwise
from typing import Any

import httpx

from gspo.common.config.teacher import TeacherConfig
from gspo.common.model.teacher_server import COMPLETIONS, scoring_body, server_header
from gspo.reward.functions.json_server import JsonServer, UnansweredError
from gspo.reward.sandbox.calls import CallError
from gspo.reward.sandbox.values import Failure
from gspo_proto.rollout_pb2 import Rollout, Score

# Of one replica, at a time: enough for a server's batches, and few enough connections.
_REQUESTS = 64
# vLLM's number for a probability of 0, for which JSON has none.
_NO_PROBABILITY = -9999.0
_REFUSALS = (httpx.codes.BAD_REQUEST, httpx.codes.REQUEST_ENTITY_TOO_LARGE, httpx.codes.UNPROCESSABLE_ENTITY)


class TaughtTokens:
    """The teacher at an address.

    Args:
        on_silence: Called with the reason whenever an answer has taken longer than teacher.timeout_s.
        note_problem: Called with the error of each failed try, and with an empty text once an answer has come.
    """

    def __init__(
        self,
        config: TeacherConfig,
        on_silence: Callable[[str], Awaitable[None]],
        note_problem: Callable[[str], None],
    ) -> None:
        self._server = _TeacherServer(config, note_problem)
        self._config, self._on_silence, self._note_problem = config, on_silence, note_problem
        self._free = asyncio.Semaphore(_REQUESTS)

    async def close(self) -> None:
        await self._server.close()

    async def score(self, rollouts: Sequence[Rollout]) -> list[list[float] | Failure]:
        """For each rollout the log-prob of every token after its prompt, or why there are none; none in evaluations."""
        return await asyncio.gather(*map(self._score, rollouts))

    async def _score(self, rollout: Rollout) -> list[float] | Failure:
        if rollout.evaluation or not rollout.token_ids:
            return []
        try:
            logp = await asyncio.gather(*map(self._logp, _branches(rollout)))
        except CallError as error:
            return Failure(f"the teacher: {error}", error.kind)
        return list(chain.from_iterable(logp))[len(rollout.prompt.token_ids) :]

    async def _logp(self, token_ids: list[int]) -> list[float]:
        """The log-probs, however long they take: a rollout in hand is not lost, and its lease ends with the service."""
        while True:
            try:
                async with self._free:
                    reply = await self._server.post(scoring_body(self._config.model, token_ids))
            except UnansweredError as error:
                await self._on_silence(f"the teacher: {error}")
            else:
                self._note_problem("")
                return read_logp(reply, token_ids)


class _TeacherServer(JsonServer):
    """The server as one JSON function; what concerns every rollout is tried again, and not the rollout's failure."""

    max_attempts = None
    # About 100 bytes a token.
    max_reply_bytes = 256 * 2**20

    def __init__(self, config: TeacherConfig, note_problem: Callable[[str], None]) -> None:
        assert config.address is not None  # noqa: S101 - there is no teacher's server otherwise
        url = config.address.rstrip("/") + COMPLETIONS
        super().__init__(url, timeout_s=config.timeout_s, headers=server_header())
        self._note = note_problem

    def is_passing(self, status: int) -> bool:
        """A wrong key or another model (404) may be corrected; a request that is refused stays so."""
        return status not in _REFUSALS

    def read_reply(self, body: bytes) -> Any:
        """As it is: of a megabyte, only numbers are used."""
        return json.loads(body)

    def note_problem(self, problem: str) -> None:
        """Pass the problem on, with the server's address."""
        self._note(f"{self._url}: {problem}")


def _branches(rollout: Rollout) -> list[list[int]]:
    """The token ids of each branch with its own context; the first one's is the prompt."""
    token_ids, starts = list(rollout.token_ids), [0, *rollout.branch_starts, len(rollout.token_ids)]
    first, *others = (token_ids[start:end] for start, end in pairwise(starts))
    return [[*rollout.prompt.token_ids, *first], *others]


def read_logp(reply: Any, token_ids: Sequence[int]) -> list[float]:
    """The log-prob of each token given those before it, and 0 of the first one.

    Raises:
        CallError: The reply has another form, or a token no probability.
    """
    try:
        places = zip(reply["choices"][0]["prompt_logprobs"], token_ids, strict=True)
        next(places)
        logp = [0.0, *(float(place[str(token)]["logprob"]) for place, token in places)]
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise CallError("invalid_return", f"sent no prompt_logprobs of the rollout's tokens ({error!r})") from error
    if impossible := [value for value in logp if not _NO_PROBABILITY < value <= 0]:
        raise CallError("invalid_return", f"sent a log-prob of {impossible[0]:g}; vLLM's --logprobs-mode has logits?")
    return logp


def add_to(score: Score, logp: list[float] | Failure) -> None:
    """Put the log-probs into a score; without them it fails."""
    if not isinstance(logp, Failure):
        score.teacher_logp.extend(logp)
        return
    before = f"{score.failure}; " if score.WhichOneof("result") == "failure" else ""
    score.failure, score.failure_kind = before + logp.reason, score.failure_kind or logp.kind
