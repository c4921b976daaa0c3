"""A child process: a policy from one process to another of the same machine, by gRPC and by plain TCP.

What is received is dropped at once, so that the ways are compared and not what is done with the weights.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import socket
import time
from collections.abc import AsyncIterator, Callable
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.harness.child_process import serve
from benchmarks.harness.tables import middle
from benchmarks.push.versions import policy
from gspo.common.host.process_tuning import keep_freed_memory
from gspo.common.network.grpc_server import GrpcServer, open_channel
from gspo.learner.push.policy_weights import FRAME_BYTES, PolicyWeights, WeightUpdate
from gspo_proto import generation_pb2_grpc
from gspo_proto.generation_pb2 import PushResult, WeightFrame

_HOST = "127.0.0.1"
_ROUNDS = 7


def measure(spec: dict[str, Any]) -> dict[str, Any]:
    """Seconds of a whole policy on each way, and of the changes of every learning rate's last version by gRPC."""
    keep_freed_memory()  # as the learner does
    whole = policy(0, 0)
    last = spec["versions"]
    changes = {f"{rate:g}": WeightUpdate(policy(rate, last), policy(rate, last - 1)) for rate in spec["rates"]}
    grpc_s, changes_s = asyncio.run(_by_grpc(whole, changes))
    return {
        "bytes": whole.num_bytes,
        "grpc_s": grpc_s,
        "tcp_s": _by_tcp(whole),
        "changes_s": changes_s,
    }


async def _by_grpc(whole: PolicyWeights, changes: dict[str, WeightUpdate]) -> tuple[float, dict[str, float]]:
    with ReceiverProcess(_receive_grpc) as address:
        async with open_channel(address) as channel:
            stub = generation_pb2_grpc.GenerationStub(channel)

            async def seconds(frames: Callable[[], WeightUpdate]) -> float:
                found = []
                for _ in range(_ROUNDS):
                    began = time.monotonic()
                    await stub.PushWeights(aiter(frames()), timeout=60)
                    found.append(time.monotonic() - began)
                return middle(found[1:])

            whole_s = await seconds(lambda: WeightUpdate(whole))
            return whole_s, {rate: await seconds(lambda made=made: made) for rate, made in changes.items()}


def _by_tcp(whole: PolicyWeights) -> float:
    found = []
    with ReceiverProcess(_receive_tcp) as address:
        host, port = address.split(":")
        for _ in range(_ROUNDS):
            with socket.create_connection((host, int(port))) as connection:
                began = time.monotonic()
                for bits in whole.bits.values():
                    for start in range(0, bits.nbytes, FRAME_BYTES):
                        connection.sendall(memoryview(bits).cast("B")[start : start + FRAME_BYTES])
                connection.shutdown(socket.SHUT_WR)
                connection.recv(1)
                found.append(time.monotonic() - began)
    return middle(found[1:])


class ReceiverProcess:
    """A process that listens; entering the block gives its address."""

    def __init__(self, receive: Callable[[Connection], None]) -> None:
        context = multiprocessing.get_context("spawn")
        self._ours, theirs = context.Pipe()
        self._process = context.Process(target=receive, args=(theirs,), daemon=True)

    def __enter__(self) -> str:
        self._process.start()
        return str(self._ours.recv())

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.join(10)


def _receive_tcp(address_pipe: Connection) -> None:
    buffer = bytearray(FRAME_BYTES)
    with socket.create_server((_HOST, 0)) as listening:
        address_pipe.send(f"{_HOST}:{listening.getsockname()[1]}")
        while True:
            connection, _ = listening.accept()
            with connection:
                while connection.recv_into(buffer):
                    pass
                connection.sendall(b"!")


class DiscardingServicer(generation_pb2_grpc.GenerationServicer):
    async def PushWeights(self, request_iterator: AsyncIterator[WeightFrame], context: Any) -> PushResult:  # noqa: ARG002
        async for _ in request_iterator:
            pass
        return PushResult()


def _receive_grpc(address_pipe: Connection) -> None:
    keep_freed_memory()  # as the generation service does
    asyncio.run(_serve_grpc(address_pipe))


async def _serve_grpc(address_pipe: Connection) -> None:
    server = GrpcServer(
        lambda server: generation_pb2_grpc.add_GenerationServicer_to_server(DiscardingServicer(), server),
        ("gspo.Generation",),
        host=_HOST,
        port=0,
        token="",
    )
    await server.start()
    address_pipe.send(server.address)
    await asyncio.Event().wait()


if __name__ == "__main__":
    serve(measure)
