"""A small run whose reward function changed at step 7, and what a browser shows of its page."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

from gspo.learner.assembly.rows import Row
from gspo.learner.storage.step_log import StepLog
from gspo.runlog.function_files import FunctionCalls, FunctionSource, write_calls, write_source

NUM_STEPS, CHANGED_AT = 12, 7
OLD_SOURCE = '''"""Scores sums."""

import re


def reward(completions, answer, **columns):
    """1 for a right answer."""
    return [score(text, right) for text, right in zip(completions, answer)]


def score(text, right):
    numbers = re.findall(r"-?\\\\d+", text)
    return float(bool(numbers) and int(numbers[-1]) == right)
'''.replace("\\\\", "\\")
NEW_SOURCE = OLD_SOURCE.replace("1 for a right answer", "1 for a right answer, a tenth for any number").replace(
    "    return float(bool(numbers) and int(numbers[-1]) == right)\n",
    "    if not numbers:\n        raise ValueError(f'no number in {text!r}')\n"
    "    return 1.0 if int(numbers[-1]) == right else 0.1\n",
)
OLD, NEW = (sha256(source.encode()).hexdigest() for source in (OLD_SOURCE, NEW_SOURCE))
_START_S = 60


def write_function_log(run_dir: Path, row: Row) -> None:
    """Two groups of four rollouts a step, scored by the version of their step.

    Args:
        row: What all of them have otherwise.
    """
    (run_dir / "log").mkdir(exist_ok=True)
    log = StepLog(run_dir / "log")
    for step in range(1, NUM_STEPS + 1):
        log.write(step, [_rollout(row, step, 2 * step + group, number) for group in (0, 1) for number in range(4)])
    for number, source in enumerate((OLD_SOURCE, NEW_SOURCE)):
        version = (OLD, NEW)[number]
        write_source(
            run_dir / "log",
            FunctionSource(
                name="sums", version=version, kind="reward", filename="sums.py", entry="", source=source, args={},
                is_tryable=True, reads=[], used_unix_s=float(number),
            ),
        )  # fmt: skip
    failure = {
        "unix_s": 1.0,
        "kind": "exception",
        "text": "raised ValueError: no number in 'I do not know' (sums.py line 15)",
        "traceback": "Traceback (most recent call last):\n  File 'sums.py', line 15, in score\nValueError: no number",
        "output": "",
    }
    calls = [
        FunctionCalls("sums", OLD, 48, 48, 0.021),
        FunctionCalls("sums", NEW, 52, 48, 0.034, {"exception": 6, "timeout": 1}, "judged 4 answers\n", failure),
    ]
    write_calls(run_dir / "log", "one", calls)


def _rollout(row: Row, step: int, group: int, number: int) -> Row:
    version = OLD if step < CHANGED_AT else NEW
    is_right = (number + step) % 4 < 1 + step // 5
    text = f"The sum is {group + 2 if is_right else group + 5}."
    value: float | None = 1.0 if is_right else (0.0 if version == OLD else 0.1)
    if version == NEW and number == 3 and step % 2:
        text, value = "I do not know", None
    parts = [] if value is None else [{"name": "sums", "value": value, "weight": 1.0, "version": version}]
    return replace(
        row,
        step=step,
        group=group,
        number=number,
        num_rollouts=4,
        prompt=f"2 + {group} = ",
        columns_json=json.dumps({"answer": group + 2}),
        text=text,
        reward=value,
        advantage=None if value is None else value - 0.5,
        skipped="failed" if value is None else None,
        failure=None if value is not None else "sums: raised ValueError: no number in 'I do not know'",
        parts_json=json.dumps(parts),
        reward_version=version,
        mini_batch=0,
    )


@asynccontextmanager
async def page_process(run_dir: Path, *words: str) -> AsyncIterator[str]:
    """Address of the page, as the command prints it."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "gspo.cli", "view", str(run_dir), "--port", "0", *words, stdout=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(_START_S):
            assert process.stdout is not None
            url = (await process.stdout.readline()).decode().strip()
        yield url
    finally:
        process.terminate()
        await process.wait()
