"""One GPU in shifts: the memory that a sleeping engine and a waiting learner give back, and that both go on unchanged.

The states of training move in this process, the engine has its own. The protocol between them has tests without a GPU.
"""

from __future__ import annotations

import asyncio
import math
import time

import torch

from gspo.common.host.machine import GIB
from gspo.generation.engine.api import Completion, EngineSampling, LoadFailedError
from gspo.generation.engine.staging import PolicyCopies
from gspo.generation.engine.vllm_engine import Engine
from gspo.learner.training.trainer import Trainer
from tests.gpu.engine_calls import engine_of, prompts_of, used_gpu_gib
from tests.gpu.learner_calls import learner_config, rows_of
from tests.gpu.part_run import PartRun
from tests.gpu.parts.parity import LIMITS
from tests.gpu.parts.push import changed_model, stage_policy
from tests.support.training.rollout_rows import train, with_version

# At least this share of the engine's memory is free again: its context and workspaces stay.
_LEAST_FREED_SHARE, _MOST_LEFT_GIB = 0.8, 0.1


async def run(case: PartRun) -> None:
    """Sleep, train on the memory, wake with the same policy; then sleep again and wake with a new one."""
    copies = PolicyCopies.from_folder(case.model, "bfloat16")
    empty_gib = used_gpu_gib()
    async with engine_of(case, "bfloat16", sleeps=True) as engine:
        before = await _answers(case, engine)
        await _sleep(case, engine, empty_gib)
        await _require_refusal(case, engine, copies)
        trainer = await asyncio.to_thread(_train_in_its_shift, case, before)
        copies.begin(changes=True)
        times = await engine.wake(1, copies, timeout_s=120)
        case.note(wake_s=times.pause_s + times.load_s + times.resume_s)
        after = await _answers(case, engine)
        _compare(case, before, after)
        await engine.sleep(on_update="recompute", timeout_s=60)
        await asyncio.to_thread(_train_again, case, trainer, after)
        _, policy = changed_model(case, 2)
        await asyncio.to_thread(stage_policy, copies, policy)
        await engine.wake(2, copies, timeout_s=120)
        case.require(copies.serving_digest() == policy.digest, "the engine woke with another policy")
        newest = await _answers(case, engine)
        case.require({v for it in newest for v in it.version} == {2}, "tokens after the wake are not of version 2")
    copies.close()


async def _answers(case: PartRun, engine: Engine) -> list[Completion]:
    """One answer after the other: what runs beside a request changes its rounding."""
    sampling = EngineSampling(max_tokens=min(32, case.sizes.answer_tokens), ignore_eos=True, seed=7)
    name = f"v{engine.version}"
    return [await engine.generate(f"{name}-{n}", prompt, sampling) for n, prompt in enumerate(prompts_of(case)[:4])]


def _compare(case: PartRun, before: list[Completion], after: list[Completion]) -> None:
    """Answers of the same policy: the first token follows from the same prompt, the later ones from the tokens too."""
    apart = max(abs(a.logp[0] - b.logp[0]) for a, b in zip(before, after, strict=True))
    same = [(a.token_ids, a.logp) == (b.token_ids, b.logp) for a, b in zip(before, after, strict=True)]
    case.judge("answers that are the same after a wake", sum(same) / len(same), at_least=1)
    case.require(apart <= LIMITS["bfloat16"], f"the same policy has other log-probs after a wake, by {apart:.3g}")


async def _sleep(case: PartRun, engine: Engine, empty_gib: float) -> None:
    awake_gib, began = used_gpu_gib(), time.monotonic()
    await engine.sleep(on_update="recompute", timeout_s=60)
    case.note(sleep_s=time.monotonic() - began, awake_gib=awake_gib, asleep_gib=used_gpu_gib())
    freed, engine_gib = awake_gib - used_gpu_gib(), awake_gib - empty_gib
    case.judge("freed share of vLLM's memory", freed / (engine_gib or 1.0), at_least=_LEAST_FREED_SHARE)


async def _require_refusal(case: PartRun, engine: Engine, copies: PolicyCopies) -> None:
    copies.begin(changes=True)
    try:
        await engine.load(9, copies, on_update="recompute", timeout_s=60)
    except LoadFailedError:
        return
    case.require(False, "an update of sleeping weights was not refused")


def _train_in_its_shift(case: PartRun, answered: list[Completion]) -> Trainer:
    """A step with the GPU's memory, whose states then leave it."""
    trainer = Trainer(learner_config(case, case.model, "bfloat16", learning_rate=1e-5), case.model)
    train(trainer, 1, rows_of(prompts_of(case)[: len(answered)], answered))
    policy = trainer.engine.policy()
    if case.on_gpu:
        case.note(states_gib=torch.cuda.memory_allocated() / GIB)
    began = time.monotonic()
    trainer.engine.move_to_host()
    case.note(to_host_s=time.monotonic() - began)
    left_gib = torch.cuda.memory_allocated() / GIB if case.on_gpu else 0.0
    case.judge("GiB of the learner that stay", left_gib, at_most=_MOST_LEFT_GIB)
    trainer.engine.move_to_device()
    again = trainer.engine.policy()
    case.require(all(torch.equal(policy[name], again[name]) for name in policy), "the weights came back changed")
    trainer.engine.move_to_host()
    return trainer


def _train_again(case: PartRun, trainer: Trainer, answered: list[Completion]) -> None:
    """The second shift: the states come back to the GPU, and train on."""
    began = time.monotonic()
    trainer.engine.move_to_device()
    case.note(to_device_s=time.monotonic() - began)
    rows = with_version(rows_of(prompts_of(case)[: len(answered)], answered), 1)
    figures = train(trainer, 2, rows).metrics
    case.require(math.isfinite(figures["loss"]), f"the step after the move: {figures}")
    trainer.engine.move_to_host()
