"""Relays of connections: from a socket, which may listen in a sandbox's network, to one address outside.

Nothing else leads out of a sandbox. A relay copies bytes and reads none.
"""

from __future__ import annotations

import asyncio
import random
import socket
import ssl
import time
from collections.abc import Awaitable, Callable
from typing import TypeAlias

import structlog

from gspo.common.network.credentials import client_context
from gspo.common.service.app import Service
from gspo.common.streams.instances import list_instances
from gspo.common.streams.keys import GATEWAY

_CHUNK_BYTES = 65536
# Connections of one sandbox at a time; further ones wait.
MAX_CONNECTIONS = 64
_CONNECT_S = 10.0
# A gateway may be restarting; clients see one slow answer.
_GATEWAY_PATIENCE_S, _LOOK_EVERY_S = 60.0, 0.5
log = structlog.get_logger()
Streams: TypeAlias = tuple[asyncio.StreamReader, asyncio.StreamWriter]
# Opens a connection to the address of a relay; OSError where it cannot.
Dial: TypeAlias = Callable[[], Awaitable[Streams]]


class Relay:
    """Passes on every connection to a listening socket; use it as an asynchronous context.

    Args:
        name: Of its address, in logs.
        max_connections: At a time; further ones wait.
    """

    def __init__(self, listening: socket.socket, name: str, dial: Dial, max_connections: int = MAX_CONNECTIONS) -> None:
        self._listening, self._name, self._dial = listening, name, dial
        self._slots = asyncio.Semaphore(max_connections)
        self._server: asyncio.Server | None = None
        self._passing: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Relay:
        self._server = await asyncio.start_server(self._pass_on, sock=self._listening)
        return self

    async def __aexit__(self, *_error: object) -> None:
        if self._server is not None:
            self._server.close()
        for task in self._passing:
            task.cancel()
        await asyncio.gather(*self._passing, return_exceptions=True)

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - the server runs this as a task
        self._passing.add(task)
        try:
            async with self._slots:
                await self._connect(reader, writer)
        except (OSError, TimeoutError) as error:
            log.info("relay_failed", address=self._name, reason=str(error) or type(error).__name__)
        except asyncio.CancelledError:  # by the end of the relay alone; asyncio would log it as an error of the server
            pass
        finally:
            self._passing.discard(task)
            writer.transport.abort()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await self._dial()
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(_copy(reader, far_writer))
                group.create_task(_copy(far_reader, writer))
        except* OSError:  # one end is gone, and so is the connection
            pass
        finally:
            far_writer.transport.abort()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy to the end of the stream, and pass the end on."""
    while data := await reader.read(_CHUNK_BYTES):
        writer.write(data)
        await writer.drain()
    if writer.can_write_eof():
        writer.write_eof()
    else:  # TLS: an end in one direction ends both
        writer.close()


def dial_host(address: str) -> Dial:
    """A host of `agent.hosts`, as HOST:PORT."""
    host, _, port = address.rpartition(":")

    async def dial() -> Streams:
        async with asyncio.timeout(_CONNECT_S):
            return await asyncio.open_connection(host, int(port))

    return dial


def dial_gateway(service: Service) -> Dial:
    """Any gateway of the run, over TLS where the run has it; waits for one that is starting."""
    tls = service.config.services.tls
    context: ssl.SSLContext | None = client_context(tls) if tls.is_on else None

    async def dial() -> Streams:
        deadline_s, problem = time.monotonic() + _GATEWAY_PATIENCE_S, "the run has no gateway"
        while True:
            instances = await list_instances(service.redis, service.keys, GATEWAY)
            random.shuffle(instances)
            for instance in instances:
                host, _, port = instance.http.rpartition(":")
                name = tls.server_name or host if context else None
                try:
                    async with asyncio.timeout(_CONNECT_S):
                        return await asyncio.open_connection(
                            host.strip("[]"), int(port), ssl=context, server_hostname=name
                        )
                except (OSError, TimeoutError) as error:
                    problem = f"{instance.name} at {instance.http} does not answer ({error or type(error).__name__})"
            if time.monotonic() >= deadline_s:
                raise ConnectionError(problem)
            await asyncio.sleep(_LOOK_EVERY_S)

    return dial
