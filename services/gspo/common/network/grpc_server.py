"""The gRPC server of every service (health, reflection, the shared token, TLS), and channels to other services.

Every message is checked before its servicer. A message that is too large, malformed, or has too many fields is refused
and counted: gRPC alone would report it nowhere, or with a traceback.
"""

from __future__ import annotations

import hmac
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias

import grpc
from google.protobuf import descriptor_pool
from google.protobuf.message import DecodeError
from grpc_health.v1 import _async as health_aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from gspo.common.config.schema import TlsConfig
from gspo.common.errors import InputError, MalformedEntryError
from gspo.common.network.auth_log import note_refusal
from gspo.common.network.credentials import pem, reachable_host

TOKEN_HEADER = "authorization"  # noqa: S105 - the name of a header
_SCHEME = "Bearer "
_OURS = "/gspo."
_HEALTH = "/grpc.health.v1.Health/"
Context = grpc.aio.ServicerContext[Any, Any]
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
# A Score of 1024 full rollouts of conversations has fewer with four reward functions. With six it has more, and an
# outside caller sends fewer rollouts at a time.
MAX_FIELDS = 50_000
_VARINT, _FIXED64, _BYTES, _GROUP, _END_GROUP, _FIXED32 = range(6)
# A frame of weights is about 1 MiB; a group of long rollouts stays well below this.
MAX_MESSAGE_BYTES = 64 * 2**20
# Initial metadata of a push whose header is admitted: the learner may send the frames.
ADMITTED = ("gspo-admitted", "1")
_OPTIONS: list[tuple[str, int | str]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.so_reuseport", 0),
]


class GrpcGuard(grpc.aio.ServerInterceptor):
    """Refuses calls without the shared token, except health checks, and messages that cannot be decoded.

    Args:
        token: Empty where there is none; every caller is then served.
        may_call: Whether a caller with another token is served too.
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
        credentials = dict(handler_call_details.invocation_metadata or ()).get(TOKEN_HEADER, "")
        if self._expected and not method.startswith(_HEALTH) and not self._knows(credentials):
            return _refusing(handler, method)
        return _CheckedMessages(handler, method).handler() if method.startswith(_OURS) else handler

    def _knows(self, credentials: str | bytes) -> bool:
        if hmac.compare_digest(credentials.encode() if isinstance(credentials, str) else credentials, self._expected):
            return True
        is_token = isinstance(credentials, str) and credentials.startswith(_SCHEME)
        return is_token and self._may_call is not None and self._may_call(str(credentials)[len(_SCHEME) :])


async def refuse_message(context: Context, error: MalformedEntryError, method: str) -> NoReturn:
    """End a call whose message cannot be decoded, or has another schema."""
    note_refusal("grpc", error.kind, caller=str(context.peer()), target=method, detail=str(error))
    await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))


def _refusing(handler: Handler, method: str) -> Handler:
    """A handler that answers UNAUTHENTICATED."""
    why = "the shared token is missing or wrong: send it as 'authorization: Bearer TOKEN'"

    async def refuse(_request: Any, context: Context) -> None:
        note_refusal("grpc", "token", caller=str(context.peer()), target=method, detail=why)
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, why)

    # Messages of a caller without the token are not even decoded.
    if handler.response_streaming:
        return grpc.stream_stream_rpc_method_handler(refuse)
    return grpc.stream_unary_rpc_method_handler(refuse)


class _CheckedMessages:
    """A handler that checks its messages before it decodes them.

    A call with one request is taken as a stream of one, which is the same on the wire. A request that is too large
    never arrives, and only a stream shows that.
    """

    def __init__(self, handler: Handler, method: str) -> None:
        self._handler, self._method = handler, method
        self._serve: Any = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
        self._from_bytes: Any = handler.request_deserializer
        service, _, name = method.strip("/").partition("/")
        self._descriptor = descriptor_pool.Default().FindServiceByName(service).methods_by_name[name].input_type

    def handler(self) -> Handler:
        """The handler that takes its place."""
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
            return MalformedEntryError(f"the message of {self._method} cannot be decoded ({error})", "undecodable")

    async def _readable(self, messages: AsyncIterator[Any], context: Context) -> AsyncIterator[Any]:
        async for message in messages:
            if isinstance(message, MalformedEntryError):
                await refuse_message(context, message, self._method)
            yield message

    async def _request(self, messages: AsyncIterator[Any], context: Context) -> Any:
        """The argument of the servicer's method."""
        readable = self._readable(messages, context)
        if self._handler.request_streaming:
            return readable
        if (message := await anext(readable, None)) is not None:
            return message
        why = f"no message of {self._method} came through: larger than gRPC takes here, or too late"
        return await refuse_message(context, MalformedEntryError(why, "too_large"), self._method)

    async def _one_reply(self, messages: AsyncIterator[Any], context: Context) -> Any:
        return await self._serve(await self._request(messages, context), context)

    async def _many_replies(self, messages: AsyncIterator[Any], context: Context) -> AsyncIterator[Any]:
        async for reply in self._serve(await self._request(messages, context), context):
            yield reply


class TooManyFieldsError(ValueError):
    """A message has more than MAX_FIELDS."""


def check_fields(descriptor: Any, data: bytes) -> None:
    """Refuse a message with more than MAX_FIELDS fields in it, at any depth. Bytes that are no protobuf pass.

    They are counted on the wire, before the message is decoded. Few bytes can be many objects: a field of two bytes
    costs a hundred when it is decoded, and decoding cannot be interrupted.

    Args:
        descriptor: The message's.

    Raises:
        TooManyFieldsError: It has more.
    """
    num_fields = 0
    # Parts of the message that are not counted yet: descriptor, first byte, end.
    parts = [(descriptor, 0, len(data))]
    while parts:
        inner, at, end = parts.pop()
        while at < end:
            num_fields += 1
            if num_fields > MAX_FIELDS:
                raise TooManyFieldsError(f"a message has at most {MAX_FIELDS} fields, and this one has more")
            try:
                at = _next_field(data, at, inner, parts)
            except IndexError:  # cut short: the decoder reports it
                break


def _next_field(data: bytes, at: int, descriptor: Any, parts: list[tuple[Any, int, int]]) -> int:
    """Where the field after the one at `at` begins; a message in it is added to `parts`.

    Raises:
        IndexError: It is cut short, or of an unknown kind.
    """
    tag, at = _varint(data, at)
    kind = tag & 7
    if kind == _VARINT:
        return _varint(data, at)[1]
    if kind in (_FIXED64, _FIXED32):
        return at + (8 if kind == _FIXED64 else 4)
    if kind in (_GROUP, _END_GROUP):  # the fields of a group count as if they stood outside
        return at
    if kind != _BYTES:
        raise IndexError(kind)
    length, at = _varint(data, at)
    field = descriptor.fields_by_number.get(tag >> 3)
    if field is not None and field.message_type is not None and length:
        parts.append((field.message_type, at, min(at + length, len(data))))
    return at + length


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise IndexError(at)


@dataclass(frozen=True)
class GrpcApi:
    """A gRPC servicer as a service offers it.

    Attributes:
        name: Full name, for health and reflection.
        add: Adds the servicer to a server.
        may_call: Whether a caller with this token is served besides those with the shared one.
        grace_s: How long calls in flight may take at the shutdown.
    """

    name: str
    add: Callable[[grpc.aio.Server], None]
    may_call: Callable[[str], bool] | None = None
    grace_s: float = 1.0


class GrpcServer:
    """The server of one gRPC API, with health and reflection.

    Args:
        token: The token that callers must send; empty if none is required.
        tls: Plain text if None or not on.

    Raises:
        InputError: The address cannot be bound.
    """

    def __init__(self, api: GrpcApi, *, host: str, port: int, token: str, tls: TlsConfig | None = None) -> None:
        self._server = grpc.aio.server(options=_OPTIONS, interceptors=[GrpcGuard(token, api.may_call)])
        api.add(self._server)
        self._health = health_aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection((api.name, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server)
        self._names = ("", api.name)
        try:
            if tls is None or not tls.is_on:
                bound = self._server.add_insecure_port(f"{host}:{port}")
            else:
                pair = (pem(tls.key) or b"", pem(tls.cert) or b"")
                bound = self._server.add_secure_port(f"{host}:{port}", grpc.ssl_server_credentials([pair]))
        except RuntimeError as error:
            fix = "End what listens there, or give another port; 0 picks a free one"
            raise InputError("--grpc-port", f"{port} cannot be bound on {host}", fix) from error
        self.address = f"{reachable_host(host)}:{bound}"

    async def start(self) -> None:
        """Serve, and set the health service to SERVING."""
        await self._server.start()
        for name in self._names:
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)

    async def stop(self, grace_s: float) -> None:
        """Refuse new calls, give those in flight `grace_s`, end."""
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace_s)


def open_channel(address: str, tls: TlsConfig | None = None) -> grpc.aio.Channel:
    """A channel to another service; every call on it gives its own timeout and `token_metadata`."""
    if tls is None or not tls.is_on:
        return grpc.aio.insecure_channel(address, options=_OPTIONS)
    named: list[tuple[str, int | str]] = [("grpc.ssl_target_name_override", tls.server_name)] if tls.server_name else []
    return grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(pem(tls.ca)), options=_OPTIONS + named)


def token_metadata(token: str) -> tuple[tuple[str, str], ...]:
    """The metadata of a caller; empty without a token."""
    return ((TOKEN_HEADER, f"Bearer {token}"),) if token else ()
