"""A policy between two processes of a machine by gRPC and by plain TCP, and the encoding of its changes.

The receiver drops everything at once, so that only the ways are compared. Only child processes import it.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import socket
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.push.versions import load_version
from gspo.common.host.process_tuning import keep_freed_memory
from gspo.common.network.grpc_server import GrpcApi, GrpcServer, open_channel
from gspo.common.weights.changes import apply_changes, pack_changes
from gspo.common.weights.manifest import policy_digest
from gspo.learner.push.policy_weights import PolicyWeights
from gspo.learner.push.replicas import push_weights
from gspo.learner.push.weight_updates import FRAME_BYTES, PackedChanges, WholePolicy
from gspo_proto import generation_pb2_grpc
from gspo_proto.generation_pb2 import PushResult, WeightFrame

_HOST = "127.0.0.1"
_ROUNDS, _PACK_ROUNDS = 7, 3


def send(folder: str, rates: Sequence[float], version: int) -> dict[str, Any]:
    """Seconds of a whole policy on each way, and of the changes of every learning rate's version by gRPC."""
    keep_freed_memory()  # as the learner does
    path = Path(folder)
    whole = load_version(path, 0, 0)
    changes = {
        f"{rate:g}": PackedChanges(load_version(path, rate, version), load_version(path, rate, version - 1))
        for rate in rates
    }
    grpc_s, changes_s = asyncio.run(_by_grpc(whole, changes))
    return {"bytes": whole.num_bytes, "grpc_s": grpc_s, "tcp_s": _by_tcp(whole), "changes_s": changes_s}


async def _by_grpc(whole: PolicyWeights, changes: dict[str, PackedChanges]) -> tuple[float, dict[str, float]]:
    with ReceiverProcess(_receive_grpc) as address:
        async with open_channel(address) as channel:
            push = push_weights(channel)

            async def seconds(update: PackedChanges | None = None) -> float:
                seconds_each = []
                for _ in range(_ROUNDS):
                    began = time.monotonic()
                    await push(aiter(update or WholePolicy(whole)), timeout=60)
                    seconds_each.append(time.monotonic() - began)
                return median(seconds_each[1:])

            return await seconds(), {rate: await seconds(update) for rate, update in changes.items()}


def _by_tcp(whole: PolicyWeights) -> float:
    seconds_each = []
    with ReceiverProcess(_receive_tcp) as address:
        host, port = address.split(":")
        for _ in range(_ROUNDS):
            with socket.create_connection((host, int(port))) as connection:
                began = time.monotonic()
                for bits in whole.bits.values():
                    data = bits.reshape(-1).view(np.uint8).data
                    for start in range(0, bits.nbytes, FRAME_BYTES):
                        connection.sendall(data[start : start + FRAME_BYTES])
                connection.shutdown(socket.SHUT_WR)
                connection.recv(1)
                seconds_each.append(time.monotonic() - began)
    return median(seconds_each[1:])


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
    add = generation_pb2_grpc.add_GenerationServicer_to_server
    servicer = DiscardingServicer()  # type: ignore[abstract]  # it gets no other call
    api = GrpcApi("gspo.Generation", lambda server: add(servicer, server))
    server = GrpcServer(api, host=_HOST, port=0, token="")
    await server.start()
    address_pipe.send(server.address)
    await asyncio.Event().wait()


def pack(folder: str, rate: float, versions: int) -> list[dict[str, Any]]:
    """Changed share, bytes and seconds of the changes of every version of a learning rate."""
    policies = [load_version(Path(folder), rate, version) for version in range(versions + 1)]
    return [_packed(newest, base) for base, newest in pairwise(policies)]


def _packed(newest: PolicyWeights, base: PolicyWeights) -> dict[str, Any]:
    runs = [
        (name, slice(start, start + FRAME_BYTES // bits.itemsize))
        for name, bits in newest.bits.items()
        for start in range(0, bits.size, FRAME_BYTES // bits.itemsize)
    ]
    pairs = [(newest.bits[name].reshape(-1)[run], base.bits[name].reshape(-1)[run]) for name, run in runs]
    pack_s, apply_s = [], []
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:  # frame by frame, as the services work
        for _ in range(_PACK_ROUNDS):
            began = time.monotonic()
            packed = list(threads.map(lambda pair: pack_changes(*pair), pairs))
            pack_s.append(time.monotonic() - began)
            copies = [old.copy() for _, old in pairs]
            began = time.monotonic()
            list(threads.map(apply_changes, copies, packed))
            apply_s.append(time.monotonic() - began)
    assert all(np.array_equal(copy, new) for copy, (new, _) in zip(copies, pairs, strict=True))
    began = time.monotonic()
    digest = policy_digest((name, newest.dtype, bits.shape, bits) for name, bits in newest.bits.items())
    digest_s = time.monotonic() - began
    assert digest == newest.digest
    num_bytes = sum(len(changes.data) for changes in packed)
    return {
        "changed": sum(int(np.count_nonzero(new != old)) for new, old in pairs) / sum(len(new) for new, _ in pairs),
        "bytes": newest.num_bytes,
        "digest_s": digest_s,
        "gaps": {"bytes": num_bytes, "pack_s": min(pack_s), "apply_s": min(apply_s)},
    }
