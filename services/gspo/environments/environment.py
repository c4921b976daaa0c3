"""The one form of an environment: episodes begin with a rollout, answer its turns, and end or go on elsewhere.

A rollout keeps an episode's state as text, `state_json`: the state itself, or the record of a session on a server.
"""

from collections.abc import Awaitable, Callable
from typing import Protocol

from gspo_proto.reward_pb2 import EnvironmentFailure, EnvironmentReply, ResetRequest, StepRequest

# Failures that say nothing of the policy's actions: the rollout may begin anew.
LOST_KINDS = ("environment_unreachable", "session_lost")


class Environment(Protocol):
    """An environment, as a generator asks it. Every failure is a reply's `failure`.

    Those whose state is the rollout's alone inherit the methods of sessions.

    Attributes:
        has_places: Whether an episode may have to wait for a place. Its time begins after that.
    """

    has_places: bool = False

    async def begin(self, request: ResetRequest, timeout_s: float) -> EnvironmentReply:
        """The first turn of an episode.

        Args:
            timeout_s: Time of the environment's own work.
        """

    async def step(self, request: StepRequest, timeout_s: float, task_json: str) -> EnvironmentReply:
        """The answer to a turn of the policy.

        Args:
            task_json: The rollout's task, by which a lost session is made again.
        """

    async def resume(self, state_json: str, task_json: str) -> EnvironmentReply:  # noqa: ARG002 - of sessions
        """Take over an episode that another generator began; the reply has its state alone."""
        return EnvironmentReply(state_json=state_json)

    def end(self, state_json: str) -> None:  # noqa: ARG002 - of sessions
        """End an episode, in the background."""
        return

    def hand_over(
        self,
        state_json: str,  # noqa: ARG002
        is_needed: Callable[[], Awaitable[bool]] | None = None,  # noqa: ARG002
    ) -> None:
        """Leave an episode to the generator that continues its rollout.

        Args:
            is_needed: Asked after a moment whether any generator continues the rollout; if none does, the episode
                ends. None: one does.
        """
        return


def failed(kind: str, text: str) -> EnvironmentReply:
    """The reply in place of an answer."""
    return EnvironmentReply(failure=EnvironmentFailure(kind=kind, text=text))
