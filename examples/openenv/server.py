"""The guessing game as a server of OpenEnv's: `uvicorn server:app` in this folder, with the packages of its lock file.

Each connection has a `GuessEnvironment` of its own. `environment.url` with `protocol: openenv` plays it.
"""

import sys
from pathlib import Path
from typing import Any

from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

sys.path.append(str(Path(__file__).resolve().parents[1] / "guess"))

from game import reset, step

PLACES = 256


class Guess(Action):
    """The policy's turn."""

    message: str


class Hint(Observation):
    """The game's answer to a guess."""

    text: str


class GuessEnvironment(Environment[Guess, Hint, State]):
    """One game. It draws nothing, so the same actions always have the same answers."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._game: dict[str, Any] = {}
        self._state = State()

    def reset(
        self, seed: int | None = None, episode_id: str | None = None, *, number: int = 0, **_columns: Any
    ) -> Hint:
        """Begin a game; `number` is a column of the data set, and OpenEnv's own page has none."""
        self._game, text = reset({"number": number})
        self._state = State(episode_id=episode_id, step_count=0)
        return Hint(text=text)

    def step(self, action: Guess, timeout_s: float | None = None, **_options: Any) -> Hint:
        """The answer to a guess."""
        self._game, text, reward, done = step(self._game, action.message)
        self._state.step_count += 1
        return Hint(text=text, reward=reward, done=done)

    @property
    def state(self) -> State:
        """The number of guesses."""
        return self._state


app = create_fastapi_app(GuessEnvironment, Guess, Hint, max_concurrent_envs=PLACES)
