"""Seconds of a step and age of its tokens in the steady state of a run.

A run is a closed system: (max_lag + 1) B groups are open or in training, with B groups in a step. A group gives its
slot back when its version is live. So Little's law (N = rate * time) makes the mean time from issue to version
max_lag + 1 steps, for any lengths. If the slots are never idle, the mean age of a group is max_lag. How utilisation,
concurrency and tail act on staleness in an open system with a queue: Applied Compute, "Predicting and Controlling
Staleness in Fully Asynchronous RL Training", 3 July 2026,
https://www.appliedcompute.com/research/staleness-in-fully-async-rl.

A step takes T, the largest of these. The learner works for l and the engines, if they are full, for g. A group samples
for x, and a weight update takes u.

- l: the learner trains all the time.
- g: the engines sample all the time.
- (E[x] + l + u) / (max_lag + 1): Little's law, every slot is taken.
- (longest x + l + u) / (max_lag + 1), under `wait` alone: a step waits for its oldest group.

If the engines are full, groups wait for a place without a token, and so without an age. Then a group's mean age
is E[x] / T for its generation, 1/2 for the rest of its batch, and its time in the learner's queue, max_lag at most. In
an M/D/1 queue that is r^2 / (2 (1 - r)), with r = l / T.
The learner takes the oldest finished groups first. So all wait for the same age a, and only slow groups are older: the
age is max(a, x / T + 1/2). The mean gives a.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gspo.cli.plan.rollout_lengths import RolloutLengths
from gspo.common.config.schema import Config

# Of the learner, for its queue: a run is finite, and its slots bound the queue.
_MOST_USED = 0.98
_HALVINGS, _REPEATS, _MOST_DROPPED = 60, 30, 0.9


@dataclass(frozen=True)
class SteadyState:
    """A run after its first steps.

    Attributes:
        step_s: Seconds of a step.
        bound: The longest part: "training", "generation", "open groups" or "longest answers".
        staleness_mean, staleness_p95: In versions, over rollouts: the age of the oldest token.
        stale_share: The part of all tokens that `on_stale` drops or masks.
    """

    step_s: float
    bound: str
    staleness_mean: float
    staleness_p95: float
    stale_share: float


def steady_state(
    config: Config,
    lengths: RolloutLengths,
    *,
    token_s: float,
    generation_s: float,
    learner_s: float,
    update_s: float,
    window: bool,
) -> SteadyState:
    """The steady state of a run.

    Args:
        token_s: Seconds from one token of an answer to its next.
        generation_s: Seconds of all engines for the tokens of one step.
        learner_s: Seconds from a whole batch to the version made from it.
        update_s: From then on, until generators serve it and slots are free.
        window: Under `wait`, take the longest answer of all open groups, an upper bound, not of one step, a lower one.
    """
    x_G = lengths.groups().max(1) * token_s
    num_slots, lag = config.staleness.max_lag + 1, config.staleness.max_lag
    slot_s = learner_s + update_s
    bounds = {
        "training": learner_s,
        "generation": generation_s,
        "open groups": (float(x_G.mean()) + slot_s) / num_slots,
    }
    if lag == 0 or config.staleness.on_stale == "wait":
        longest = lengths.longest_of(config.algorithm.num_rollouts * (num_slots if window else 1))
        bounds["longest answers"] = (longest * token_s + slot_s) / num_slots
    if lag == 0:  # the engines rest while the learner works
        bounds["generation"] = generation_s + slot_s
    state = _state(config, lengths, token_s, learner_s, bounds)
    if lag and config.staleness.on_stale == "drop":
        # Dropped groups are sampled again, which makes a step longer, and so fewer groups too old.
        for _ in range(_REPEATS):
            again = generation_s / (1 - min(state.stale_share, _MOST_DROPPED))
            bounds["generation"] = (bounds["generation"] + again) / 2
            state = _state(config, lengths, token_s, learner_s, bounds)
    return state


def _state(
    config: Config, lengths: RolloutLengths, token_s: float, learner_s: float, bounds: Mapping[str, float]
) -> SteadyState:
    """The steady state with the longest of these bounds, in seconds, as its step."""
    lag, x_G = config.staleness.max_lag, lengths.groups().max(1) * token_s
    bound, step_s = max(bounds.items(), key=lambda item: item[1])
    mean = float(lag)
    if bound == "generation":
        used = min(learner_s / step_s, _MOST_USED)
        mean = min(mean, float(x_G.mean()) / step_s + 0.5 + used**2 / (2 * (1 - used)))
    age_G = _ages(x_G / step_s + 0.5, mean)
    if lag == 0 or config.staleness.on_stale == "wait":
        age_G = np.minimum(age_G, lag)
    stale_share = _stale_share(config, lengths, age_G, token_s / step_s)
    return SteadyState(step_s, bound, float(age_G.mean()), float(np.quantile(age_G, 0.95)), stale_share)


def _stale_share(config: Config, lengths: RolloutLengths, age_G: NDArray[np.float64], token_steps: float) -> float:
    """The share of the tokens whose age is above the limit.

    Args:
        token_steps: Steps of the learner from one token of an answer to its next.
    """
    staleness, length_GN = config.staleness, lengths.groups()
    if staleness.on_stale == "mask":
        # A token sampled t steps after the first one is t younger.
        stale_GN = np.clip((age_G[:, None] - staleness.token_age_limit) / token_steps, 0, length_GN)
    else:
        stale_GN = length_GN * (age_G > staleness.max_lag)[:, None]
    return float(stale_GN.sum() / length_GN.sum()) if staleness.max_lag else 0.0


def _ages(steps_G: NDArray[np.float64], mean: float) -> NDArray[np.float64]:
    """max(a, steps) with the a that gives this mean; a is 0 if the steps alone have a higher one."""
    low, high = 0.0, mean
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if float(np.maximum(middle, steps_G).mean()) > mean else (middle, high)
    return np.maximum(low, steps_G)
