"""New weights while requests are in flight: how long the engine stands, and whether it then computes with them.

The staged copy is filled by hand: what carries the bytes has no part in the GPU.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from gspo.common.host.machine import GIB
from gspo.generation.engine.api import Completion, OnUpdate
from gspo.generation.engine.staging import PolicyCopies
from gspo.generation.engine.vllm_engine import Engine
from gspo.learner.push.policy_weights import PolicyWeights, weights_from
from tests.gpu.engine_calls import answers, engine_of, prompts_of
from tests.gpu.learner_calls import difference
from tests.gpu.part_run import PartRun
from tests.gpu.parts.parity import LIMITS
from tests.gpu.random_models import drawn_once

_WEIGHTS = "model.safetensors"
_PIECE_BYTES = 16 << 20
# Rounding sends some tokens to other experts, which moves their log-probs far. Other weights would move them farther.
_MIXTURE_LIMIT = 0.3


async def run(case: PartRun) -> None:
    """Push a changed policy, then a third, and compare what is sampled afterwards with the learner's log-probs."""
    prompts = prompts_of(case)
    limit = _MIXTURE_LIMIT if case.is_mixture else LIMITS["bfloat16"]
    copies = PolicyCopies.from_folder(case.model, "bfloat16")
    case.note(policy_gib=copies.num_bytes / GIB)
    async with engine_of(case, "bfloat16") as engine:
        updates: tuple[tuple[int, OnUpdate], ...] = ((1, "recompute"), (2, "keep"))
        for version, on_update in updates:
            folder, policy = changed_model(case, version)
            await _push(case, engine, copies, policy, on_update)
            case.require(copies.serving_digest() == policy.digest, f"version {version} serves with another digest")
            fresh = await answers(engine, prompts, case.sizes.answer_tokens // 2, f"after-{version}")
            case.require({v for it in fresh for v in it.version} == {version}, f"not all tokens are of {version}")
            parity = difference(case, folder, "bfloat16", prompts, fresh)
            case.note(**{f"parity_after_{version}_std": parity.std})
            case.require(parity.std <= limit, f"version {version} is not what vLLM computes with: {parity}")
    copies.close()


async def _push(
    case: PartRun, engine: Engine, copies: PolicyCopies, policy: PolicyWeights, on_update: OnUpdate
) -> None:
    """Stage one policy, and load it while every request of the part is under way."""
    prompts, num_tokens = prompts_of(case, seed=policy.version), case.sizes.answer_tokens
    began = time.monotonic()
    await asyncio.to_thread(stage_policy, copies, policy)
    case.require(copies.staged_digest() == policy.digest, "the staged copy has another digest than the learner's")
    staged_s = time.monotonic() - began
    case.note(**{f"{on_update}_stage_s": staged_s})
    # Not before: a fast GPU would be done with the answers while a slow host stages.
    flight = asyncio.create_task(answers(engine, prompts, num_tokens, f"flight-{policy.version}"))
    name = f"flight-{policy.version}-0"
    async with asyncio.timeout(60):
        while not engine.num_sampled(name) and not flight.done():
            await asyncio.sleep(0.005)
    times = await engine.load(policy.version, copies, on_update=on_update, timeout_s=120)
    case.note(**{f"{on_update}_load_s": times.load_s})
    case.judge(f"{on_update}: stall beside the load, s", times.pause_s + times.resume_s, at_most=0.1)
    if not case.is_mixture:
        case.measure(stage_bytes_s=policy.num_bytes / staged_s, load_bytes_s=policy.num_bytes / times.load_s)
    done = await flight
    case.note(**{f"{on_update}_crossing": sum(len(set(it.version)) == 2 for it in done)})
    _judge_versions(case, done, policy.version, num_tokens)


def _judge_versions(case: PartRun, done: list[Completion], version: int, num_tokens: int) -> None:
    case.require(all(len(it.token_ids) == num_tokens for it in done), "an answer was lost or cut off by the push")
    case.require(all(a <= b for it in done for a, b in pairwise(it.version)), "versions go back within an answer")
    seen = {number for it in done for number in it.version}
    case.require(seen == {version - 1, version}, f"the tokens in flight are of versions {seen}")


def stage_policy(copies: PolicyCopies, policy: PolicyWeights) -> None:
    """Fill the staged copy with a whole policy."""
    copies.begin(changes=False)
    for name, bits in policy.bits.items():
        data, itemsize = bits.reshape(-1).data.cast("B"), bits.itemsize
        for start in range(0, len(data), _PIECE_BYTES):
            copies.write(name, start // itemsize, bytes(data[start : start + _PIECE_BYTES]))


def changed_model(case: PartRun, version: int, share: float = 1.0) -> tuple[Path, PolicyWeights]:
    """The model with this share of its weights moved a little: a folder, and the same as the learner publishes it."""
    name = f"{case.model.name}-version-{version}-{share:g}"
    folder = drawn_once(case.folder / name, partial(_draw_version, case=case, version=version, share=share))
    return folder, weights_from(version, load_file(folder / _WEIGHTS))


def _draw_version(folder: Path, *, case: PartRun, version: int, share: float) -> None:
    shutil.copytree(case.model, folder, ignore=shutil.ignore_patterns(_WEIGHTS), dirs_exist_ok=True)
    # On the card: a CPU takes 25 s to draw so many numbers.
    chance = torch.Generator(case.device).manual_seed(version)

    def changed(tensor: torch.Tensor) -> torch.Tensor:
        factor = 1 + 0.2 * torch.randn(tensor.shape, generator=chance, device=case.device)
        factor[torch.rand(tensor.shape, generator=chance, device=case.device) >= share] = 1
        return (tensor.float() * factor).bfloat16().cpu().contiguous()

    weights = load_file(case.model / _WEIGHTS, device=case.device)
    changed_weights = {name: changed(tensor) for name, tensor in weights.items()}
    save_file(changed_weights, folder / _WEIGHTS, metadata={"format": "pt"})
