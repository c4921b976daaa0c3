"""Access to the staged copy of the weights: one push at a time, until its threads have ended."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import pytest

from gspo.common.weights.manifest import policy_digest
from gspo.generation.engine.staging import PolicyCopies, PolicyPlace
from gspo.generation.receiver import PushRefusedError, Receiver
from gspo_proto.generation_pb2 import PushHeader, TensorFrame, WeightFrame


class BlockedCopy(PolicyCopies):
    """Its work in threads stands still at one call until `may_go_on` is set."""

    blocks_at = ""

    def __init__(self) -> None:
        super().__init__({"a": (4,)}, "float32")
        self.reached, self.may_go_on = threading.Event(), threading.Event()

    def find(self, digest: str) -> PolicyPlace:
        self._block("find")
        return super().find(digest)

    def staged_digest(self) -> str:
        self._block("staged_digest")
        return super().staged_digest()

    def _block(self, call: str) -> None:
        if call == self.blocks_at:
            self.reached.set()
            assert self.may_go_on.wait(20)


def receiver_of(copy: PolicyCopies) -> Receiver:
    generation = SimpleNamespace(push_timeout_s=5.0, dtype="float32")
    service: Any = SimpleNamespace(config=SimpleNamespace(name="run", placement="split", generation=generation))
    engine: Any = SimpleNamespace(version=0)  # nothing here comes so far as a load
    return Receiver(service, engine, copy, lambda: None)


async def header(epoch: int) -> AsyncIterator[WeightFrame]:
    yield WeightFrame(header=PushHeader(run="run", epoch=epoch, dtype="float32", digest="another", num_tensors=1))


async def run_loop() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_a_push_that_is_cancelled_twice_keeps_its_lock_while_a_thread_writes() -> None:
    copy = BlockedCopy()
    receiver, copy.blocks_at = receiver_of(copy), "find"
    admitted = asyncio.Event()

    async def admit(takes_frames: bool) -> None:
        assert takes_frames
        admitted.set()

    first = asyncio.create_task(receiver.receive(header(1), admit, 20.0))
    await asyncio.to_thread(copy.reached.wait, 20)
    for _ in range(2):  # as by the deadline of the push, and by gRPC's
        first.cancel()
        await run_loop()
    admitted.clear()
    second = asyncio.create_task(receiver.receive(header(1), admit, 20.0))
    await run_loop()
    assert not admitted.is_set()
    assert not first.done()
    copy.may_go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await first
    with pytest.raises(PushRefusedError, match="nothing was loaded"):
        await second
    assert admitted.is_set()


async def test_a_newer_learner_waits_for_an_older_push_that_is_already_late() -> None:
    copy = BlockedCopy()
    receiver, copy.blocks_at = receiver_of(copy), "staged_digest"

    async def admit(takes_frames: bool) -> None:
        assert takes_frames

    late = asyncio.create_task(receiver.receive(header(1), admit, 0.05))
    await asyncio.to_thread(copy.reached.wait, 20)
    while receiver._staging is None or not receiver._staging.expired():
        await asyncio.sleep(0.01)
    newer = asyncio.create_task(receiver.receive(header(2), admit, 20.0))
    await run_loop()
    copy.may_go_on.set()
    with pytest.raises(PushRefusedError, match="of epoch 2; this call is of"):
        await late
    with pytest.raises(PushRefusedError, match="nothing was loaded"):
        await newer


async def test_a_learner_that_read_another_model_is_refused_for_good() -> None:
    copies = PolicyCopies({"a": (4,), "b": (1,), "ignored": (2,)}, "float32")
    pushed = {"a": np.array([0, 0, 1, 0], np.uint32), "b": np.zeros(1, np.uint32)}
    digest = policy_digest((name, "float32", bits.shape, bits) for name, bits in pushed.items())

    async def frames() -> AsyncIterator[WeightFrame]:
        yield WeightFrame(header=PushHeader(run="run", epoch=1, dtype="float32", digest=digest, num_tensors=2))
        for name, bits in pushed.items():
            yield WeightFrame(tensors=[TensorFrame(name=name, data=bits.tobytes())])

    async def admit(takes_frames: bool) -> None:
        assert takes_frames

    with pytest.raises(PushRefusedError, match="a has other values in this generator than in the learner") as error:
        await receiver_of(copies).receive(frames(), admit, 20.0)
    assert error.value.status is grpc.StatusCode.INVALID_ARGUMENT
    assert copies.serving.fingerprints.keys() == {"a", "b", "ignored"}
    assert copies.staged is copies.serving
    copies.begin(changes=False)
    copies.write("a", 0, bytes(16))
    assert copies.differing_tensor() is None
