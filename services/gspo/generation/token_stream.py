"""One request of an outside caller: its tokens in pieces, while the engine samples them beside the run's rollouts."""

import asyncio
from collections.abc import AsyncGenerator

from gspo.common.streams.entries import tokens_between
from gspo.generation.engine.api import Completion, EngineLike, Tokens
from gspo.generation.rollout.driver import RolloutAbortedError, engine_sampling
from gspo_proto.generation_pb2 import SampledTokens, SampleRequest

# How often the engine's records are read: until the first token, which a person waits for, and after it.
_FIRST_S, _LATER_S = 0.005, 0.05


async def stream_tokens(engine: EngineLike, request: SampleRequest) -> AsyncGenerator[SampledTokens, None]:
    """The pieces of an answer; the last one has `finish`. Closing the iterator ends the request in the engine.

    Raises:
        ValueError: The engine refuses the request.
        RolloutAbortedError: The request was ended from outside.
        EngineBrokenError: The engine cannot serve any more.
    """
    sampling = engine_sampling(request.sampling, request.sampling.max_tokens, 0)
    answer = asyncio.ensure_future(engine.generate(request.request_id, list(request.token_ids), sampling))
    num_sent = 0
    try:
        while not answer.done():
            await asyncio.wait([answer], timeout=_LATER_S if num_sent else _FIRST_S)
            if not answer.done() and engine.num_sampled(request.request_id) > num_sent:
                piece = _piece(engine.partial_output(request.request_id, num_sent))
                num_sent += len(piece.token_ids)
                yield piece
        completion = await answer
        if completion.finish == "aborted":
            raise RolloutAbortedError(f"request {request.request_id} was aborted in the engine")
        yield _piece(completion, num_sent)
    finally:
        answer.cancel()


def _piece(tokens: Tokens, num_sent: int = 0) -> SampledTokens:
    finish = tokens.finish if isinstance(tokens, Completion) else ""
    return SampledTokens(**tokens_between(tokens, num_sent), finish=finish)
