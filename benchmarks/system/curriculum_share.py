"""The section `curriculum`: the arithmetic example with many prompts that teach nothing, with and without a curriculum.

A quarter of the prompts are the example's. Of the others one half is too easy, since any near miss is right, and one
half is too hard, since the answer on file is wrong.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from benchmarks import CACHE
from benchmarks.harness.example import make_cold_start, write_example
from benchmarks.harness.gspo_run import ObservedRun, finished_run
from benchmarks.harness.section import Effort, Measurement, PageSection, Record, Results
from benchmarks.harness.tables import table

CASES = ("none", "spread")
_NUM_PROMPTS, _STEPS, _EVALUATE_EVERY, _RUN_S = 640, 80, 20, 600.0
# Of eight prompts in a row: a tolerance within which every answer of the cold start is, or a sum off by more than any.
_EASY, _WRONG, _TOLERANCE, _OFF = (1, 3, 5), (2, 6, 7), 3, 7
_REWARD = """
def reward(prompts, completions, answer, tolerance, **columns):
    texts = [completion[-1]["content"] for completion in completions]
    rows = zip(texts, answer, tolerance)
    return [float(text.isdigit() and abs(int(text) - int(right)) <= within) for text, right, within in rows]
"""
_TEXT = """
The arithmetic example on {prompts} prompts, of which a quarter teach something. For three eighths every near miss is \
right, and for three eighths the answer on file is wrong. `data.curriculum: spread` is compared with the order that it \
replaces, seed 0, {steps} steps. Accuracy is of 4 sampled answers to each of 250 held-out problems, interpolated to \
equal trained tokens. Differences of up to two standard errors are noise.

{table}
"""


def measurements(effort: Effort) -> Iterator[Measurement]:
    """One run without and one with a curriculum."""
    for curriculum in CASES:
        yield Measurement(f"curriculum {curriculum}", _measure, (curriculum, effort.num_steps(_STEPS)))


def _measure(curriculum: str, num_steps: int) -> Record:
    cold_start = make_cold_start("seed-0", "--seed", "0")
    files = _write_prompts(cold_start, CACHE / "curriculum")
    config = write_example(
        f"curriculum-{curriculum}",
        cold_start,
        data={"prompts": str(files / "prompts.jsonl"), "curriculum": curriculum},
        reward={"functions": [{"path": str(files / "reward.py")}]},
        evaluation={
            "prompts": str(files / "eval.jsonl"),
            "every": _EVALUATE_EVERY,
            "limit_between": None,
            "keep_best": None,
        },
        run={"total_steps": num_steps},
    )
    return {"curriculum": curriculum, "num_steps": num_steps, **_figures(finished_run(config, timeout_s=_RUN_S))}


def _write_prompts(cold_start: Path, folder: Path) -> Path:
    """Training prompts, of which most teach nothing, held-out ones that are the example's, and the reward."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [json.loads(line) for line in (cold_start / "prompts.jsonl").read_text().splitlines()[:_NUM_PROMPTS]]
    held_out = [json.loads(line) for line in (cold_start / "eval.jsonl").read_text().splitlines()]
    for place, row in enumerate(rows):
        row["tolerance"] = _TOLERANCE if place % 8 in _EASY else 0
        row["answer"] = str(int(row["answer"]) + _OFF) if place % 8 in _WRONG else row["answer"]
    for name, records in (("prompts", rows), ("eval", [{**row, "tolerance": 0} for row in held_out])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (folder / "reward.py").write_text(_REWARD)
    return folder


def _figures(run: ObservedRun) -> Record:
    figures = pd.DataFrame([line["figures"] for line in run.lines("metrics.jsonl")])
    tokens = [0.0, *figures["tokens"].cumsum()]
    return {
        "tokens": tokens,
        "spread": (1 - figures["zero_spread_groups"]).tolist(),
        "curve": [
            {
                "step": record["step"],
                "tokens": tokens[record["step"]],
                "accuracy": record["figures"]["sampled_mean"],
                "stderr": record["figures"].get("sampled_stderr"),
            }
            for record in run.lines("evaluations.jsonl")
        ],
    }


def text(results: Results) -> str:
    """Groups with spread in each quarter of the steps, and accuracy at equal tokens; a row for each case."""
    cases = results["curriculum"]
    last = min(case["tokens"][-1] for case in cases)
    columns: list[tuple[str, list[Any], str]] = []
    for quarter in range(4):
        steps = slice(quarter * cases[0]["num_steps"] // 4, (quarter + 1) * cases[0]["num_steps"] // 4)
        shares = [pd.Series(case["spread"])[steps].mean() for case in cases]
        columns.append((f"with spread, quarter {quarter + 1}", shares, ".0%"))
    for share in (0, 0.25, 0.5, 0.75, 1):
        header = f"accuracy at {share * last:,.0f} tokens" if share else "accuracy before"
        columns.append((header, [_accuracy(case, share * last) for case in cases], ".3f"))
    errors = [case["curve"][-1]["stderr"] for case in cases]
    return _TEXT.format(
        prompts=_NUM_PROMPTS,
        steps=cases[0]["num_steps"],
        table=table(("curriculum", [case["curriculum"] for case in cases], ""), *columns, ("stderr", errors, ".3f")),
    )


def _accuracy(case: Record, tokens: float) -> float:
    curve = pd.DataFrame(case["curve"])
    return float(np.interp(tokens, curve.tokens, curve.accuracy))


CURRICULUM = PageSection("curriculum", "A curriculum against prompts that teach nothing", measurements, text)
