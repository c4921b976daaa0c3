"""The rollout that an agent plays, the same inside and outside of a sandbox."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeAlias


@dataclass(frozen=True)
class Task:
    """A rollout to play.

    Attributes:
        id: Name of the rollout.
        prompt: The prompt as text.
        messages: The prompt as chat messages; empty where it is plain text.
        columns: The further columns of the prompt's row in the data set.
        base_url: Address of the API of OpenAI; Anthropic's client takes it without the ending /v1.
        api_key: Key of this rollout: calls with it are recorded as the rollout's.
        model: Name of the policy for these calls.
        attempt: How often the rollout was handed out, from 1.
        evaluation: Label of the evaluation that it belongs to; empty in training.
        timeout_s: Time in which it has to end.
    """

    id: str
    prompt: str
    messages: list[dict[str, Any]]
    columns: dict[str, Any]
    base_url: str
    api_key: str
    model: str
    attempt: int
    evaluation: str
    timeout_s: float


Agent: TypeAlias = Callable[[Task], Awaitable[float | None]]
