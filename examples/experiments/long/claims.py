"""Claims about GSPO, each with the verdict of the results. Nothing here is written by hand but the claims."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from statistics import fmean
from typing import Any

from benchmarks.harness.section import Record
from examples.experiments.long.declared_runs import ARMS, CLIPS, DENOMINATORS, LAGS, LAST, RATES, ROUTINGS, last_reward
from examples.experiments.moe.comparison_run import COMPARED

CONFIRMED, FAILED, UNTESTED, NOT_RUN = "confirmed", "not confirmed", "could not be tested", "not run yet"
# A difference of mean rewards below this is none: two standard errors of 640 answers at a share of a half.
NOISE = 0.04
_MANY_TIMES, _COLLAPSE = 10.0, 0.5
_UPDATES = 4  # of a batch, in the runs of the other experiments
_LEARNT = 0.1  # rewards below are those of a model that cannot do the task, and compare nothing

Results = Mapping[str, Record]


@dataclass(frozen=True)
class Claim:
    """A claim with its verdict, and the figures behind it."""

    text: str
    verdict: str
    figures: str


def claims(results: Results) -> list[Claim]:
    """Every claim, in the order of the experiments."""
    return [
        *(_judged(text.format(arm=arm), judge, results, arm) for arm in ARMS for text, judge in _OF_ARM),
        *(_judged(text, judge, results, "dense") for text, judge in _OTHERS),
    ]


Judge = Callable[[Results, str], tuple[bool | None, str] | None]


def _judged(text: str, judge: Judge, results: Results, arm: str) -> Claim:
    judged = judge(results, arm)
    if judged is None:
        return Claim(text, NOT_RUN, "-")
    verdict = {True: CONFIRMED, False: FAILED, None: UNTESTED}[judged[0]]
    return Claim(text, verdict, judged[1])


def best_runs(results: Results, arm: str, algorithm: str) -> dict[int, Record]:
    """Seed -> its run at the learning rate with the highest reward on seed 0."""
    runs = [
        run
        for run in results.values()
        if (run["experiment"], run["arm"], run["algorithm"]) == ("ratio", arm, algorithm)
    ]
    first = [run for run in runs if run["seed"] == 0]
    if not first:
        return {}
    rate = max(first, key=last_reward)["learning_rate"]
    return {run["seed"]: run for run in runs if run["learning_rate"] == rate}


def _compared(results: Results, arm: str) -> tuple[list[list[Record]], str] | None:
    """The best runs of both algorithms on the seeds that both have, and how much was compared."""
    best = [best_runs(results, arm, algorithm) for algorithm in COMPARED]
    seeds = set.intersection(*(set(runs) for runs in best))
    if not seeds:
        return None
    num_rates = min(len(_rates(results, arm, algorithm)) for algorithm in COMPARED)
    scope = f"seeds: {len(seeds)}, learning rates tried: {num_rates} of {len(RATES[arm])}"
    return [[runs[seed] for seed in seeds] for runs in best], scope


def _rates(results: Results, arm: str, algorithm: str) -> set[float]:
    return {
        run["learning_rate"]
        for run in results.values()
        if (run["experiment"], run["arm"], run["algorithm"], run["seed"]) == ("ratio", arm, algorithm, 0)
    }


def _learns_at_least_as_fast(results: Results, arm: str) -> tuple[bool, str] | None:
    if not (compared := _compared(results, arm)):
        return None
    (gspo, grpo), scope = compared
    rewards = [fmean(map(last_reward, runs)) for runs in (gspo, grpo)]
    words = ", ".join(
        f"{name.upper()} {reward:.3f} at {runs[0]['learning_rate']:g}"
        for name, reward, runs in zip(COMPARED, rewards, (gspo, grpo), strict=True)
    )
    return rewards[0] >= rewards[1] - NOISE, f"reward of the last {LAST} steps: {words} ({scope})"


def _clips_many_times_as_many(results: Results, arm: str) -> tuple[bool, str] | None:
    if not (compared := _compared(results, arm)):
        return None
    runs, scope = compared
    gspo, grpo = (fmean(fmean(run["series"]["clipped_tokens"]) for run in of_one) for of_one in runs)
    return gspo >= _MANY_TIMES * grpo, f"clipped tokens: GSPO {gspo:.2%}, GRPO {grpo:.2%} ({scope})"


def _only_grpo_collapses(results: Results, arm: str) -> tuple[bool, str] | None:
    if not (compared := _compared(results, arm)):
        return None
    runs, scope = compared
    gspo, grpo = ([_end_over_best(run) for run in of_one] for of_one in runs)
    words = f"last reward over the best before: GSPO {min(gspo):.2f}, GRPO {min(grpo):.2f} ({scope})"
    return min(gspo) >= _COLLAPSE > min(grpo), words


def _end_over_best(run: Record) -> float:
    rewards = run["series"]["reward_mean"]
    best = max(fmean(rewards[end - LAST : end]) for end in range(min(LAST, len(rewards)), len(rewards) + 1))
    return last_reward(run) / best if best else math.nan


def _averages_noise(results: Results, arm: str) -> tuple[bool, str] | None:
    measured = best_runs(results, arm, "gspo").get(0, {}).get("mismatch")
    if not measured:
        return None
    longest = measured[-1]
    factor = longest["sequence"] / longest["token"] * longest["tokens"] ** 0.5
    falls = all(after["sequence"] < before["sequence"] for before, after in pairwise(measured))
    words = (
        f"at {longest['tokens']} tokens: {longest['sequence']:.2e} of a sequence, {longest['token']:.2e} of a token, "
        f"{factor:.2f} times what independent tokens would have; it {'falls' if falls else 'does not fall'} with each "
        "doubling of the length"
    )
    return falls and factor < 2, words


def _gspo_token_is_alike(results: Results, arm: str) -> tuple[bool, str] | None:
    by_token = [run for run in results.values() if run["algorithm"] == "gspo_token" and run["arm"] == arm]
    same = best_runs(results, arm, "gspo").get(by_token[0]["seed"]) if by_token else None
    if not same:
        return None
    rewards = last_reward(same), last_reward(by_token[0])
    return abs(
        rewards[0] - rewards[1]
    ) < NOISE, f"reward: GSPO {rewards[0]:.3f}, GSPO-token {rewards[1]:.3f} (one seed)"


def _noise_costs_less(results: Results, arm: str) -> tuple[bool, str] | None:
    runs = _by_seed(results, "noise", lambda run: (run["sigma"], run["algorithm"]))
    sigmas = sorted({sigma for sigma, _ in runs}, reverse=True)
    for name in COMPARED:
        runs[0.0, name] = best_runs(results, arm, name)
    for sigma in sigmas:
        compared = _at_equal_seeds(runs, [(noise, name) for name in COMPARED for noise in (0.0, sigma)])
        if compared:
            (gspo, noisy_gspo, grpo, noisy_grpo), num_seeds = compared
            lost = gspo - noisy_gspo, grpo - noisy_grpo
            words = f"reward lost at sigma {sigma:g}: GSPO {lost[0]:.3f}, GRPO {lost[1]:.3f} (seeds: {num_seeds})"
            return lost[0] <= lost[1] + NOISE, words
    return None


def _engine_log_probs_will_do(results: Results, arm: str) -> tuple[bool, str] | None:
    runs = _by_seed(results, "lag", lambda run: (run["max_lag"], run["algorithm_keys"]["old_logprobs"]))
    runs[0, "inference"] = best_runs(results, arm, "gspo") | runs.get((0, "inference"), {})
    pairs = {lag: _at_equal_seeds(runs, [(lag, name) for name in DENOMINATORS]) for lag in LAGS}
    both = {lag: compared for lag, compared in pairs.items() if compared}
    if not both:
        return None
    words = ", ".join(
        f"lag {lag}: {engine:.3f} and {recomputed:.3f} (seeds: {num_seeds})"
        for lag, ((engine, recomputed), num_seeds) in both.items()
    )
    holds = all(engine >= recomputed - NOISE for (engine, recomputed), _ in both.values())
    return holds, f"reward with the engine's and with recomputed log-probs: {words}"


def _more_updates_do_no_harm(results: Results, arm: str) -> tuple[bool, str] | None:
    rewards = {
        run["algorithm_keys"]["num_mini_batches"]: last_reward(run)
        for run in results.values()
        if run["experiment"] == "updates" and run["algorithm"] == "gspo"
    }
    if len(rewards) < 2:
        return None
    if other := best_runs(results, arm, "gspo").get(0):
        rewards[_UPDATES] = last_reward(other)
    words = ", ".join(f"{updates}: {reward:.3f}" for updates, reward in sorted(rewards.items()))
    return rewards[max(rewards)] >= rewards[min(rewards)] - NOISE, f"reward by updates of a batch: {words} (one seed)"


def _only_grpo_needs_routing_replay(
    results: Results, _arm: str, experiment: str = "routing"
) -> tuple[bool, str] | None:
    runs = _by_seed(results, experiment, lambda run: (run["algorithm"], run["algorithm_keys"]["routing_replay"]))
    if not (compared := _at_equal_seeds(runs, [(name, routing) for name in COMPARED for routing in ROUTINGS])):
        return None
    (gspo, gspo_replayed, grpo, grpo_replayed), num_seeds = compared
    words = (
        f"reward without and with it: GSPO {gspo:.3f} and {gspo_replayed:.3f}, GRPO {grpo:.3f} and {grpo_replayed:.3f} "
        f"(seeds: {num_seeds})"
    )
    return grpo_replayed > grpo + NOISE and gspo_replayed <= gspo + NOISE, words


def _bfloat16_does_no_harm(results: Results, _arm: str) -> tuple[bool, str] | None:
    names = {"float32": "routing-none-gspo-s0", "bfloat16": "bfloat16-none-gspo"}
    if not all(name in results for name in names.values()):
        return None
    rewards = {dtype: last_reward(results[name]) for dtype, name in names.items()}
    words = ", ".join(f"{dtype} {reward:.3f}" for dtype, reward in rewards.items())
    return rewards["bfloat16"] >= rewards["float32"] - NOISE, f"reward: {words} (one seed, recomputed log-probs)"


def _scaled_clip_learns_as_much(results: Results, _arm: str) -> tuple[bool | None, str] | None:
    runs = _by_seed(results, "clip", lambda run: "scaled" if run["algorithm_keys"] else "fixed")
    if not (compared := _at_equal_seeds(runs, list(CLIPS))):
        return None
    (fixed, scaled), num_seeds = compared
    words = f"reward: fixed {fixed:.3f}, scaled {scaled:.3f} (seeds: {num_seeds})"
    if max(fixed, scaled) < _LEARNT:
        return None, f"{words}: neither learned the task"
    return scaled >= fixed - NOISE, words


def _by_seed(results: Results, experiment: str, kind: Callable[[Record], Any]) -> dict[Any, dict[int, Record]]:
    """The runs of an experiment, by kind and seed."""
    runs: dict[Any, dict[int, Record]] = {}
    for run in results.values():
        if run["experiment"] == experiment:
            runs.setdefault(kind(run), {})[run["seed"]] = run
    return runs


def _at_equal_seeds(runs: Mapping[Any, Mapping[int, Record]], kinds: list[Any]) -> tuple[list[float], int] | None:
    """Mean last reward of each kind over the seeds that all have, and the number of these seeds."""
    seeds = set.intersection(*(set(runs.get(kind, {})) for kind in kinds))
    return ([fmean(last_reward(runs[kind][seed]) for seed in seeds) for kind in kinds], len(seeds)) if seeds else None


_OF_ARM: tuple[tuple[str, Judge], ...] = (
    ("GSPO learns at least as much as GRPO in equal steps ({arm})", _learns_at_least_as_fast),
    (f"GSPO clips at least {_MANY_TIMES:.0f} times as many tokens ({{arm}})", _clips_many_times_as_many),
    ("GRPO collapses and GSPO does not ({arm})", _only_grpo_collapses),
    ("A sequence's ratio averages the engine's mismatch over its tokens ({arm})", _averages_noise),
)
_OTHERS: tuple[tuple[str, Judge], ...] = (
    ("GSPO-token learns as GSPO does", _gspo_token_is_alike),
    ("Noise on the engine's log-probs costs GSPO no more than GRPO", _noise_costs_less),
    ("GSPO does without recomputed log-probs", _engine_log_probs_will_do),
    ("More updates of a batch do GSPO no harm", _more_updates_do_no_harm),
    ("Routing replay helps GRPO on a mixture, and GSPO needs none", _only_grpo_needs_routing_replay),
    (
        "The same with both engines in bfloat16",
        partial(_only_grpo_needs_routing_replay, experiment="bfloat16"),
    ),
    ("GSPO on a mixture learns as much with a learner in bfloat16 as in float32", _bfloat16_does_no_harm),
    ("A clip scaled by length learns at least as much as a fixed one", _scaled_clip_learns_as_much),
)


def verdicts(judged: list[Claim]) -> Iterator[str]:
    """How many claims have each verdict, in words."""
    for verdict in (CONFIRMED, FAILED, UNTESTED, NOT_RUN):
        if number := sum(claim.verdict == verdict for claim in judged):
            yield f"{number} {verdict}"
