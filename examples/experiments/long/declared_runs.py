"""The runs of the experiments on long answers, by name, with the keys that each changes.

Experiments:

- ratio: GSPO against GRPO, and GSPO-token
- noise: normal noise on the engine's log-probs
- lag: versions behind, and the denominator of the ratio
- updates: optimizer steps of a batch
- routing: the mixture's passes with the experts of the policy before the step
- bfloat16: the same with a learner in bfloat16, so that both engines are
- clip: one clip for all lengths and one scaled by length, on answers of 65 and 245 tokens
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from benchmarks.harness.child_process import MeasurementError
from benchmarks.harness.section import Record
from examples.experiments.moe.comparison_run import COMPARED, NUM_EXPERTS

ARMS = {"dense": 0, "mixture": NUM_EXPERTS}  # experts of a layer
# A mixture is not tried at the highest: it ends a dense model's learning.
RATES = {"dense": (3e-5, 1e-4, 3e-4), "mixture": (3e-5, 1e-4)}
# Learning rates are chosen on this seed, so no claim counts it.
TUNING_SEED = 0
COUNTED_SEEDS = (1, 2, 3)
_ENDS = {TUNING_SEED: "", **{seed: f"-s{seed}" for seed in COUNTED_SEEDS}}  # seed -> end of a run's name
SIGMAS = (3e-2, 1e-1)
LAGS = (0, 1, 4)
UPDATES = (1, 2, 8)
LAST = 10  # steps at the end of a run over which a mean is taken
# The denominator of the ratio, and the correction that belongs to it.
DENOMINATORS: dict[str, Record] = {
    "inference": {"old_logprobs": "inference"},
    "recompute": {"old_logprobs": "recompute", "behavior_correction": "truncate"},
}
# Each experts' choice of a mixture's passes, beside recomputed log-probs, which a replay needs.
ROUTINGS = ("none", "learner")
# The scaled clip is that of the paper at the longest answers, and wider for the others.
CLIPS: dict[str, Record] = {"fixed": {}, "scaled": {"pg_clip_reference_length": 245}}


@dataclass(frozen=True)
class LongRun:
    """A run.

    Attributes:
        learning_rate: None is that of the best run of the arm's RATES with this algorithm on TUNING_SEED.
        sigma: Standard deviation of the noise on each log-prob of the engine.
        algorithm_keys: Over those of the algorithm.
        example: Further options of the example's cold start.
    """

    experiment: str
    arm: str
    algorithm: str
    seed: int = TUNING_SEED
    learning_rate: float | None = None
    sigma: float = 0.0
    max_lag: int = 0
    learner_dtype: str = "float32"
    algorithm_keys: Record = field(default_factory=dict)
    example: tuple[str, ...] = ()


@dataclass(frozen=True)
class Scale:
    """Sizes of all runs: the model, its answers, and the training.

    Attributes:
        example: Options of the example's cold start.
        sections: Over the example's configuration.
    """

    steps: int
    example: tuple[str, ...] = ()
    sections: Mapping[str, Record] = field(default_factory=dict)


SCALES = {
    "small": Scale(steps=40, sections={"evaluation": {"num_answers": 2}}),
    # One GPU, never tried.
    "gpu": Scale(
        steps=300,
        example=("--sums", "160", "--hidden", "512", "--layers", "8", "--steps", "2000"),
        sections={
            "algorithm": {"rollout_batch_size": 32},
            "generation": {"threads": 0, "kv_cache_gb": 16},
            "learner": {"threads": 0},
        },
    ),
}


def declared_runs() -> dict[str, LongRun]:
    """Every run by its name, in an order in which those with the best rate come after the runs that tell it."""
    ratios = [(arm, algorithm) for arm in ARMS for algorithm in COMPARED]
    runs = {
        grid_name(arm, algorithm, rate): LongRun("ratio", arm, algorithm, learning_rate=rate)
        for arm, algorithm in ratios
        for rate in RATES[arm]
    }
    runs |= {
        f"{arm}-{algorithm}-best-s{seed}": LongRun("ratio", arm, algorithm, seed)
        for seed in COUNTED_SEEDS
        for arm, algorithm in ratios
    }
    routings = [(routing, algorithm) for routing in ROUTINGS for algorithm in COMPARED]
    runs |= {
        f"routing-{routing}-{algorithm}-s{seed}": _routing_run("routing", algorithm, routing, seed)
        for seed in _ENDS
        for routing, algorithm in routings
    }
    runs |= {
        f"lag-{lag}-{name}{end}": LongRun("lag", "dense", "gspo", seed, max_lag=lag, algorithm_keys=keys)
        for seed, end in _ENDS.items()
        for lag in LAGS
        for name, keys in DENOMINATORS.items()
        # Without a lag and with the engine's log-probs, a run is that of the ratios; one repeats it.
        if seed == TUNING_SEED or (lag, name) != (0, "inference")
    }
    runs |= {
        f"clip-{clip}-s{seed}": LongRun("clip", "dense", "gspo", seed, algorithm_keys=keys, example=("--varied",))
        for seed in _ENDS
        for clip, keys in CLIPS.items()
    }
    runs |= {
        f"noise-{sigma:g}-{algorithm}{end}": LongRun("noise", "dense", algorithm, seed, sigma=sigma)
        for seed, end in _ENDS.items()
        for sigma in SIGMAS
        for algorithm in COMPARED
    }
    runs |= {
        f"updates-{updates}-{algorithm}{end}": LongRun(
            "updates", "dense", algorithm, seed, algorithm_keys={"num_mini_batches": updates}
        )
        for seed, end in _ENDS.items()
        for updates in UPDATES
        for algorithm in COMPARED
    }
    runs |= {f"dense-gspo_token-best-s{seed}": LongRun("ratio", "dense", "gspo_token", seed) for seed in _ENDS}
    return runs | {
        f"bfloat16-{routing}-{algorithm}{end}": _routing_run(
            "bfloat16", algorithm, routing, seed, learner_dtype="bfloat16"
        )
        for seed, end in _ENDS.items()
        for routing, algorithm in routings
    }


def _routing_run(experiment: str, algorithm: str, routing: str, seed: int, **facts: Any) -> LongRun:
    keys = {**DENOMINATORS["recompute"], "routing_replay": routing}
    return LongRun(experiment, "mixture", algorithm, seed, algorithm_keys=keys, **facts)


def grid_name(arm: str, algorithm: str, rate: float) -> str:
    """The run that tries a learning rate."""
    return f"{arm}-{algorithm}-{rate:g}-s{TUNING_SEED}"


def last_reward(result: Record) -> float:
    """Mean reward of the last steps."""
    return fmean(result["series"]["reward_mean"][-LAST:])


def best_rate(arm: str, algorithm: str, results: Mapping[str, Record]) -> float:
    """The rate whose run has the highest reward at its end; GSPO-token has that of GSPO.

    Raises:
        MeasurementError: A run of these rates has no result.
    """
    names = {rate: grid_name(arm, algorithm.removesuffix("_token"), rate) for rate in RATES[arm]}
    if missing := [name for name in names.values() if name not in results]:
        raise MeasurementError(f"the best learning rate needs {', '.join(missing)}: make these first")
    return max(names, key=lambda rate: last_reward(results[names[rate]]))
