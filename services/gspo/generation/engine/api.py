"""What the service asks of an engine and what it answers: plain carriers, and the calls as a protocol. No vLLM here.

It samples nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

from gspo.generation.engine.staging import StagedWeights

Finish: TypeAlias = Literal["stop", "stop_string", "length", "aborted", "restart"]
OnUpdate: TypeAlias = Literal["recompute", "keep", "restart"]


class EngineBrokenError(RuntimeError):
    """vLLM has died, or holds neither the new weights nor the old: the process must end and start again."""


class LoadFailedError(RuntimeError):
    """The new weights did not load; the old ones are back and serve under their old version."""


@dataclass(frozen=True)
class Sampling:
    """How to sample one answer. top_p, top_k and min_p other than off bias a training ratio; evaluation may."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    min_tokens: int = 0
    ignore_eos: bool = False
    seed: int | None = None


@dataclass(frozen=True)
class Tokens:
    """What was sampled of an answer.

    The lists have one element a sampled token; an end-of-sequence token that ended it is among them. `logp` is the
    log-prob of exactly that token under the distribution it was sampled from (after temperature); `version` the
    version of the weights that sampled it.
    """

    token_ids: list[int]
    logp: list[float]
    version: list[int]


@dataclass(frozen=True)
class Completion(Tokens):
    """What one request sampled, and what ended it; `restart` is a change of weights under on_update: restart."""

    finish: Finish
    stop_string: str | None = None


@dataclass(frozen=True)
class LoadTimes:
    """Seconds from asking for the pause until the engine stood still, of the load, and until it ran again."""

    pause_s: float
    load_s: float
    resume_s: float


class EngineLike(Protocol):
    """The calls of engine.Engine, which says what each does; a benchmark may stand something else in its place."""

    version: int

    async def generate(self, request_id: str, prompt_token_ids: list[int], sampling: Sampling) -> Completion:
        """One answer to one prompt, or the next piece of one."""

    def num_sampled(self, request_id: str) -> int:
        """Tokens that a request under way has sampled so far; 0 for one that is not."""

    def partial_output(self, request_id: str) -> Tokens:
        """What a request under way has sampled so far; nothing for one that is not."""

    async def abort(self, request_id: str) -> None:
        """End a request."""

    async def load(self, version: int, staged: StagedWeights, *, on_update: OnUpdate, timeout_s: float) -> LoadTimes:
        """Serve the staged copy as `version`."""

    async def stop(self, timeout_s: float = 10.0) -> None:
        """End."""

    @property
    def num_running(self) -> int:
        """Requests that it holds."""

    @property
    def max_num_seqs(self) -> int:
        """Requests that it runs at a time."""
