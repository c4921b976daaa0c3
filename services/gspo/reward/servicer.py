"""The gRPC servicer of proto/gspo_proto/reward.proto: scores on request, and the steps of environments."""

from collections.abc import Awaitable
from typing import Any

import grpc

from gspo.common.errors import MalformedEntryError
from gspo.common.network.grpc_server import refuse_message
from gspo.common.streams.entries import check_message
from gspo.reward.functions.arguments import NotAskableError
from gspo.reward.functions.environment_steps import EnvironmentSteps, Turn
from gspo.reward.functions.library import Function, UnknownFunctionError
from gspo.reward.sandbox.calls import CallError
from gspo.reward.scoring.scorer import Scorer
from gspo_proto import reward_pb2, reward_pb2_grpc

GRPC_SERVICE = reward_pb2.DESCRIPTOR.services_by_name["Reward"].full_name
# Bounds of one Score: far beyond a batch, and low enough that reading it delays no other call.
MAX_ROLLOUTS, MAX_SCORE_BYTES, MAX_FUNCTIONS = 1024, 32 * 2**20, 64
# An environment may return as much.
MAX_JSON_CHARS = 4 * 2**20
Context = grpc.aio.ServicerContext[Any, Any]


class RewardServicer(reward_pb2_grpc.RewardServicer):
    """Scores, resets and steps."""

    def __init__(self, scorer: Scorer, *, session: str) -> None:
        self._scorer = scorer
        self._steps = EnvironmentSteps(scorer.library.usage, session=session)

    async def Score(self, request: reward_pb2.ScoreRequest, context: Context) -> reward_pb2.ScoreReply:
        """A score for each rollout, in their order."""
        try:
            _check_size(request)
            for rollout in request.rollouts:
                check_message(rollout)
        except MalformedEntryError as error:
            await refuse_message(context, error, "Score")
        return reward_pb2.ScoreReply(scores=await self._scorer.score(request.rollouts))

    async def ResetEnvironment(self, request: reward_pb2.ResetRequest, context: Context) -> reward_pb2.EnvironmentReply:
        """The first state and observation of a task."""
        function = await self._find(request, context)
        return await _reply(function, self._steps.reset(function, request.task_json), context)

    async def StepEnvironment(self, request: reward_pb2.StepRequest, context: Context) -> reward_pb2.EnvironmentReply:
        """The state, observation and reward after an action."""
        function = await self._find(request, context)
        turn = self._steps.step(function, request.state_json, request.action, request.calls_json)
        return await _reply(function, turn, context)

    async def _find(self, request: reward_pb2.ResetRequest | reward_pb2.StepRequest, context: Context) -> Function:
        """The environment of a request whose JSON has a size that is read."""
        for field in ("task_json", "state_json", "calls_json"):
            if (length := len(getattr(request, field, ""))) > MAX_JSON_CHARS:
                why = f"{field} has {length} characters, and at most {MAX_JSON_CHARS} are taken"
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, why)
        name = request.environment
        try:
            function = await self._scorer.library.find(name, request.version)
        except UnknownFunctionError as error:
            await context.abort(grpc.StatusCode.NOT_FOUND, str(error))
        if function.code.kind != "environment":
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"{name} is a reward function, not an environment")
        return function


def _check_size(request: reward_pb2.ScoreRequest) -> None:
    """Refuse a request that would take long before its first call.

    Raises:
        MalformedEntryError: It is beyond a bound of one Score.
    """
    functions = {(use.name, use.version) for rollout in request.rollouts for use in rollout.rewards}
    sizes = {
        "rollouts": (len(request.rollouts), MAX_ROLLOUTS),
        "bytes": (request.ByteSize(), MAX_SCORE_BYTES),
        "functions": (len(functions), MAX_FUNCTIONS),
    }
    for unit, (number, most) in sizes.items():
        if number > most:
            raise MalformedEntryError(f"{number} {unit} in one Score, and at most {most} are scored", "too_large")


async def _reply(function: Function, step: Awaitable[Turn], context: Context) -> reward_pb2.EnvironmentReply:
    version = function.code.version
    try:
        turn = await step
    except NotAskableError as error:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
    except CallError as error:
        failure = reward_pb2.EnvironmentFailure(kind=error.kind, text=str(error), traceback=error.traceback)
        return reward_pb2.EnvironmentReply(version=version, failure=failure)
    return reward_pb2.EnvironmentReply(
        state_json=turn.state_json,
        observation_json=turn.observation_json,
        reward=turn.reward,
        done=turn.done,
        version=version,
    )
