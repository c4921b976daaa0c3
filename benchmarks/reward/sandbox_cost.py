"""The section `reward`: the cost of the sandbox beside a call in process and a bare multiprocessing pool.

The function is trivial, so that only the way to it and back is measured.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from statistics import median, quantiles
from typing import Any

from benchmarks.harness.section import Effort, Measurement, PageSection, Record, Results
from benchmarks.harness.services import running_services
from benchmarks.harness.tables import table
from benchmarks.harness.workload import write_config
from gspo.common.config.loading import read_config
from gspo.common.streams.entries import SCHEMA
from gspo.common.streams.inbox import append
from gspo.common.streams.instances import wait_for_instance
from gspo.reward.sandbox.calls import CallLimits, Code, Question
from gspo.reward.sandbox.execution import Sandbox
from gspo.reward.sandbox.levels import find_level
from gspo_proto.rollout_pb2 import OUTCOME_EOS, Prompt, Rollout

BATCH = 64
TRIVIAL = "def reward(completions, answer):\n    return [float(c == a) for c, a in zip(completions, answer)]\n"
SLOW = "import time\ndef reward(completions, answer):\n    time.sleep(0.2)\n    return [1.0] * len(completions)\n"
NUM_SLOW = 32
WITH_NUMPY = "import numpy\n" + TRIVIAL
_ARGUMENTS = {"completions": [f"the answer is {n}" for n in range(BATCH)], "answer": [str(n) for n in range(BATCH)]}
_QUESTION: Question = {"arguments": _ARGUMENTS}
_START_S, _STREAM_S = 60.0, 120.0
_ROLLOUTS, _GROUP_SIZE, _NUM_TOKENS, _AT_A_TIME = 10_000, 8, 128, 500
_TEXT = """
Batches of {batch} answers for a function that compares two texts. The pool is `multiprocessing.Pool` with the same \
function; for the rates, both receive all batches at once. *Through the streams*: the reward service and Redis, from \
rollouts of {tokens} tokens in its stream to the last score in the next.

{costs}
"""
# For each kind of measurement: its name, the sandbox, its baseline, and the comparison.
_ROWS: dict[str, tuple[str, str, str, Callable[[Record], str]]] = {
    "batch": (
        "a batch of 64, median, level {level}",
        "{sandbox_ms:,.2f} ms",
        "{in_process_ms:,.2f} ms in process",
        lambda case: f"{case['sandbox_ms'] - case['in_process_ms']:,.2f} ms added",
    ),
    "rate": (
        "rate, workers: {num_workers}",
        "{sandbox_per_s:,.0f} scores/s",
        "{pool_per_s:,.0f} scores/s of a bare pool",
        lambda case: f"{case['sandbox_per_s'] / case['pool_per_s']:.0%} of the pool",
    ),
    "beside": (
        "p99 of a fast function beside 32 calls of 200 ms",
        "{beside_p99_ms:,.2f} ms",
        "{alone_p99_ms:,.2f} ms alone",
        lambda case: f"{case['beside_p99_ms'] / case['alone_p99_ms']:,.2f} times",
    ),
    "first": (
        "from source to first score, the slowest",
        "{plain_s:,.2f} s",
        "{numpy_s:,.2f} s with numpy",
        lambda _: "",
    ),
    "stream": (
        "{num_rollouts:,} rollouts through stream, sandbox and back",
        "{per_s:,.0f} rollouts/s",
        "",
        lambda case: f"{case['seconds']:,.2f} s",
    ),
}


def measurements(effort: Effort) -> Iterator[Measurement]:
    """Overhead, rates, a slow function beside a fast one, the first score, and the whole service."""
    calls = 50 if effort.quick else 3000
    yield Measurement(f"a batch of {BATCH}, {calls} calls", _run, (_measure_overhead, calls))
    for num_workers in (1, 2):
        yield Measurement(f"rate, {num_workers} workers", _measure_rate, (num_workers, calls))
    yield Measurement("a slow function beside a fast one", _run, (_measure_beside, 200 if effort.quick else 2000))
    yield Measurement("from source to first score", _run, (_measure_first, 2 if effort.quick else 7))
    yield Measurement("through the streams", _run, (_measure_stream, 500 if effort.quick else _ROLLOUTS))


def _run(measure: Callable[..., Any], count: int) -> Record:
    record: Record = asyncio.run(measure(count))
    return record


def trivial(completions: list[str], answer: list[str]) -> list[float]:
    """TRIVIAL in this process, and in the pool's."""
    return [float(c == a) for c, a in zip(completions, answer, strict=True)]


def _in_pool(arguments: dict[str, list[str]]) -> list[float]:
    return trivial(**arguments)


@asynccontextmanager
async def _sandbox(source: str, num_workers: int = 1) -> AsyncIterator[Sandbox]:
    level = await find_level("landlock")
    sandbox = Sandbox(Code("bench", source, "0" * 64, "bench.py"), CallLimits(), level, num_workers=num_workers)
    await sandbox.load()
    try:
        yield sandbox
    finally:
        await sandbox.close()


async def _call(sandbox: Sandbox) -> float:
    """Seconds of one batch."""
    began = time.perf_counter()
    await sandbox.call(_QUESTION, session="bench")
    return time.perf_counter() - began


def _timed(call: Callable[[], Any]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


async def _measure_overhead(num_calls: int) -> Record:
    inside = [_timed(lambda: trivial(**_ARGUMENTS)) for _ in range(num_calls)]
    async with _sandbox(TRIVIAL) as sandbox:
        outside = [await _call(sandbox) for _ in range(num_calls)]
        level = sandbox.level.name
    return {"what": "batch", "level": level, "in_process_s": median(inside), "sandbox_s": median(outside)}


def _measure_rate(num_workers: int, num_calls: int) -> Record:
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
        await asyncio.gather(*(_call(sandbox) for _ in range(num_workers)))
        # All at once, like the pool: both queue the batches that are not in flight.
        began = time.perf_counter()
        await asyncio.gather(*(_call(sandbox) for _ in range(num_calls)))
        return time.perf_counter() - began


async def _measure_beside(num_calls: int) -> Record:
    async with _sandbox(TRIVIAL) as fast, _sandbox(SLOW, NUM_SLOW) as slow:
        await asyncio.gather(*(_call(slow) for _ in range(NUM_SLOW)))
        latencies = {"alone": await _latencies(fast, num_calls)}
        stop = asyncio.Event()

        async def keep_slow() -> int:
            number = 0
            while not stop.is_set():
                await _call(slow)
                number += 1
            return number

        busy = [asyncio.create_task(keep_slow()) for _ in range(NUM_SLOW)]
        latencies["beside"] = await _latencies(fast, num_calls)
        stop.set()
        num_slow = sum(await asyncio.gather(*busy))
    cuts = {name: quantiles(seconds, n=100) for name, seconds in latencies.items()}
    percentiles = {f"{name}_p{share}_s": cuts[name][share - 1] for name in cuts for share in (50, 99)}
    return {"what": "beside", "num_slow": num_slow, **percentiles}


async def _latencies(sandbox: Sandbox, num_calls: int) -> list[float]:
    """Seconds of calls at a pace that leaves the machine idle in between."""
    latencies = []
    for _ in range(num_calls):
        latencies.append(await _call(sandbox))
        await asyncio.sleep(0.001)
    return latencies


async def _measure_first(rounds: int) -> Record:
    level = await find_level("landlock")
    slowest_s = {"plain_s": 0.0, "numpy_s": 0.0}
    for name, source in zip(slowest_s, (TRIVIAL, WITH_NUMPY), strict=True):
        for number in range(rounds):
            began = time.perf_counter()
            sandbox = Sandbox(Code("bench", f"{source}# {number}\n", "0" * 64, "bench.py"), CallLimits(), level)
            await sandbox.load()
            await _call(sandbox)
            slowest_s[name] = max(slowest_s[name], time.perf_counter() - began)
            await sandbox.close()
    return {"what": "first", **slowest_s}


async def _measure_stream(num_rollouts: int) -> Record:
    """Rollouts a second from the stream through the sandbox into the next stream."""
    path = write_config("reward", "fixed", "float32")
    (path.parent / "reward.py").write_text(TRIVIAL)
    (path.parent / "prompts.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    entries = [_rollout(number).SerializeToString() for number in range(num_rollouts)]
    async with running_services(read_config(path), "reward") as services:
        await wait_for_instance(services.redis, services.keys, "reward", _START_S)
        began = time.perf_counter()
        for start in range(0, num_rollouts, _AT_A_TIME):
            await append(services.redis, services.keys.rollouts, entries[start : start + _AT_A_TIME])
        await services.wait_for_entries(services.keys.scored, num_rollouts, _STREAM_S)
        seconds = time.perf_counter() - began
    return {"what": "stream", "num_rollouts": num_rollouts, "seconds": seconds, "per_s": num_rollouts / seconds}


def _rollout(number: int) -> Rollout:
    return Rollout(
        schema=SCHEMA,
        group=number // _GROUP_SIZE,
        number=number % _GROUP_SIZE,
        attempt=1,
        num_rollouts=_GROUP_SIZE,
        prompt=Prompt(token_ids=[5, 6], text="1+1=", columns_json=json.dumps({"answer": "2"})),
        token_ids=range(_NUM_TOKENS),
        logp=[-0.5] * _NUM_TOKENS,
        version=[0] * _NUM_TOKENS,
        mask=b"\1" * _NUM_TOKENS,
        text="the answer is 2" * 8,
        outcome=OUTCOME_EOS,
    )


def text(results: Results) -> str:
    """The cost of the sandbox, each figure beside its baseline."""
    rows = []
    for case in results["reward"]:
        times_ms = {f"{key.removesuffix('_s')}_ms": case[key] * 1e3 for key in case if key.endswith("_s")}
        *styles, compare = _ROWS[case["what"]]
        rows.append([*(style.format(**case, **times_ms) for style in styles), compare({**case, **times_ms})])
    columns = zip(("", "sandbox", "beside", ""), zip(*rows, strict=True), [""] * 4, strict=True)
    return _TEXT.format(batch=BATCH, tokens=_NUM_TOKENS, costs=table(*columns))


REWARD = PageSection("reward", "The reward sandbox", measurements, text)
