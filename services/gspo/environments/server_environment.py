"""The sessions of environments on servers: each begins with a rollout, is pinged while the policy writes, and closed.

The server keeps the state, so a rollout's state here is the record of its session, saved with its tokens. A full
server is waited for, an unreachable one for a while. If the environment is declared deterministic
(`environment.replay`), a lost session is replayed: another one gets its recorded actions. Otherwise it fails the
rollout's attempt, no more: episodes.py begins the rollout anew.

waits for: the server. unblocked by: its answer, a place on it, reach_timeout_s.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import structlog

from gspo.common.config.reward import EnvironmentConfig, RewardConfig
from gspo.common.config.sources import Source, remote_environments
from gspo.common.plain_json import whole_text
from gspo.common.tasks import wait_until_set
from gspo.common.telemetry import metrics
from gspo.environments.environment import Environment, failed
from gspo.environments.openenv_server import OpenEnvSessions
from gspo.environments.session_server import HttpSessions, ServerTroubleError, ServerTurn, SessionServer
from gspo_proto.reward_pb2 import EnvironmentReply, ResetRequest, StepRequest

# A full server names its own time; an unreachable one is tried again after a pause that doubles.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 3.0
_SAY_EVERY_S = 30.0
# Of one ping or close. A server that does not answer ends its sessions by their time to live.
_SHORT_TIMEOUT_S = 5.0
_CLOSE_PAUSES_S = (0.2, 1.0, 0.0)
# After a cancellation, until it is known who has the rollout now.
_SETTLED_S = 2.0
_SHUTDOWN_S = 10.0
_DIGEST_CHARS = 16
log = structlog.get_logger()
T = TypeVar("T")


@dataclass(frozen=True)
class SessionRecord:
    """A session, and the actions by which it can be made again.

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


class ServerEnvironment(Environment):
    """Plays the sessions of one server.

    Args:
        server: Asks it; by the configuration's kind by default.
    """

    has_places = True

    def __init__(self, config: EnvironmentConfig, server: SessionServer | None = None) -> None:
        self._config, self._server = config, server or session_server(config)
        self._version = hashlib.sha256(config.place.encode()).hexdigest()
        self._pings: dict[str, asyncio.Task[None] | None] = {}  # of each session that is played here
        self._closing: set[asyncio.Task[None]] = set()
        self._ending = asyncio.Event()
        self._next_message_s = 0.0

    async def begin(self, request: ResetRequest, timeout_s: float) -> EnvironmentReply:
        """Begin a session, as soon as the server has a place: a full one is waited for as long as a rollout may take.

        Args:
            timeout_s: Time of one answer.
        """
        session = uuid.uuid4().hex
        try:
            task = json.loads(request.task_json)
            with metrics.ENVIRONMENT_SECONDS.labels("reset").time():
                turn = await self._ask("reset", timeout_s, lambda: self._server.reset(session, task))
        except BaseException as error:
            self._end(session)  # the server may have begun it, and the answer was lost
            if isinstance(error, ServerTroubleError):
                return failed(error.kind, str(error))
            raise
        self._keep(session)
        return self._reply(self._begun(session, turn), turn)

    async def step(self, request: StepRequest, timeout_s: float, task_json: str) -> EnvironmentReply:
        """The server's answer to a turn, maybe of a session that replaces a lost one."""
        record = SessionRecord.from_json(request.state_json)
        calls = json.loads(request.calls_json) if request.calls_json else None
        action = request.action if calls is None else {"text": request.action, "calls": calls}
        try:
            with metrics.ENVIRONMENT_SECONDS.labels("step").time():
                try:
                    return await self._step(record, action, timeout_s)
                except ServerTroubleError as error:
                    record = await self._replayed(record, task_json, error)
                try:
                    return await self._step(record, action, timeout_s)
                except BaseException:
                    self._end(record.session)  # the rollout does not know it
                    raise
        except ServerTroubleError as error:
            return failed(error.kind, str(error))

    async def resume(self, state_json: str, task_json: str) -> EnvironmentReply:
        """Take over a session that another generator began, unless it has gone further there than the rollout."""
        record = SessionRecord.from_json(state_json)
        if record.session in self._pings:
            return EnvironmentReply(state_json=state_json)
        if self._server.is_shared:
            self._keep(record.session)
            return EnvironmentReply(state_json=state_json)
        try:
            try:
                await self._check_steps(record)
                self._keep(record.session)
            except ServerTroubleError as error:
                record = await self._replayed(record, task_json, error)
        except ServerTroubleError as error:
            return failed(error.kind, str(error))
        return EnvironmentReply(state_json=record.to_json())

    def end(self, state_json: str) -> None:
        self._end(SessionRecord.from_json(state_json).session)

    def hand_over(self, state_json: str, is_needed: Callable[[], Awaitable[bool]] | None = None) -> None:
        session = SessionRecord.from_json(state_json).session
        if not self._server.needs_pings:  # it is this generator's connection
            self._end(session)
            return
        self._stop_pings(session)
        if is_needed is not None:
            self._in_background(self._close_unless(is_needed, session))

    async def aclose(self) -> None:
        """Wait for the sessions that are being closed, and end the connections."""
        self._ending.set()
        for session in list(self._pings):
            self._end(session)
        if self._closing:
            _, late = await asyncio.wait(self._closing, timeout=_SHUTDOWN_S)
            for task in late:
                task.cancel()
        await self._server.aclose()

    async def _step(self, record: SessionRecord, action: Any, timeout_s: float) -> EnvironmentReply:
        number = record.num_steps + 1
        turn = await self._ask("step", timeout_s, lambda: self._server.step(record.session, number, action))
        return self._reply(record.after(action, turn), turn)

    async def _check_steps(self, record: SessionRecord) -> None:
        """Raise `session_lost` unless the session has had the rollout's steps and no more."""
        timeout_s, session = self._config.step_timeout_s, record.session
        done = await self._ask("state", timeout_s, lambda: self._server.num_steps(session))
        if done != record.num_steps:
            text = f"session {session} has had {done} steps, and the saved rollout has {record.num_steps}"
            raise ServerTroubleError("session_lost", text)

    def _begun(self, session: str, turn: ServerTurn) -> SessionRecord:
        return SessionRecord.begun(session, turn, keeps_actions=self._config.replay)

    async def _replayed(self, record: SessionRecord, task_json: str, error: ServerTroubleError) -> SessionRecord:
        """Another session in place of a lost one, which has had the same actions and given the same answers.

        Raises:
            ServerTroubleError: `error`, where nothing is lost or the environment is not declared deterministic; or the
                trouble of the replay, `session_lost` where an answer differs.
        """
        if error.kind != "session_lost" or record.answers is None:
            raise error
        self._end(record.session)
        session, timeout_s = uuid.uuid4().hex, self._config.step_timeout_s
        try:
            task = json.loads(task_json)
            turn = await self._ask("reset", timeout_s, lambda: self._server.reset(session, task))
            replayed = self._checked(record, self._begun(session, turn))
            for number, action in enumerate(record.actions, start=1):
                turn = await self._ask("step", timeout_s, partial(self._server.step, session, number, action))
                replayed = self._checked(record, replayed.after(action, turn))
        except BaseException:
            self._end(session)
            raise
        self._keep(session)
        metrics.SESSIONS_REPLAYED.inc()
        log.info("session_replayed", session=session, instead_of=record.session, num_steps=replayed.num_steps)
        return replayed

    def _checked(self, record: SessionRecord, replayed: SessionRecord) -> SessionRecord:
        """The second record, where its last answer is that of the first one."""
        if replayed.is_beginning_of(record):
            return replayed
        what = f"step {replayed.num_steps}" if replayed.num_steps else "reset"
        text = f"{self._config.url} answered {what} of a replay otherwise than in session {record.session}"
        log.warning("replay_differs", url=self._config.url, detail=f"{text}: environment.replay should be false")
        raise ServerTroubleError("session_lost", text)

    async def _ask(self, what: str, timeout_s: float, ask: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """The server's answer, which is asked for again while it is full or unreachable."""
        began_s, unreached_s, pause_s = time.monotonic(), 0.0, _FIRST_PAUSE_S
        while True:
            tried_s = time.monotonic()
            try:
                async with asyncio.timeout(timeout_s):
                    return await self._answered(ask)
            except TimeoutError:
                text = f"{self._config.place} gave no answer to a {what} within {timeout_s:g} s"
                raise ServerTroubleError("timeout", f"{text} (environment.step_timeout_s)") from None
            except ServerTroubleError as error:
                if error.is_final or error.kind not in ("environment_full", "environment_unreachable"):
                    raise
                problem = error
            metrics.ENVIRONMENT_RETRIES.inc()
            if problem.kind == "environment_full":
                unreached_s, wait_s = 0.0, _spread(problem.retry_after_s, 1.5)
                self._check_patience(problem, time.monotonic() + wait_s - began_s, "total_timeout_s")
            else:
                unreached_s = unreached_s or tried_s
                wait_s, pause_s = _spread(pause_s, 2.0), min(2 * pause_s, _LONGEST_PAUSE_S)
                self._check_patience(problem, time.monotonic() + wait_s - unreached_s, "reach_timeout_s")
            await asyncio.sleep(wait_s)

    async def _answered(self, ask: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """The server's answer. An exception of a library that reads it is a trouble of this rollout alone."""
        try:
            return await ask()
        except (ServerTroubleError, TimeoutError):
            raise
        except Exception as error:
            log.warning("environment_answer_unread", server=self._config.place, exc_info=error)
            text = f"{self._config.place} gave an answer that cannot be read ({type(error).__name__}: {error})"
            raise ServerTroubleError("exception", str(whole_text(text))) from error

    def _check_patience(self, problem: ServerTroubleError, waited_s: float, key: str) -> None:
        """Log the wait now and then; one that would be longer than its key allows is a failure."""
        limit_s = getattr(self._config, key)
        if waited_s > limit_s:
            text = f"{problem.kind} for {limit_s:g} s (environment.{key}): {problem}"
            raise ServerTroubleError(problem.kind, text) from problem
        if time.monotonic() >= self._next_message_s:
            self._next_message_s = time.monotonic() + _SAY_EVERY_S
            log.warning(problem.kind, server=self._config.place, detail=f"waiting {limit_s:g} s at most: {problem}")

    def _reply(self, record: SessionRecord, turn: ServerTurn) -> EnvironmentReply:
        return EnvironmentReply(
            state_json=record.to_json(),
            observation_json=json.dumps(turn.observation),
            reward=turn.reward,
            done=turn.done,
            version=self._version,
        )

    def _keep(self, session: str) -> None:
        self._pings[session] = asyncio.create_task(self._ping(session)) if self._server.needs_pings else None
        metrics.ENVIRONMENT_SESSIONS.set(len(self._pings))

    async def _ping(self, session: str) -> None:
        while True:
            await asyncio.sleep(self._config.ping_every_s)
            try:
                async with asyncio.timeout(_SHORT_TIMEOUT_S):
                    await self._answered(partial(self._server.num_steps, session))
            except (ServerTroubleError, TimeoutError) as error:
                log.debug("environment_ping_failed", session=session, reason=str(error))  # the next step has the reason
                if isinstance(error, ServerTroubleError) and error.kind == "session_lost":
                    self._pings[session] = None
                    return

    def _stop_pings(self, session: str) -> None:
        if ping := self._pings.pop(session, None):
            ping.cancel()
        metrics.ENVIRONMENT_SESSIONS.set(len(self._pings))

    def _end(self, session: str) -> None:
        self._stop_pings(session)
        self._in_background(self._close(session))

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _close(self, session: str) -> None:
        reason = ""
        for pause_s in _CLOSE_PAUSES_S:
            try:
                async with asyncio.timeout(_SHORT_TIMEOUT_S):
                    await self._answered(partial(self._server.close, session))
                return
            except (ServerTroubleError, TimeoutError) as error:
                reason = str(error)
            await wait_until_set(self._ending, pause_s)
        log.warning("session_not_closed", session=session, reason=reason, detail="its time to live ends it")

    async def _close_unless(self, is_needed: Callable[[], Awaitable[bool]], session: str) -> None:
        await wait_until_set(self._ending, _SETTLED_S)
        if not await is_needed():
            await self._close(session)


@asynccontextmanager
async def environments_on_servers(
    sources: Sequence[Source], reward: RewardConfig
) -> AsyncIterator[Mapping[str, ServerEnvironment]]:
    """The environments of a run that are on servers, by their names in tasks; their sessions end with the block.

    Args:
        reward: Has the least confinement level of an MCP server's command.
    """
    environments = {
        name: ServerEnvironment(environment, session_server(environment, reward))
        for name, (_, environment) in remote_environments(sources).items()
    }
    try:
        yield environments
    finally:
        await asyncio.gather(*(environment.aclose() for environment in environments.values()))


def session_server(environment: EnvironmentConfig, reward: RewardConfig | None = None) -> SessionServer:
    """The client of an environment on a server, by its kind; `reward` as above."""
    if environment.kind == "mcp":
        from gspo.environments.mcp.mcp_sessions import McpSessions  # here: importing the package mcp takes a second

        return McpSessions(environment, (reward or RewardConfig()).sandbox_minimum)
    if environment.is_openenv:
        return OpenEnvSessions(
            environment.url or "",
            action_field=environment.action_field,
            observation_field=environment.observation_field,
            ping_every_s=environment.ping_every_s,
        )
    return HttpSessions(environment.url or "")


def _digest(turn: ServerTurn) -> str:
    answer = json.dumps([turn.observation, turn.reward, turn.done], sort_keys=True)
    return hashlib.sha256(answer.encode()).hexdigest()[:_DIGEST_CHARS]


def _spread(seconds: float, most: float) -> float:
    """So long, or up to `most` times as long: rollouts that wait together do not ask together."""
    return seconds * random.uniform(1.0, most)  # noqa: S311 - it hides nothing
