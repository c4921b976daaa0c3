"""The changes of several versions: applied one by one they make the newest, and few enough of them are kept."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from gspo.common.weights.changes import Packed, apply_changes
from gspo.learner.push import weight_updates
from gspo.learner.push.policy_weights import PolicyWeights, weights_from
from gspo.learner.push.weight_updates import ChainedChanges, ChangeChain, PackedChanges
from gspo_proto.generation_pb2 import WeightFrame

pytestmark = pytest.mark.asyncio(loop_scope="function")
NUM_ELEMENTS = 4000


def versions(number: int, *, changed: int = 10) -> list[PolicyWeights]:
    """Versions of one tensor, each with other elements changed than the one before, and one that always changes."""
    weights = torch.randn(NUM_ELEMENTS, generator=torch.Generator().manual_seed(0)).bfloat16()
    policies = []
    for version in range(number):
        weights = weights.clone()
        weights[version * changed : (version + 1) * changed] += 1.0
        weights[-1] = version
        policies.append(weights_from(version, {"a": weights}))
    return policies


async def chain_of(policies: list[PolicyWeights], max_length: int) -> ChangeChain:
    chain = ChangeChain(max_length)
    for base, policy in pairwise(policies):
        chain.add(policy, base)
        await chain.wait_until_packed()
        chain.forget_packed()
    return chain


async def applied(changes: ChainedChanges, to: PolicyWeights) -> np.ndarray:
    bits = to.bits["a"].copy()
    async for frame in changes:
        for run in WeightFrame.FromString(frame).tensors:
            apply_changes(bits[run.offset :], Packed(run.changes.num_listed, run.changes.packed))
    return bits


async def test_changes_applied_one_after_another_make_the_newest_version() -> None:
    policies = versions(4)
    chain = await chain_of(policies, 3)
    for base in policies[:3]:
        changes = chain.update_from(base.digest)
        assert changes is not None and changes.target == policies[3].facts
        assert changes.base == base.facts
        assert (await applied(changes, base) == policies[3].bits["a"]).all()


async def test_as_many_versions_are_kept_as_the_chain_is_long() -> None:
    policies = versions(5)
    chain = await chain_of(policies, 2)
    kept = [chain.update_from(policy.digest) is not None for policy in policies]
    assert kept == [False, False, True, True, False], "the newest version needs no changes to itself"


async def test_large_changes_are_kept_for_the_version_before_alone() -> None:
    policies = versions(4, changed=1000)
    chain = await chain_of(policies, 3)
    assert [chain.update_from(policy.digest) is not None for policy in policies] == [False, False, True, False]


async def test_frames_of_changes_are_full_and_written_once_for_all_generators() -> None:
    base, policy = versions(2, changed=1000)
    update = PackedChanges(policy, base, frame_bytes=256)
    first, second = [[frame async for frame in update] for _ in range(2)]
    assert len(first) > 1 and all(frame is again for frame, again in zip(first, second, strict=True))
    runs = [WeightFrame.FromString(frame).tensors for frame in first]
    sizes = [[len(run.data) + len(run.changes.packed) for run in of_frame] for of_frame in runs]
    assert all(sum(of_frame) >= 256 > sum(of_frame[:-1]) for of_frame in sizes[:-1]), sizes
    assert max(map(len, sizes)) > 1, "a frame has one run"


async def test_a_failure_of_the_packing_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_updates, "pack_changes", lambda *_: 1 / 0)
    chain, (base, policy) = ChangeChain(1), versions(2)
    chain.add(policy, base)
    await chain.wait_until_packed()
    with pytest.raises(ZeroDivisionError):
        chain.forget_packed()
    chain.forget_packed()
