"""Changes that are loaded into weights in place, beside whole loads of the same policies."""

from __future__ import annotations

import asyncio
from typing import Any

from gspo.common.host.machine import GIB
from gspo.generation.engine.staging import PolicyCopies
from gspo.generation.engine.vllm_engine import Engine
from gspo.learner.push.policy_weights import PolicyWeights
from tests.gpu.engine_calls import engine_of
from tests.gpu.part_run import PartRun
from tests.gpu.parts.push import changed_model, stage_policy

# About what a step changes of weights in bfloat16.
_CHANGED_SHARE = 0.03
_PLAIN: dict[str, Any] = {"worker_extension_cls": "tests.support.card.plain_products.PlainProducts"}


async def run(case: PartRun) -> None:
    """Load two policies: by a trial, by changes, by the changes back, and the second one whole."""
    copies = PolicyCopies.from_folder(case.model, "bfloat16")
    case.note(policy_gib=copies.num_bytes / GIB)
    first, second = (changed_model(case, version, _CHANGED_SHARE)[1] for version in (1, 2))
    async with engine_of(case, "bfloat16", **({} if case.on_gpu else _PLAIN)) as engine:
        engine._may_change_in_place = True
        case.note(trial_s=await _load(engine, copies, first))
        of_first = await engine.checksum(120)
        changes_s = await _load(engine, copies, second)
        case.note(changes_s=changes_s)
        case.judge("loaded in place", float(engine._may_change_in_place), at_least=1)
        of_second = await engine.checksum(120)
        case.note(changes_back_s=await _load(engine, copies, first))
        case.require(await engine.checksum(120) == of_first, "changes back left other weights than there were before")
        engine._may_change_in_place = False
        whole_s = await _load(engine, copies, second)
        case.require(
            await engine.checksum(120) == of_second != of_first, "changes left other weights than a whole load"
        )
        case.note(whole_s=whole_s)
        case.judge("changes, as a share of a whole load's time", changes_s / whole_s, at_most=0.5)
    copies.close()


async def _load(engine: Engine, copies: PolicyCopies, policy: PolicyWeights) -> float:
    """Seconds in which vLLM stands for a load."""
    await asyncio.to_thread(stage_policy, copies, policy)
    return (await engine.load(engine.version + 1, copies, on_update="recompute", timeout_s=120)).load_s
