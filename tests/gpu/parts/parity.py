"""Log-probs of what vLLM samples, against the learner's own."""

from __future__ import annotations

from tests.gpu.engine_calls import answers, engine_of, prompts_of
from tests.gpu.learner_calls import difference
from tests.gpu.part_run import PartRun

# Wider than rounding: what computes something else is past them. bfloat16 has 8 bits, so a logit of 2 errs by 0.008.
LIMITS = {"bfloat16": 0.05, "float32": 0.005}


async def run(case: PartRun) -> None:
    """Sample in a dtype, then hold every token's log-prob against the learner's in the same dtype."""
    prompts, dtype = prompts_of(case), "float32" if case.part.endswith("_float32") else "bfloat16"
    async with engine_of(case, dtype) as engine:
        done = await answers(engine, prompts, case.sizes.answer_tokens, dtype)
    parity = difference(case, case.model, dtype, prompts, done)
    case.note(**{f"{dtype}_max": parity.largest, f"{dtype}_mean": parity.mean, "noise_share": parity.noise_share})
    case.judge(f"{dtype} standard deviation", parity.std, at_most=LIMITS[dtype])
    case.require(parity.std <= LIMITS[dtype], f"they differ by {parity.std:.3g} (std); at most {LIMITS[dtype]}")
