"""Relays of connections: from a socket, which may listen in a sandbox's network, to one address outside.

Nothing else leads out of a sandbox. A relay copies bytes and reads none.
"""

from __future__ import annotations

import asyncio
import random
import socket
import ssl
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeAlias

import structlog

from gspo.common.network.credentials import client_context
from gspo.common.service.app import Service
from gspo.common.streams.instances import list_instances
from gspo.common.streams.keys import GATEWAY

_CHUNK_BYTES = 65536
# Connections that wait for a slot; further ones wait at their own end.
_QUEUED = 128
_PAUSE_S = 0.2
_CONNECT_S = 10.0
# A gateway may be restarting; clients see one slow answer.
_GATEWAY_PATIENCE_S, _LOOK_EVERY_S = 60.0, 0.5
log = structlog.get_logger()
Streams: TypeAlias = tuple[asyncio.StreamReader, asyncio.StreamWriter]
# Opens a connection to the address of a relay; OSError where it cannot.
Dial: TypeAlias = Callable[[], Awaitable[Streams]]


class Relay:
    """Passes on every connection to a listening socket; use it as an asynchronous context.

    A connection beyond `slots` is not accepted: it waits in the socket's queue, and costs this process no descriptor.

    Args:
        name: How logs call its address.
        slots: Connections at a time; several relays may share them.
    """

    def __init__(self, listening: socket.socket, name: str, dial: Dial, slots: asyncio.Semaphore) -> None:
        self._listening, self._name, self._dial, self._slots = listening, name, dial, slots
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Relay:
        self._listening.setblocking(False)
        self._listening.listen(_QUEUED)
        self._run(self._accept())
        return self

    async def __aexit__(self, *_error: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._listening.close()

    def _run(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _accept(self) -> None:
        while True:
            await readable(self._listening)
            await self._slots.acquire()
            try:
                connection, _ = self._listening.accept()
            except OSError as error:  # it has gone, or this process has no descriptor free
                self._slots.release()
                if not isinstance(error, BlockingIOError):
                    log.info("relay_failed", address=self._name, reason=str(error))
                    await asyncio.sleep(_PAUSE_S)
                continue
            self._run(self._pass_on(connection)).add_done_callback(lambda _: self._slots.release())

    async def _pass_on(self, connection: socket.socket) -> None:
        try:
            reader, writer = await asyncio.open_connection(sock=connection)
            try:
                await self._connect(reader, writer)
            finally:
                writer.transport.abort()
        except (OSError, TimeoutError) as error:
            log.info("relay_failed", address=self._name, reason=str(error) or type(error).__name__)

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


async def readable(waiting: socket.socket) -> None:
    """Wait until a socket can be read, or accepts."""
    loop, event = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(waiting, event.set)
    try:
        await event.wait()
    finally:
        loop.remove_reader(waiting)


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
