"""The interface of an engine: its calls as a protocol, and the plain types of arguments and results. No vLLM here."""

from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol, TypeAlias

from gspo.generation.engine.staging import PolicyCopies

Finish: TypeAlias = Literal["stop", "stop_string", "length", "aborted", "restart"]
OnUpdate: TypeAlias = Literal["recompute", "keep", "restart"]


class EngineBrokenError(RuntimeError):
    """vLLM has died, or holds neither the new weights nor the old: the process must end and start again."""


class LoadFailedError(RuntimeError):
    """The new weights did not load; the old ones are back and serve under their old version."""


class WrongTensorsError(LoadFailedError):
    """The new weights lack a tensor that the model loads: every further version of their sender would lack it too."""


@dataclass(frozen=True)
class EngineSampling:
    """How to sample one answer; keep_sets reports the tokens that top_k, top_p and min_p kept, for training."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None
    keep_sets: bool = False


@dataclass(frozen=True)
class Tokens:
    """Sampled tokens of an answer.

    Each list has one element a token, with the end-of-sequence token if there is one. `logp` is the token's log-prob
    under the distribution that it was sampled from (after temperature), and `version` the version of the weights.

    Attributes:
        kept_sizes: Under keep_sets, the number of tokens that each was sampled from; 0 where ties made them too many.
        kept_ids: Their ids, those of one token after those of another.
    """

    token_ids: list[int]
    logp: list[float]
    version: list[int]
    kept_sizes: list[int] = field(default_factory=list, kw_only=True)
    kept_ids: list[int] = field(default_factory=list, kw_only=True)


@dataclass(frozen=True)
class Completion(Tokens):
    """The tokens of one request and the reason of its end; `restart` is a weight update under on_update: restart."""

    finish: Finish
    stop_string: str | None = None


class Drafts(NamedTuple):
    """Draft tokens: those that were proposed, and those of them that the policy's sampling accepted."""

    proposed: int = 0
    accepted: int = 0


@dataclass(frozen=True)
class LoadTimes:
    """Seconds from asking for the pause until the engine stood still, of the load, and until it ran again."""

    pause_s: float
    load_s: float
    resume_s: float


class EngineLike(Protocol):
    """The calls of vllm_engine.Engine, which describes each; benchmarks have an engine that only simulates."""

    version: int
    is_asleep: bool
    drafts: Drafts

    async def generate(self, request_id: str, prompt_token_ids: list[int], sampling: EngineSampling) -> Completion:
        """One answer to one prompt, or the next piece of one."""

    def num_sampled(self, request_id: str) -> int:
        """Tokens that a running request has sampled so far; 0 for an unknown request."""

    def partial_output(self, request_id: str, first: int = 0) -> Tokens:
        """The tokens of a running request so far, from place `first` on; none for an unknown request."""

    async def abort(self, request_id: str) -> None:
        """End a request."""

    async def load(self, version: int, copies: PolicyCopies, *, on_update: OnUpdate, timeout_s: float) -> LoadTimes:
        """Serve the staged copy as `version`."""

    async def sleep(self, *, on_update: OnUpdate, timeout_s: float) -> None:
        """Give back the memory of weights and KV cache."""

    async def wake(self, version: int, copies: PolicyCopies, *, timeout_s: float) -> LoadTimes:
        """Take the memory back and serve the staged copy as `version`."""

    async def checksum(self, timeout_s: float) -> str:
        """A checksum of the weights in the engine."""

    async def stop(self, timeout_s: float = 20.0) -> None:
        """End."""
