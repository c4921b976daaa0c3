"""The error that ends a process, as its log has it for the supervisor: what it is, where, in which step, and whose.

A supervisor starts a process again after an accident. An error that comes again at the same place is none, unless its
cause is outside of the process and may pass.
"""

import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, Self

import structlog

# Classes of errors with a cause outside of the process: a disk, the network, Redis, a port, another process. By name,
# since most services import few of these libraries. OSError has those of connections and times that are over.
OUTSIDE = frozenset(
    {
        "builtins.OSError",
        "grpc.RpcError",
        "httpx.TransportError",
        "redis.exceptions.RedisError",
        "safetensors._safetensors_rust.SafetensorError",
        "torch.distributed.DistError",
        "vllm.v1.engine.exceptions.EngineDeadError",
        "gspo.agents.worker.RunUnreachableError",
        "gspo.common.service.replicas.ReplicaLostError",
        "gspo.generation.engine.api.EngineBrokenError",
        "gspo.learner.ranks.process_group.RanksError",
    }
)
_STEP = "in_step"


@dataclass(frozen=True)
class ProcessFailure:
    """The error that ended a process. Two are equal if they are the same error at the same place.

    Attributes:
        kind: The class of the error that was raised first.
        place: File and line that raised it.
        step: The step of the learner that it ended; None where it was in none.
        reason: The message of the last error.
        is_outside: Whether its cause is outside of the process.
    """

    kind: str
    place: str
    step: int | None = None
    reason: str = field(default="", compare=False)
    is_outside: bool = False

    @classmethod
    def of(cls, error: BaseException, reason: str) -> Self:
        """The failure of a process that `error` ended."""
        chain = [error]
        while (cause := chain[-1].__cause__) is not None and cause not in chain:
            chain.append(cause)
        root = chain[-1]
        frames = traceback.extract_tb(root.__traceback__)
        place = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
        step = next((e.__dict__[_STEP] for e in chain if _STEP in e.__dict__), None)
        return cls(type(root).__name__, place, step, reason, any(map(_is_outside, chain)))

    @classmethod
    def from_log(cls, line: Mapping[str, Any]) -> Self:
        """The failure in a line of a service's log.

        Raises:
            KeyError: The line has none.
            TypeError: The line is not one of `log_failure`.
        """
        return cls(**line["failure"], reason=str(line["reason"]))

    def __str__(self) -> str:
        step = "" if self.step is None else f"in step {self.step}: "
        return f"{step}{self.reason} (raised at {self.place})"


def log_failure(event: str, error: BaseException, reason: str) -> None:
    """Log the error that ends this process, with its traceback."""
    record = asdict(ProcessFailure.of(error, reason))
    del record["reason"]
    structlog.get_logger().error(event, reason=reason, failure=record, exc_info=error)


@contextmanager
def in_step(step: int) -> Iterator[None]:
    """Have the errors of a block say that they are a step's; those of a block within keep theirs."""
    try:
        yield
    except Exception as error:
        error.__dict__.setdefault(_STEP, step)
        raise


def _is_outside(error: BaseException) -> bool:
    return any(f"{cls.__module__}.{cls.__qualname__}" in OUTSIDE for cls in type(error).__mro__)
