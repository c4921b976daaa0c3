"""An engine that sleeps: what it refuses, in which order it wakes, and that nothing of before the sleep is left.

Real vLLM, which records what sleeps also on a CPU. A CPU keeps its memory: only a GPU can show that it is given back
(tests/gpu/parts/shared.py).
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gspo.generation.engine.api import LoadFailedError
from tests.integration.generation.conftest import SharedEngine
from tests.integration.generation.test_engine import (
    PROMPTS,
    Reference,
    answers,
    difference,
    running,
    sampling,
)
from tests.support.tiny_model import make_tiny_model
from tests.support.weights import stage

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(180)]
SAMPLE = sampling(60, ignore_eos=True)
_UPDATE = ("start_weight_update", "update_weights", "finish_weight_update")
_NOTED = {"sleep", "wake_up", "pause_generation", "resume_generation", *_UPDATE}


class RecordingLlm:
    """Passes every call on to vLLM, and notes those that change its memory or its weights."""

    def __init__(self, llm: Any) -> None:
        self._llm, self.calls = llm, list[str]()

    def __getattr__(self, name: str) -> Any:
        if name in _NOTED:
            return lambda *args, **kwargs: self._noted(name, *args, **kwargs)
        return getattr(self._llm, name)

    async def _noted(self, name: str, *args: Any, **kwargs: Any) -> Any:
        self.calls.append(f"{name} {args[0][0]}" if name == "wake_up" else name)
        return await getattr(self._llm, name)(*args, **kwargs)


async def test_it_wakes_weights_then_policy_then_kv_and_serves_the_staged_policy(
    generator: SharedEngine, tmp_path: Path
) -> None:
    engine, copies, old = generator.engine, generator.copies, generator.engine.version
    folder = make_tiny_model(tmp_path / "new", seed=10 + old, scale=4.0)
    llm = engine._llm
    engine._llm = recording = RecordingLlm(llm)
    try:
        await engine.sleep(on_update="recompute", timeout_s=60)
        assert engine.is_asleep and await llm.is_sleeping()
        await engine.sleep(on_update="recompute", timeout_s=60)
        digest = stage(copies, folder).staged_digest()
        times = await engine.wake(old + 1, copies, timeout_s=60)
    finally:
        engine._llm = llm
    assert recording.calls == ["sleep", "wake_up weights", *_UPDATE, "wake_up kv_cache"]
    assert (engine.version, copies.serving_digest(), engine.is_asleep) == (old + 1, digest, False)
    assert not await llm.is_sleeping()
    assert times.pause_s > 0 and times.load_s > 0 and times.resume_s > 0
    generator.folders.append(folder)
    delta = difference(Reference.load(folder), PROMPTS, await answers(engine, SAMPLE))
    assert delta.std() < 1e-5


async def test_the_same_policy_has_the_same_log_probs_after_a_wake(generator: SharedEngine) -> None:
    """As after a step with a learning rate of 0."""
    engine, copies, version = generator.engine, generator.copies, generator.engine.version
    before = await engine.generate("before", PROMPTS[0], sampling(40, ignore_eos=True, seed=5))
    await engine.sleep(on_update="recompute", timeout_s=60)
    copies.begin(changes=True)
    await engine.wake(version + 1, copies, timeout_s=60)
    after = await engine.generate("after", PROMPTS[0], sampling(40, ignore_eos=True, seed=5))
    assert (after.token_ids, after.logp) == (before.token_ids, before.logp)
    assert (set(before.version), set(after.version)) == ({version}, {version + 1})


async def test_an_update_of_sleeping_weights_is_refused_and_so_is_a_wake_of_waking_ones(
    generator: SharedEngine, tmp_path: Path
) -> None:
    engine, copies, version = generator.engine, generator.copies, generator.engine.version
    folder = make_tiny_model(tmp_path / "new", seed=10 + version, scale=4.0)
    with pytest.raises(LoadFailedError, match="the engine does not sleep"):
        await engine.wake(version + 1, stage(copies, folder), timeout_s=60)
    await engine.sleep(on_update="recompute", timeout_s=60)
    with pytest.raises(LoadFailedError, match="the engine sleeps, and its weights are away"):
        await engine.load(version + 1, copies, on_update="recompute", timeout_s=60)
    assert engine.is_asleep and engine.version == version
    await engine.wake(version + 1, copies, timeout_s=60)
    generator.folders.append(folder)
    assert set((await engine.generate("new", PROMPTS[0], SAMPLE)).version) == {version + 1}


async def test_requests_stand_still_and_go_on_under_the_new_policy(generator: SharedEngine, tmp_path: Path) -> None:
    engine, copies, old = generator.engine, generator.copies, generator.engine.version
    folder = make_tiny_model(tmp_path / "new", seed=10 + old, scale=4.0)
    tasks = await running(engine, sampling(300, ignore_eos=True))
    await engine.sleep(on_update="recompute", timeout_s=60)
    late = asyncio.create_task(engine.generate("late", PROMPTS[0], SAMPLE))
    sampled = [engine.num_sampled(f"f{number}") for number in range(len(PROMPTS))]
    await asyncio.sleep(0.5)
    assert [engine.num_sampled(f"f{number}") for number in range(len(PROMPTS))] == sampled
    assert not late.done()
    await engine.wake(old + 1, stage(copies, folder), timeout_s=60)
    generator.folders.append(folder)
    reference = Reference.load(folder)
    for prompt, completion in zip(PROMPTS, await asyncio.gather(*tasks), strict=True):
        num_old = completion.version.count(old)
        assert completion.version == [old] * num_old + [old + 1] * (300 - num_old) and 0 < num_old < 300
        under_new = np.array(completion.logp) - reference.logp(prompt, completion.token_ids)
        assert np.abs(under_new[num_old:]).max() < 1e-4, "keys and values of before the sleep were used"
    assert set((await late).version) == {old + 1}


async def test_under_restart_requests_end_with_the_sleep(generator: SharedEngine) -> None:
    engine, copies, version = generator.engine, generator.copies, generator.engine.version
    tasks = await running(engine, sampling(300, ignore_eos=True))
    await engine.sleep(on_update="restart", timeout_s=60)
    assert {completion.finish for completion in await asyncio.gather(*tasks)} == {"restart"}
    copies.begin(changes=True)
    await engine.wake(version + 1, copies, timeout_s=60)
    assert len((await engine.generate("new", PROMPTS[0], SAMPLE)).token_ids) == 60


async def test_a_policy_that_does_not_load_wakes_the_engine_with_the_one_before(generator: SharedEngine) -> None:
    engine, copies, version = generator.engine, generator.copies, generator.engine.version
    await engine.sleep(on_update="recompute", timeout_s=60)
    copies.begin(changes=False)  # no tensor at all
    with pytest.raises(LoadFailedError, match=f"version {version} serves on"):
        await engine.wake(version + 1, copies, timeout_s=60)
    assert (engine.version, engine.is_asleep) == (version, False)
    delta = difference(Reference.load(generator.folder), PROMPTS, await answers(engine, SAMPLE))
    assert delta.std() < 1e-5
