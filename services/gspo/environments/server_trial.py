"""The trial of an environment on a server before a run: one session, from its reset to its close.

It starts nothing. A run plays the sessions in services/gspo/environments/server_environment.py.
"""

import asyncio
import json
import uuid
from collections.abc import Coroutine
from typing import Any, TypeVar

from gspo.common.config.gateway import KEY_VARIABLE
from gspo.common.config.reward import EnvironmentConfig
from gspo.common.errors import InputError, warn
from gspo.environments.server_environment import session_server
from gspo.environments.session_server import ServerTroubleError, SessionServer

_FORM = "Correct the server by the form in docs/conversations.md"
_OR_OPENENV = "; OpenEnv's own servers need environment.protocol: openenv"
_FIXES = {
    "environment_unreachable": "Start the server, or correct its address",
    "forbidden": f"Set the environment variable {KEY_VARIABLE} to the server's key",
    "timeout": "Start the server, correct its address, or raise environment.step_timeout_s",
}
T = TypeVar("T")


async def try_server(spec: EnvironmentConfig, where: str, task_json: str, action: str) -> None:
    """Play one session of one step.

    Args:
        where: The environment's place in the configuration.
        task_json: The task of a prompt, as `reset` gets it.

    Raises:
        InputError: The server does not answer, or in another form; or it breaks a rule of sessions.
    """
    trial = _ServerTrial(spec, where)
    try:
        await trial.play(json.loads(task_json), {"text": action, "calls": []} if spec.tools else action)
    finally:
        await trial.server.aclose()


class _ServerTrial:
    """One session, whose troubles are errors of the configuration."""

    def __init__(self, spec: EnvironmentConfig, where: str) -> None:
        self.server: SessionServer = session_server(spec)
        self._spec, self._key, self._session = spec, f"{where}.url", uuid.uuid4().hex

    async def play(self, task: dict[str, Any], action: Any) -> None:
        try:
            await self._in_time(self.server.reset(self._session, task))
        except ServerTroubleError as error:
            if error.kind != "environment_full":
                raise self._refusal(error) from error
            warn(f"{self._key}: every place is taken, so the server was not tried: {error}")
            return
        try:
            await self._step(action)
        finally:
            await self._close()

    async def _step(self, action: Any) -> None:
        try:
            turn = await self._in_time(self.server.step(self._session, 1, action))
        except ServerTroubleError as error:
            if error.kind != "exception":
                raise self._refusal(error) from error
            warn(f"{self._key}: a step with the action {json.dumps(action)}: {error}")
            return
        if not self.server.needs_pings or turn.done:
            return
        if (num_steps := await self._asked(self.server.num_steps(self._session))) != 1:
            raise InputError(self._key, f"{self._spec.url}/state counts {num_steps} steps of 1", _FORM)
        try:
            problem = (
                "" if await self._in_time(self.server.step(self._session, 1, action)) == turn else "another answer"
            )
        except ServerTroubleError as error:
            problem = str(error)
        if problem:
            raise InputError(
                self._key,
                f"a step that was sent again, as one whose answer is lost, had another end: {problem}",
                "Keep the last answer of each session, and give it again for the same request_id",
            )

    async def _close(self) -> None:
        await self._asked(self.server.close(self._session))
        try:
            await self._in_time(self.server.num_steps(self._session))
        except ServerTroubleError as error:
            if error.kind == "session_lost":
                return
            raise self._refusal(error) from error
        rule = f"{self._spec.url} still has a session that was closed: such a server is full some day"
        raise InputError(self._key, rule, "Remove the session in /close, and answer HTTP 404 for one that is not there")

    async def _asked(self, asked: Coroutine[Any, Any, T]) -> T:
        """The answer; any trouble is an error of the configuration."""
        try:
            return await self._in_time(asked)
        except ServerTroubleError as error:
            raise self._refusal(error) from error

    async def _in_time(self, asked: Coroutine[Any, Any, T]) -> T:
        try:
            async with asyncio.timeout(self._spec.step_timeout_s):
                return await asked
        except TimeoutError:
            text = f"{self._spec.url} gave no answer within {self._spec.step_timeout_s:g} s"
            raise ServerTroubleError("timeout", text) from None

    def _refusal(self, error: ServerTroubleError) -> InputError:
        form = _FORM + (_OR_OPENENV if self._spec.protocol == "http" else "")
        return InputError(self._key, str(error), _FIXES.get(error.kind, form))
