"""Part T, long tails: what a few very long answers cost a run, by lag and with segments.

Engine and training step only take time (benchmarks/simulated), so that neither takes the other's core away; all the
rest is the services. Lengths are log-normal, the longest 20 times the median. Beside it vLLM and DeepSpeed on shared
cores, with the lengths that a random model gives. Neighbour: rows_tail.py shows it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any

import pyarrow.parquet as pq

from benchmarks.harness.gspo_run import END_S, START_S, ObservedRun, observed_run
from benchmarks.harness.measurement import Measurement
from benchmarks.harness.sizes import MAX_TOKENS
from benchmarks.harness.tables import middle
from benchmarks.harness.workload import write_config
from benchmarks.simulated.settings import Settings

GROUPS, SIZE, MAX_ROLLOUTS = 8, 8, 64
MEDIAN, LONGEST, SIGMA = 64, 20, 1.0
# A full engine makes 3,900 tokens/s; training takes nine tenths of the time that they took.
_STEP_S, _STEP_S_PER_REQUEST = 0.01, 1e-4
_TRAIN_SHARE = 0.9
SEGMENT = 128
_STEP_LIMIT_S = 60.0


@dataclass(frozen=True)
class LongAnswerRun:
    """One way to run it. `dropped` steps fill the pipeline: so long as the longest answer is under way."""

    name: str
    steps: int
    dropped: int
    staleness: dict[str, Any]
    generation: dict[str, Any] = field(default_factory=dict)
    real: bool = False


_MASK = {"max_lag": 4, "on_stale": "mask", "max_token_age": 16}
WAYS = (
    LongAnswerRun("synchronous (max_lag 0)", 8, 1, {"max_lag": 0}),
    LongAnswerRun("max_lag 1", 14, 4, {"max_lag": 1}),
    LongAnswerRun("max_lag 2", 18, 6, {"max_lag": 2}),
    LongAnswerRun("max_lag 4, mask", 45, 20, _MASK),
    LongAnswerRun(f"max_lag 4, mask, segments of {SEGMENT}", 45, 20, _MASK, {"segment_tokens": SEGMENT}),
    LongAnswerRun(f"max_lag 10, wait, segments of {SEGMENT}", 45, 20, {"max_lag": 10}, {"segment_tokens": SEGMENT}),
    LongAnswerRun("vLLM and DeepSpeed, max_lag 0", 10, 2, {"max_lag": 0}, real=True),
    LongAnswerRun("vLLM and DeepSpeed, max_lag 1", 10, 2, {"max_lag": 1}, real=True),
    LongAnswerRun(
        f"vLLM and DeepSpeed, max_lag 4, mask, segments of {SEGMENT}",
        16,
        6,
        {"max_lag": 4, "on_stale": "mask"},
        {"segment_tokens": SEGMENT},
        real=True,
    ),
)


def cases(*, quick: bool) -> Iterator[Measurement]:
    """Every way; quick: one with segments, for a few steps."""
    for way in WAYS[4:5] if quick else WAYS:
        yield Measurement(way.name, _measure, (way, 4 if quick else way.steps, 1 if quick else way.dropped))


def settings() -> Settings:
    """How long things take."""
    full = Settings(decode_s=_STEP_S, decode_s_per_request=_STEP_S_PER_REQUEST)
    return Settings(
        decode_s=_STEP_S,
        decode_s_per_request=_STEP_S_PER_REQUEST,
        # A piece that goes on elsewhere is computed again.
        prefill_s_per_token=1e-5,
        length_median=MEDIAN,
        length_sigma=SIGMA,
        length_longest=LONGEST,
        train_s=0.0,
        train_s_per_token=_TRAIN_SHARE * full.decode_step_s(MAX_ROLLOUTS) / MAX_ROLLOUTS,
    )


def alone() -> dict[str, float]:
    """Tokens/s of generation with a full engine, and of training, each without the other: by the settings."""
    simulated = settings()
    generation = MAX_ROLLOUTS / simulated.decode_step_s(MAX_ROLLOUTS)
    return {"generation": generation, "training": 1 / simulated.train_s_per_token}


def _measure(way: LongAnswerRun, num_steps: int, dropped: int) -> dict[str, Any]:
    config = write_config(
        "tail",
        "long-tailed",
        "float32",
        algorithm={
            "rollout_batch_size": GROUPS,
            "num_return_sequences_in_group": SIZE,
            "response_length": MAX_TOKENS["long-tailed"] if way.real else LONGEST * MEDIAN,
        },
        generation={"engine": {}, "max_rollouts": MAX_ROLLOUTS, **way.generation},
        staleness=way.staleness,
        run={"total_steps": num_steps},
    )
    simulation = ("", {}) if way.real else ("benchmarks.simulated.run", settings().to_environment())
    with observed_run(config, *simulation) as run:
        run.wait_for_end(START_S + num_steps * _STEP_LIMIT_S + END_S)
    rates = alone()
    return {
        "way": asdict(way),
        "alone": rates,
        "ideal_tokens_per_s": None if way.real else min(rates.values()),
        **_window(run, num_steps, dropped),
    }


def _window(run: ObservedRun, num_steps: int, dropped: int) -> dict[str, Any]:
    """Trained tokens a second after the first `dropped` steps, and where the learner's time went."""
    lines = run.lines("metrics.jsonl")[dropped - 1 : num_steps]
    figures = [line["figures"] for line in lines[1:]]
    seconds = lines[-1]["unix_s"] - lines[0]["unix_s"]
    tokens = sum(figure["tokens"] for figure in figures)
    lengths, pieces = _answers(run, range(dropped + 1, num_steps + 1))
    return {
        "num_steps": len(figures),
        "seconds": seconds,
        "tokens_per_s": tokens / seconds,
        "masked_share": 1 - tokens / max(1, sum(lengths)),
        "age_mean": fmean(figure["age_mean"] for figure in figures),
        "age_max": max(figure["age_max"] for figure in figures),
        "shares": {
            phase: sum(figure[f"{phase}_s"] for figure in figures) / seconds
            for phase in ("wait", "wait_old", "train", "log", "publish")
        },
        "answer_tokens": {"median": middle(lengths), "mean": fmean(lengths), "max": max(lengths)},
        "versions_mean": fmean(pieces),
    }


def _answers(run: ObservedRun, steps: range) -> tuple[list[int], list[int]]:
    """Sampled tokens of each answer, and the versions that sampled it."""
    lengths: list[int] = []
    versions: list[int] = []
    for step in steps:
        table = pq.read_table(run.run_dir / "log" / f"step-{step:06d}.parquet", columns=["version"], partitioning=None)
        for version in table.column("version").to_pylist():
            lengths.append(len(version))
            versions.append(len(set(version)))
    return lengths, versions
