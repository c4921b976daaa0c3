"""Part R, reward: what the sandbox costs beside a call in process and a bare multiprocessing pool.

The function is trivial, so that nothing but the way to it and back is measured.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from collections.abc import Callable, Iterator
from contextlib import asynccontextmanager
from statistics import median, quantiles
from typing import Any

from benchmarks.harness.measurement import Measurement
from benchmarks.reward import stream_rate
from gspo.reward.sandbox.calls import CallLimits, Code, Question
from gspo.reward.sandbox.execution import Sandbox
from gspo.reward.sandbox.levels import find_level

BATCH = 64
TRIVIAL = "def reward(completions, answer):\n    return [float(c == a) for c, a in zip(completions, answer)]\n"
SLOW = "import time\ndef reward(completions, answer):\n    time.sleep(0.2)\n    return [1.0] * len(completions)\n"
NUM_SLOW = 32
WITH_NUMPY = "import numpy\n" + TRIVIAL
_ARGUMENTS = {"completions": [f"the answer is {n}" for n in range(BATCH)], "answer": [str(n) for n in range(BATCH)]}
_QUESTION: Question = {"arguments": _ARGUMENTS}
_NUM_ROLLOUTS = 10_000


def cases(*, quick: bool) -> Iterator[Measurement]:
    """Overhead, rates, a slow function beside a fast one, the first score, and the whole service."""
    calls = 50 if quick else 3000
    yield Measurement(f"a batch of {BATCH}, {calls} calls", _overhead, (calls,))
    for num_workers in (1, 2):
        yield Measurement(f"rate, {num_workers} workers", _rate, (num_workers, calls))
    yield Measurement("a slow function beside a fast one", _beside, (200 if quick else 2000,))
    yield Measurement("from source to first score", _first_score, (2 if quick else 7,))
    yield Measurement("through the streams", stream_rate.measure, (500 if quick else _NUM_ROLLOUTS, TRIVIAL))


def trivial(completions: list[str], answer: list[str]) -> list[float]:
    """TRIVIAL in this process, and in the pool's."""
    return [float(c == a) for c, a in zip(completions, answer, strict=True)]


def _in_pool(arguments: dict[str, list[str]]) -> list[float]:
    return trivial(**arguments)


@asynccontextmanager
async def _sandbox(text: str, num_workers: int = 1) -> Any:
    found = await find_level("landlock")
    sandbox = Sandbox(Code("bench", text, "0" * 64, "bench.py"), CallLimits(), found.level, num_workers=num_workers)
    await sandbox.load()
    try:
        yield sandbox
    finally:
        await sandbox.close()


def _overhead(num_calls: int) -> dict[str, Any]:
    return asyncio.run(_measure_overhead(num_calls))


async def _measure_overhead(num_calls: int) -> dict[str, Any]:
    inside = [_timed(lambda: trivial(**_ARGUMENTS)) for _ in range(num_calls)]
    outside = []
    async with _sandbox(TRIVIAL) as sandbox:
        for _ in range(num_calls):
            began = time.perf_counter()
            await sandbox.call(_QUESTION, session="bench")
            outside.append(time.perf_counter() - began)
        level = sandbox.level.name
    return {"what": "batch", "level": level, "in_process_s": median(inside), "sandbox_s": median(outside)}


def _timed(call: Callable[[], Any]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def _rate(num_workers: int, num_calls: int) -> dict[str, Any]:
    with multiprocessing.get_context("fork").Pool(num_workers) as pool:
        batches = [_ARGUMENTS] * num_calls
        pool.map(_in_pool, batches[: 10 * num_workers], chunksize=1)
        pool_s = _timed(lambda: list(pool.imap_unordered(_in_pool, batches, chunksize=1)))
        pool.close()
        pool.join()  # before the block ends them by SIGTERM, of which they would complain
    sandbox_s = asyncio.run(_sandbox_rate(num_workers, num_calls))
    rates = {"pool_per_s": num_calls * BATCH / pool_s, "sandbox_per_s": num_calls * BATCH / sandbox_s}
    return {"what": "rate", "num_workers": num_workers, **rates}


async def _sandbox_rate(num_workers: int, num_calls: int) -> float:
    async with _sandbox(TRIVIAL, num_workers) as sandbox:
        await asyncio.gather(*(sandbox.call(_QUESTION, session="bench") for _ in range(num_workers)))
        # All at once, as the pool is given them: both keep what they have no room for in a queue of their own.
        began = time.perf_counter()
        await asyncio.gather(*(sandbox.call(_QUESTION, session="bench") for _ in range(num_calls)))
        return time.perf_counter() - began


def _beside(num_calls: int) -> dict[str, Any]:
    return asyncio.run(_measure_beside(num_calls))


async def _measure_beside(num_calls: int) -> dict[str, Any]:
    async with _sandbox(TRIVIAL) as fast, _sandbox(SLOW, NUM_SLOW) as slow:
        await asyncio.gather(*(slow.call(_QUESTION, session="bench") for _ in range(NUM_SLOW)))
        alone = await _latencies(fast, num_calls)
        stop = asyncio.Event()

        async def keep_slow() -> int:
            number = 0
            while not stop.is_set():
                await slow.call(_QUESTION, session="bench")
                number += 1
            return number

        busy = [asyncio.create_task(keep_slow()) for _ in range(NUM_SLOW)]
        beside = await _latencies(fast, num_calls)
        stop.set()
        num_slow = sum(await asyncio.gather(*busy))
    cuts = {"alone_p50_s": 50, "alone_p99_s": 99}
    found = {name: _percentile(alone, share) for name, share in cuts.items()}
    found |= {name.replace("alone", "beside"): _percentile(beside, share) for name, share in cuts.items()}
    return {"what": "beside", "num_slow": num_slow, **found}


async def _latencies(sandbox: Sandbox, num_calls: int) -> list[float]:
    """Seconds of calls at a pace that leaves the machine idle in between."""
    found = []
    for _ in range(num_calls):
        began = time.perf_counter()
        await sandbox.call(_QUESTION, session="bench")
        found.append(time.perf_counter() - began)
        await asyncio.sleep(0.001)
    return found


def _percentile(values: list[float], share: int) -> float:
    return quantiles(values, n=100)[share - 1]


def _first_score(rounds: int) -> dict[str, Any]:
    plain, numpy = (max(asyncio.run(_first_scores(text, rounds))) for text in (TRIVIAL, WITH_NUMPY))
    return {"what": "first", "plain_s": plain, "numpy_s": numpy}


async def _first_scores(text: str, rounds: int) -> list[float]:
    level = (await find_level("landlock")).level
    seconds = []
    for number in range(rounds):
        began = time.perf_counter()
        sandbox = Sandbox(Code("bench", text + f"# {number}\n", "0" * 64, "bench.py"), CallLimits(), level)
        await sandbox.load()
        await sandbox.call(_QUESTION, session="bench")
        seconds.append(time.perf_counter() - began)
        await sandbox.close()
    return seconds
