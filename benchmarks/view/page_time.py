"""The section `view`: how long the page of a run takes for a filtered table and for a search, over 200,000 rollouts.

The log is made up; the page is served by `gspo view`, and each figure is a whole HTTP request.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle, islice
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import httpx
import psutil

from benchmarks.harness.child_process import MeasurementError
from benchmarks.harness.section import Effort, Measurement, PageSection, Record, Results
from benchmarks.harness.tables import table
from benchmarks.view.made_log import ROLLOUTS_A_STEP, made_rows, made_run
from gspo.learner.storage.step_log import StepLog

_STEPS, _QUICK_STEPS = 782, 20
_REQUESTS, _QUICK_REQUESTS = 200, 20
_REQUEST_S, _STOP_S = 120.0, 10.0
_TEXT = """
`gspo view` over a made-up log of {rollouts:,} rollouts in {files} step files ({mib:,.0f} MiB; answers of {tokens:.0f} \
tokens and {characters:.0f} characters in the mean). A time is that of a whole request for a page of 50 rows. Every \
request has another filter, sort and page. A search is for a word in prompt or answer, which all, some or no \
rollouts have. The first page reads every file once, and the first search reads the texts once. *One further step*: \
the page of a step whose file has just been written. In the mean of the last minute, {load:.1f} processes ran or \
waited for one of the {cores} cores, the server's own included.

{times}

The server's processor time was {filter_cpu_ms:.0f} ms a filtered page and {search_cpu_ms:.0f} ms a search. After \
these requests it had {server_mib:,.0f} MiB of memory.
"""


def measurements(effort: Effort) -> Iterator[Measurement]:
    """One log; quick: a short one."""
    steps = _QUICK_STEPS if effort.quick else _STEPS
    yield Measurement(f"{steps * ROLLOUTS_A_STEP:,} rollouts", _measure, (steps, effort.quick))


def _measure(steps: int, quick: bool) -> Record:
    run_dir, num = made_run(steps), _QUICK_REQUESTS if quick else _REQUESTS
    files = list((run_dir / "log").glob("step-*.parquet"))
    rows = list(made_rows(1))
    with _served(run_dir) as (url, process), httpx.Client(base_url=url, timeout=_REQUEST_S) as client:
        first_s = _seconds(client, {})
        start_s = _processor_s(process)
        filtered_s = [_seconds(client, query) for query in islice(_filters(steps), num)]
        filters_s = _processor_s(process) - start_s
        first_search_s = _seconds(client, {"q": "nowhere"})
        start_s = _processor_s(process)
        found_s = [_seconds(client, query) for query in islice(_searches(), num)]
        searches_s = _processor_s(process) - start_s
        grown_s = _seconds_of_a_new_step(client, run_dir / "log", steps + 1)
        memory = process.memory_info().rss
    return {
        "rollouts": steps * ROLLOUTS_A_STEP,
        "files": len(files),
        "bytes": sum(file.stat().st_size for file in files),
        "tokens": sum(len(row.token_ids) for row in rows) / len(rows),
        "characters": sum(len(row.text) for row in rows) / len(rows),
        "seconds": {
            "a filtered page": filtered_s,
            "a search": found_s,
            "the first page": [first_s],
            "the first search": [first_search_s],
            "one further step": [grown_s],
        },
        "processor_s": {"a filtered page": filters_s / num, "a search": searches_s / num},
        "memory_bytes": memory,
        "load": os.getloadavg()[0],
        "cores": len(os.sched_getaffinity(0)),
    }


@contextmanager
def _served(run_dir: Path) -> Iterator[tuple[str, psutil.Process]]:
    """`gspo view` of a run: its URL and its process."""
    words = [sys.executable, "-m", "gspo.cli", "view", str(run_dir), "--port", "0"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().strip()
            if not url.startswith("http://"):
                raise MeasurementError(f"gspo view {run_dir} printed {url!r} and no URL")
            yield url, psutil.Process(process.pid)
        finally:
            process.terminate()
            process.wait(_STOP_S)


def _processor_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _seconds(client: httpx.Client, query: dict[str, Any]) -> float:
    began = time.perf_counter()
    answer = client.get("/rollouts", params=query)
    took_s = time.perf_counter() - began
    if answer.status_code != httpx.codes.OK:
        raise MeasurementError(f"/rollouts with {query} was answered with status {answer.status_code}")
    return took_s


def _seconds_of_a_new_step(client: httpx.Client, log_folder: Path, step: int) -> float:
    log = StepLog(log_folder)
    log.write(step, list(made_rows(step)))
    try:
        return _seconds(client, {"step": step})
    finally:
        log.remove([step])


def _filters(steps: int) -> Iterator[dict[str, Any]]:
    """Queries as a reader makes them; the same at every call."""
    draw = random.Random(0)
    sorts = cycle(("step", "reward", "advantage", "length", "outcome", "generator", "group"))
    while True:
        bound = round(draw.uniform(0, 1.1), 2)
        for query in (
            {},
            {"reward_min": bound},
            {"reward_max": bound, "outcome": "truncated"},
            {"advantage_min": bound, "generator": f"generation-{draw.randrange(3)}"},
            {"step": draw.randrange(1, steps + 1)},
        ):
            yield {**query, "sort": next(sorts), "dir": draw.choice(("asc", "desc")), "page": draw.randrange(1, 40)}


def _searches() -> Iterator[dict[str, Any]]:
    """Words of many answers, of few, and of none, alone and with a filter."""
    draw = random.Random(0)
    while True:
        place = draw.randrange(4096)
        for word in (f"Person {place} ", f"The answer is {place * 7}.", "xo", f"nowhere {place}"):
            yield {"q": word, **draw.choice(({}, {"reward_min": 0.5, "sort": "length"}))}


def text(results: Results) -> str:
    """A row for each kind of request."""
    (case,) = results["view"]
    kinds = case["seconds"]
    ms = {kind: [1e3 * second for second in seconds] for kind, seconds in kinds.items()}
    columns = (
        ("", list(ms), ""),
        ("requests", [len(values) for values in ms.values()], ""),
        ("median, ms", [median(values) for values in ms.values()], ",.0f"),
        ("p95, ms", [quantiles(values, n=20)[-1] if len(values) > 1 else None for values in ms.values()], ",.0f"),
        ("longest, ms", [max(values) for values in ms.values()], ",.0f"),
    )
    facts = {name: case[name] for name in ("rollouts", "files", "tokens", "characters", "load", "cores")}
    return _TEXT.format(
        **facts,
        mib=case["bytes"] / 2**20,
        server_mib=case["memory_bytes"] / 2**20,
        filter_cpu_ms=1e3 * case["processor_s"]["a filtered page"],
        search_cpu_ms=1e3 * case["processor_s"]["a search"],
        times=table(*columns),
    )


VIEW = PageSection("view", "The page of a run", measurements, text)
