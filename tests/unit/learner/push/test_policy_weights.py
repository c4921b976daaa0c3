"""The frames of a push: bounded, whole or of changes, packed once for all generators; they rebuild a policy."""

from __future__ import annotations

import asyncio
import gc
import math
import weakref
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from gspo.common.weights import manifest
from gspo.common.weights.changes import Packed, pack_changes
from gspo.generation.engine.staging import PolicyCopies
from gspo.learner.push import weight_updates
from gspo.learner.push.policy_weights import (
    PolicyWeights,
    RankManifest,
    joined,
    own_weights,
    rank_manifest,
    weights_from,
)
from gspo.learner.push.weight_updates import PackedChanges, WholePolicy
from gspo.learner.training.trainer_api import NotFiniteError
from gspo_proto.generation_pb2 import TensorFrame, WeightFrame

SHAPES = {"a": (40, 30), "b": (7,), "c": (5, 5)}
# A digest on record of runs of before.
SHA_256 = 64 * "0"


def policy(
    version: int, *, changed: dict[str, float] | None = None, dtype: torch.dtype = torch.bfloat16
) -> PolicyWeights:
    """Random weights; of the tensors in `changed` the given share of elements is a little larger."""
    chance = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(shape, generator=chance) for name, shape in SHAPES.items()}
    for name, share in (changed or {}).items():
        tensors[name] *= torch.where(torch.rand(SHAPES[name], generator=chance) < share, 1.01, 1.0)
    return weights_from(version, {name: tensor.to(dtype) for name, tensor in tensors.items()})


def small_frames(policy: PolicyWeights, base: PolicyWeights | None = None) -> PackedChanges | WholePolicy:
    return PackedChanges(policy, base, frame_bytes=512) if base else WholePolicy(policy, frame_bytes=512)


async def tensors_of(update: PackedChanges | WholePolicy) -> list[TensorFrame]:
    """The runs of all frames."""
    return [run async for frame in update for run in WeightFrame.FromString(frame).tensors]


async def staged_after(sent: PackedChanges | WholePolicy, base: PolicyCopies | None, dtype: str) -> PolicyCopies:
    copies = base or PolicyCopies(SHAPES, dtype)
    copies.begin(changes=base is not None)
    for frame in await tensors_of(sent):
        if frame.HasField("changes"):
            packed = Packed(frame.changes.num_listed, frame.changes.packed)
            copies.change(frame.name, frame.offset, frame.num_elements, packed)
        else:
            copies.write(frame.name, frame.offset, frame.data)
    copies.promote()
    return copies


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
async def test_a_whole_push_and_then_changes_rebuild_the_policy(dtype: torch.dtype) -> None:
    first, second = policy(1, dtype=dtype), policy(2, changed={"a": 0.1, "c": 1.0}, dtype=dtype)
    assert first.digest != second.digest
    copies = await staged_after(small_frames(first), None, first.dtype)
    assert copies.serving_digest() == first.digest
    third, fourth = policy(3, changed={"a": 0.05, "b": 0.5}, dtype=dtype), policy(4, changed={"c": 0.2}, dtype=dtype)
    for base, newest in pairwise((first, second, third, fourth)):
        copies = await staged_after(small_frames(newest, base), copies, newest.dtype)
        assert copies.serving_digest() == newest.digest


async def test_a_frame_has_the_changes_of_many_runs() -> None:
    frames = [frame async for frame in small_frames(policy(2, changed=dict.fromkeys(SHAPES, 0.02)), policy(1))]
    assert len(frames) == 1 and len(WeightFrame.FromString(frames[0]).tensors) > 3
    larger = [frame async for frame in small_frames(policy(2, changed=dict.fromkeys(SHAPES, 1.0)), policy(1))]
    assert len(larger) > 1 and all(len(frame) >= 512 for frame in larger[:-1])


async def test_no_frame_is_larger_than_a_frame_may_be() -> None:
    sent = await tensors_of(small_frames(policy(1)))
    assert [(frame.name, frame.offset, frame.num_elements) for frame in sent] == [
        ("a", start, min(256, 1200 - start)) for start in range(0, 1200, 256)
    ] + [("b", 0, 7), ("c", 0, 25)]
    assert max(len(frame.data) for frame in sent) == 512


async def test_only_what_changed_is_sent_and_it_is_small() -> None:
    sent = await tensors_of(small_frames(policy(2, changed={"a": 0.02}), policy(1)))
    assert {frame.name for frame in sent} == {"a"}
    assert all(frame.HasField("changes") and not frame.data for frame in sent)
    assert sum(frame.ByteSize() for frame in sent) < 0.2 * 2 * 1200


async def test_changes_that_would_be_larger_than_the_elements_are_sent_as_elements() -> None:
    chance = torch.Generator().manual_seed(1)
    others = {
        name: torch.randint(0x7F00, shape, generator=chance, dtype=torch.int16).view(torch.bfloat16)
        for name, shape in SHAPES.items()
    }
    sent = await tensors_of(small_frames(weights_from(2, others), policy(1)))
    assert all(frame.data and not frame.HasField("changes") for frame in sent)
    assert max(len(frame.data) for frame in sent) == 512


async def test_changes_are_packed_once_for_all_generators(monkeypatch: pytest.MonkeyPatch) -> None:
    packed: list[int] = []

    def noted(new: Any, old: Any) -> Any:
        packed.append(len(new))
        return pack_changes(new, old)

    monkeypatch.setattr(weight_updates, "pack_changes", noted)
    sent = small_frames(policy(2, changed={"a": 0.1}), policy(1))
    first, second = [f async for f in sent], [f async for f in sent]
    assert first == second
    assert sum(packed) == 1200 + 7 + 25


async def test_a_policy_has_one_dtype() -> None:
    with pytest.raises(ValueError, match="one inference dtype"):
        weights_from(1, {"a": torch.zeros(2), "b": torch.zeros(2, dtype=torch.bfloat16)})


def test_the_digest_does_not_depend_on_the_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    digest = policy(1).digest
    monkeypatch.setattr(manifest, "_MOST_THREADS", 1)
    assert policy(1).digest == digest


async def test_packed_changes_need_none_of_their_policies() -> None:
    base, newest = policy(1), policy(2, changed={"a": 0.1})
    update = PackedChanges(newest, base)
    ahead = [frame async for frame in update]
    gone = [weakref.ref(base), weakref.ref(newest)]
    num_bytes = await update.pack()
    del base, newest
    # A thread that packed lets its arguments go some moments after it has handed over the frame.
    async with asyncio.timeout(10):
        while any(reference() for reference in gone):
            gc.collect()
            await asyncio.sleep(0.01)
    assert [frame async for frame in update] == ahead
    assert num_bytes == sum(map(len, ahead))


def test_the_shares_of_all_ranks_are_the_version_that_one_rank_makes() -> None:
    chance = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(shape, generator=chance).bfloat16() for name, shape in SHAPES.items()}
    owned = [{"a": tensors["a"]}, {}, {"b": tensors["b"], "c": tensors["c"]}]
    lines = [rank_manifest(share, SHA_256, f"rank-{rank}" * bool(rank)).to_bytes() for rank, share in enumerate(owned)]
    own, whole = own_weights(3, owned[0]), weights_from(3, tensors, SHA_256)
    shared = joined(3, own, [RankManifest.from_bytes(line) for line in lines])
    assert shared.facts == replace(whole.facts, sources=("rank-2",)), "a rank that owns nothing is asked for nothing"
    assert {entry.name: entry for entry in shared.entries} == {entry.name: entry for entry in whole.entries}
    assert list(shared.bits) == ["a"]
    assert shared.digest_on_record == whole.digest_on_record != shared.digest
    assert weights_from(3, tensors).digest_on_record == shared.digest
    assert own_weights(3, {}).num_bytes == 0


def test_a_weight_of_any_rank_that_is_not_finite_refuses_the_version() -> None:
    good, bad = {"a": torch.ones(2)}, {"b": torch.tensor([1.0, math.nan]), "c": torch.ones(1)}
    with pytest.raises(NotFiniteError, match=r"version 2 is not published: 1 of 3 of its tensors .* first b\. Lower"):
        joined(2, own_weights(2, good), [rank_manifest(good), rank_manifest(bad)])
