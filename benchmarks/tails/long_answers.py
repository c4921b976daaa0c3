"""The section `tail`: the cost of a few very long answers for a run, by lag and with segments.

Engine and training step only take time (benchmarks/simulated), so that neither uses the other's core; the services are
real. Lengths are log-normal, the longest 20 times the median. Beside it are vLLM and DeepSpeed on shared cores, with
the lengths of a random model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import pandas as pd

from benchmarks.harness.gspo_run import END_S, START_S, answer_tokens, observed_run
from benchmarks.harness.section import Effort, Measurement, PageSection, Record, Results
from benchmarks.harness.tables import side_by_side, table
from benchmarks.harness.workload import MAX_TOKENS, write_config
from benchmarks.simulated.settings import Settings

GROUPS, SIZE, MAX_ROLLOUTS = 8, 8, 64
MEDIAN, LONGEST, SIGMA = 64, 20, 1.0
SEGMENT = 128
# A full engine makes 3,900 tokens/s; training takes nine tenths of that time for the same tokens.
DECODING = Settings(decode_s=0.01, decode_s_per_request=1e-4)
_TRAIN_SHARE = 0.9
_STEP_LIMIT_S = 60.0
SETTINGS = replace(
    DECODING,
    # Another generator computes the tokens of a segment's start again.
    prefill_s_per_token=1e-5,
    length_median=MEDIAN,
    length_sigma=SIGMA,
    length_longest=LONGEST,
    train_s=0.0,
    train_s_per_token=_TRAIN_SHARE * DECODING.decode_step_s(MAX_ROLLOUTS) / MAX_ROLLOUTS,
)
_TEXT = """
This part measures the cost of a few very long answers. Engine and training are simulated: a decode step of n requests \
takes 10 + 0.1 n ms, and training takes 0.9 of a full engine's time for the same tokens. Coordinator, streams, reward \
service, assembly, log and push are real. A step has 8 prompts with 8 answers, and the engine 64 places. Lengths are \
log-normal (sigma 1, median 64 tokens), at most 20 times the median.

Alone, a full engine makes {generation:,.0f} tokens/s and training takes {training:,.0f}. The ideal is the slower one, \
{ideal:,.0f}. Shares are of the learner's time, without the first steps, which fill the pipeline. Rows of vLLM and \
DeepSpeed use the same two cores and the lengths of the random model.

{ways}
"""


@dataclass(frozen=True)
class LongAnswerRun:
    """One way to run it. `dropped` steps fill the pipeline, until the longest answer has ended."""

    name: str
    steps: int
    dropped: int
    staleness: dict[str, Any]
    generation: dict[str, Any] = field(default_factory=dict)
    real: bool = False


_MASK, _SEGMENTS = {"max_lag": 4, "on_stale": "mask", "max_token_age": 16}, {"segment_tokens": SEGMENT}
_REAL = "vLLM and DeepSpeed, max_lag"
WAYS = (
    LongAnswerRun("synchronous (max_lag 0)", 8, 1, {"max_lag": 0}),
    LongAnswerRun("max_lag 1", 14, 4, {"max_lag": 1}),
    LongAnswerRun("max_lag 2", 18, 6, {"max_lag": 2}),
    LongAnswerRun("max_lag 4, mask", 45, 20, _MASK),
    LongAnswerRun(f"max_lag 4, mask, segments of {SEGMENT}", 45, 20, _MASK, _SEGMENTS),
    LongAnswerRun(f"max_lag 10, wait, segments of {SEGMENT}", 45, 20, {"max_lag": 10}, _SEGMENTS),
    LongAnswerRun(f"{_REAL} 0", 10, 2, {"max_lag": 0}, real=True),
    LongAnswerRun(f"{_REAL} 1", 10, 2, {"max_lag": 1}, real=True),
    LongAnswerRun(
        f"{_REAL} 4, mask, segments of {SEGMENT}", 16, 6, {"max_lag": 4, "on_stale": "mask"}, _SEGMENTS, real=True
    ),
)


def measurements(effort: Effort) -> Iterator[Measurement]:
    """Every way; quick: one with segments, for a few steps."""
    for way in WAYS[4:5] if effort.quick else WAYS:
        yield Measurement(way.name, _measure, (way, *((4, 1) if effort.quick else (way.steps, way.dropped))))


def rates_alone() -> dict[str, float]:
    """Tokens/s of generation with a full engine, and of training, each without the other: by the settings."""
    generation = MAX_ROLLOUTS / SETTINGS.decode_step_s(MAX_ROLLOUTS)
    return {"generation": generation, "training": 1 / SETTINGS.train_s_per_token}


def _measure(way: LongAnswerRun, num_steps: int, dropped: int) -> Record:
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
    simulation = ("", {}) if way.real else ("benchmarks.simulated.run", SETTINGS.to_environment())
    with observed_run(config, *simulation) as run:
        run.wait_for_end(START_S + num_steps * _STEP_LIMIT_S + END_S)
    steps, versions = run.steps(dropped, num_steps), run.rollouts(dropped, num_steps, "version")
    lengths, rates = versions.map(len), rates_alone()
    seconds, tokens = float(steps.duration_s.sum()), float(steps.tokens.sum())
    return {
        "way": asdict(way),
        "alone": rates,
        "ideal_tokens_per_s": None if way.real else min(rates.values()),
        "num_steps": len(steps),
        "seconds": seconds,
        "tokens_per_s": tokens / seconds,
        "masked_share": 1 - tokens / float(lengths.sum()),
        "age_mean": float(steps.age_mean.mean()),
        "age_max": float(steps.age_max.max()),
        "shares": {
            phase: float(steps[f"{phase}_s"].sum()) / seconds
            for phase in ("wait", "wait_old", "train", "log", "publish")
        },
        "answer_tokens": answer_tokens(lengths),
        "versions_mean": float(versions.map(lambda version_T: len(set(version_T))).mean()),
    }


def text(results: Results) -> str:
    """Trained tokens a second of each way beside the ideal, and where the learner's time went."""
    frame = pd.json_normalize(results["tail"], max_level=1)
    ages = side_by_side((frame.age_mean, ".1f"), (frame.age_max, ".0f"))
    ways = table(
        ("", frame.label, ""),
        ("trained tokens/s", frame.tokens_per_s, ",.0f"),
        ("of the ideal", frame.tokens_per_s / frame.ideal_tokens_per_s, ".0%"),
        ("training", frame["shares.train"], ".0%"),
        ("waiting", frame["shares.wait"], ".0%"),
        ("of it for old groups", frame["shares.wait_old"], ".0%"),
        ("log and publish", frame["shares.log"] + frame["shares.publish"], ".0%"),
        ("masked for age", frame.masked_share, ".0%"),
        ("age: mean, max", ages, ""),
        (
            "tokens an answer: mean, max",
            side_by_side(*((frame[f"answer_tokens.{key}"], ",.0f") for key in ("mean", "max"))),
            "",
        ),
        ("versions an answer", frame.versions_mean, ".1f"),
    )
    first = results["tail"][0]
    return _TEXT.format(**first["alone"], ideal=first["ideal_tokens_per_s"], ways=ways)


TAIL = PageSection("tail", "Long tails", measurements, text)
