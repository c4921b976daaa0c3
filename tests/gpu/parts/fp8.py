"""Rollouts in FP8: vLLM rounds bfloat16 weights while it loads them, at its start and again at each push.

The learner knows nothing of it: its log-probs are bfloat16's, and the difference is noise on every ratio.
"""

from __future__ import annotations

import asyncio
from typing import Any

from gspo.generation.engine.staging import PolicyCopies
from tests.gpu.engine_calls import answers, engine_of, prompts_of, used_gpu_gib
from tests.gpu.learner_calls import difference
from tests.gpu.part_run import PartRun
from tests.gpu.parts.push import changed_model, stage_policy

# vLLM rounds each matrix, and the inputs of each product, to FP8; it has no such products on a CPU.
_FP8: dict[str, dict[str, Any]] = {"cuda": {"quantization": "fp8_per_tensor"}, "cpu": {}}
_MOST_NOISE = 0.33
# A version that vLLM does not compute with is far beyond it: the changed weights differ by a fifth.
_LARGEST_STD = 0.5


async def run(case: PartRun) -> None:
    """Sample in FP8, and again after a push into the FP8 engine."""
    prompts, num_tokens = prompts_of(case), case.sizes.answer_tokens
    folder, policy = changed_model(case, 1)
    copies = PolicyCopies.from_folder(case.model, "bfloat16")
    async with engine_of(case, "bfloat16", **_FP8[case.device]) as engine:
        case.note(used_gib=used_gpu_gib())
        done = await answers(engine, prompts, num_tokens, "fp8")
        await asyncio.to_thread(stage_policy, copies, policy)
        times = await engine.load(1, copies, on_update="recompute", timeout_s=120)
        pushed = await answers(engine, prompts, num_tokens, "pushed")
    copies.close()
    noise = difference(case, case.model, "bfloat16", prompts, done)
    case.note(std=noise.std, noise_share_at_start=noise.noise_share, load_s=times.load_s)
    noise = difference(case, folder, "bfloat16", prompts, pushed)
    case.note(std_after_push=noise.std)
    case.require({v for it in pushed for v in it.version} == {1}, "a token is of another version than the pushed one")
    case.require(
        noise.std < _LARGEST_STD,
        f"after the push vLLM computes with other weights: the log-probs differ by {noise.std:.3g}",
    )
    case.judge("noise share", noise.noise_share, at_most=_MOST_NOISE)
