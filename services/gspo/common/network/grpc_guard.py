"""What every gRPC call passes before its service hears it: the shared token, and messages that can be read.

A message that is too large, not protobuf, or of fields without number is refused and counted; gRPC alone would call
the second UNKNOWN with a traceback, and say nothing of the others.
"""

from __future__ import annotations

import hmac
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NoReturn, TypeAlias

import grpc
from google.protobuf import descriptor_pool
from google.protobuf.message import DecodeError

from gspo.common.network.auth_log import note_refusal
from gspo.common.network.message_size import TooManyFieldsError, check_fields
from gspo.common.streams.entries import MalformedEntryError

TOKEN_HEADER = "authorization"  # noqa: S105 - the name of a header
_SCHEME = "Bearer "
_OURS = "/gspo."
_HEALTH = "/grpc.health.v1.Health/"
Context = grpc.aio.ServicerContext[Any, Any]
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


class GrpcGuard(grpc.aio.ServerInterceptor):
    """Refuses calls without the shared token, but for health, which probes ask; and what cannot be read.

    Args:
        token: Empty where there is none, and nothing is asked for.
        may_call: Whether a caller with another token is heard too.
    """

    def __init__(self, token: str, may_call: Callable[[str], bool] | None = None) -> None:
        self._expected = f"{_SCHEME}{token}".encode() if token else b""
        self._may_call = may_call

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any
    ) -> Handler | None:
        """The handler, behind the checks."""
        method: str = handler_call_details.method
        handler: Handler | None = await continuation(handler_call_details)
        if handler is None:
            return None
        given = dict(handler_call_details.invocation_metadata or ()).get(TOKEN_HEADER, "")
        if self._expected and not method.startswith(_HEALTH) and not self._knows(given):
            return _refusing(handler, method)
        return _CheckedMessages(handler, method).handler() if method.startswith(_OURS) else handler

    def _knows(self, given: str | bytes) -> bool:
        if _same(given, self._expected):
            return True
        is_token = isinstance(given, str) and given.startswith(_SCHEME)
        return is_token and self._may_call is not None and self._may_call(str(given)[len(_SCHEME) :])


async def refuse_message(context: Context, error: MalformedEntryError, method: str) -> NoReturn:
    """End a call whose message is none of ours."""
    note_refusal("grpc", error.kind, caller=str(context.peer()), asked=method, detail=str(error))
    await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))


def _same(given: str | bytes, expected: bytes) -> bool:
    return hmac.compare_digest(given.encode() if isinstance(given, str) else given, expected)


def _refusing(handler: Handler, method: str) -> Handler:
    """A handler that answers UNAUTHENTICATED."""
    why = "the shared token is missing or wrong: send it as 'authorization: Bearer TOKEN'"

    async def refuse(_request: Any, context: Context) -> None:
        note_refusal("grpc", "token", caller=str(context.peer()), asked=method, detail=why)
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, why)

    # What a caller without the token sends is not even decoded.
    if handler.response_streaming:
        return grpc.stream_stream_rpc_method_handler(refuse)
    return grpc.stream_unary_rpc_method_handler(refuse)


class _CheckedMessages:
    """A handler behind the reading of its messages.

    A call with one request is taken as a stream of one, which is the same on the wire: only so a request that never
    comes through, because it is too large, is seen here at all.
    """

    def __init__(self, handler: Handler, method: str) -> None:
        self._handler, self._method = handler, method
        self._serve: Any = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
        self._from_bytes: Any = handler.request_deserializer
        service, _, name = method.strip("/").partition("/")
        self._descriptor = descriptor_pool.Default().FindServiceByName(service).methods_by_name[name].input_type

    def handler(self) -> Handler:
        """What stands in the handler's place."""
        if self._handler.response_streaming:
            many = grpc.stream_stream_rpc_method_handler
            return many(self._many_replies, self._decode, self._handler.response_serializer)
        return grpc.stream_unary_rpc_method_handler(self._one_reply, self._decode, self._handler.response_serializer)

    def _decode(self, data: bytes) -> Any:
        try:
            check_fields(self._descriptor, data)
            return self._from_bytes(data)
        except TooManyFieldsError as error:
            return MalformedEntryError(str(error), "too_large")
        except DecodeError as error:
            return MalformedEntryError(f"the message of {self._method} cannot be read ({error})", "undecodable")

    async def _readable(self, messages: AsyncIterator[Any], context: Context) -> AsyncIterator[Any]:
        async for message in messages:
            if isinstance(message, MalformedEntryError):
                await refuse_message(context, message, self._method)
            yield message

    async def _request(self, messages: AsyncIterator[Any], context: Context) -> Any:
        """What the service is called with."""
        readable = self._readable(messages, context)
        if self._handler.request_streaming:
            return readable
        if (message := await anext(readable, None)) is not None:
            return message
        why = f"no message of {self._method} came through: larger than gRPC takes here, or late"
        return await refuse_message(context, MalformedEntryError(why, "too_large"), self._method)

    async def _one_reply(self, messages: AsyncIterator[Any], context: Context) -> Any:
        return await self._serve(await self._request(messages, context), context)

    async def _many_replies(self, messages: AsyncIterator[Any], context: Context) -> AsyncIterator[Any]:
        async for reply in self._serve(await self._request(messages, context), context):
            yield reply
