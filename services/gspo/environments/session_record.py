"""The record of a session on a server: its id, its steps, and the actions by which it can be made again.

It is a rollout's state, saved with its tokens. The server alone has the state of the environment.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from gspo.environments.session_server import ServerTurn

_DIGEST_CHARS = 16


@dataclass(frozen=True)
class SessionRecord:
    """A session and what it has had.

    Attributes:
        session: Its id.
        num_steps: Steps that it has had.
        actions: Those of its steps; none are kept without `environment.replay`.
        answers: Digests of the answers to reset and steps; None without `environment.replay`.
    """

    session: str
    num_steps: int
    actions: tuple[Any, ...] = ()
    answers: tuple[str, ...] | None = None

    @classmethod
    def begun(cls, session: str, turn: ServerTurn, *, keeps_actions: bool) -> SessionRecord:
        """A session after its reset."""
        return cls(session, 0, (), (_digest(turn),) if keeps_actions else None)

    @classmethod
    def from_json(cls, text: str) -> SessionRecord:
        """The record in a rollout's state."""
        state = json.loads(text)
        answers = state.get("answers")
        return cls(
            state["episode_id"],
            state["step_count"],
            tuple(state.get("actions", ())),
            None if answers is None else tuple(answers),
        )

    def to_json(self) -> str:
        """The text that `from_json` reads."""
        state: dict[str, Any] = {"episode_id": self.session, "step_count": self.num_steps}
        if self.answers is not None:
            state |= {"actions": self.actions, "answers": self.answers}
        return json.dumps(state)

    def after(self, action: Any, turn: ServerTurn) -> SessionRecord:
        """The record after one more step."""
        if self.answers is None:
            return SessionRecord(self.session, self.num_steps + 1)
        answers = (*self.answers, _digest(turn))
        return SessionRecord(self.session, self.num_steps + 1, (*self.actions, action), answers)

    def is_beginning_of(self, other: SessionRecord) -> bool:
        """Whether another session has begun with the same actions and answers."""
        mine, others = self.answers or (), other.answers or ()
        return self.actions == other.actions[: len(self.actions)] and mine == others[: len(mine)]


def _digest(turn: ServerTurn) -> str:
    answer = json.dumps([turn.observation, turn.reward, turn.done], sort_keys=True)
    return hashlib.sha256(answer.encode()).hexdigest()[:_DIGEST_CHARS]
