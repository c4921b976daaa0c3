"""Claims about GSPO, each with the verdict of the results. Nothing here is written by hand but the claims.

A claim is that some differences have at least a bound. Each has a value on every counted seed, from runs of that seed
alone. The interval of their mean over the seeds decides; on fewer than LEAST_SEEDS there is no verdict.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from benchmarks.harness.section import Record
from examples.experiments.long.declared_runs import ARMS, COUNTED_SEEDS, LAGS, LAST, SIGMAS, UPDATES, last_reward
from examples.experiments.moe.comparison_run import COMPARED

CONFIRMED, REFUTED, UNDECIDED, NO_VERDICT = "confirmed", "refuted", "undecided", "no verdict"
LEAST_SEEDS = 3
# A difference of rewards that matters: two runs of equal keys and seed were 0.04 apart.
TOLERANCE = 0.05
# Of Student's t, by the number of seeds: the two-sided 95 % of a mean.
_T_95 = {3: 4.303, 4: 3.182, 5: 2.776}
_MANY_TIMES, _COLLAPSE, _MOST_SHARED = 10.0, 0.5, 2.0
_LEAST_SHARE = 1e-6  # of clipped tokens: about one in all answers of a run
_LEARNT = 0.1  # rewards below are those of a model that cannot do the task, and compare nothing

Results = Mapping[str, Record]
# The runs of one kind by their counted seeds.
Runs = Mapping[int, Record]


@dataclass(frozen=True)
class Difference:
    """A part of a claim.

    Attributes:
        words: Its subject.
        values: By seed; larger is in favour of the claim.
        bound: Its mean has at least this if the claim is right.
        shown: A value as the page shows it.
    """

    words: str
    values: Mapping[int, float]
    bound: float
    shown: Callable[[float], str] = "{:+.3f}".format

    @property
    def mean(self) -> float | None:
        """Over the seeds; None on fewer than LEAST_SEEDS."""
        return fmean(self.values.values()) if len(self.values) >= LEAST_SEEDS else None

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95 % interval of the mean; None without it."""
        if self.mean is None:
            return None
        half = _T_95[len(self.values)] * stdev(self.values.values()) / math.sqrt(len(self.values))
        return self.mean - half, self.mean + half

    @property
    def verdict(self) -> str:
        """Whether the whole interval is on one side of the bound."""
        if not (interval := self.interval):
            return NO_VERDICT
        low, high = interval
        return CONFIRMED if low >= self.bound else REFUTED if high < self.bound else UNDECIDED


@dataclass(frozen=True)
class Claim:
    """A claim, and the differences that decide it: all have to hold."""

    text: str
    differences: Sequence[Difference]

    @property
    def verdict(self) -> str:
        """Refuted by one difference, and confirmed by all."""
        verdicts = {difference.verdict for difference in self.differences}
        return next(verdict for verdict in (REFUTED, NO_VERDICT, UNDECIDED, CONFIRMED) if verdict in verdicts)


def claims(results: Results) -> list[Claim]:
    """Every claim, in the order of the experiments."""
    return [
        *(Claim(text.format(arm=arm), differences(results, arm)) for arm in ARMS for text, differences in _OF_ARM),
        *(Claim(text, differences(results)) for text, differences in _OTHERS),
    ]


def verdicts(judged: Sequence[Claim]) -> Iterator[str]:
    """How many claims have each verdict, in words."""
    numbers = Counter(claim.verdict for claim in judged)
    for verdict in (CONFIRMED, REFUTED, UNDECIDED, NO_VERDICT):
        if numbers[verdict]:
            yield f"{numbers[verdict]} {verdict}"


def _runs(results: Results, experiment: str, algorithm: str = "gspo", arm: str = "dense", **facts: object) -> Runs:
    """The runs of the counted seeds with these facts; a key that the algorithm lacks is None."""
    facts = {"experiment": experiment, "algorithm": algorithm, "arm": arm, **facts}
    return {
        run["seed"]: run
        for run in results.values()
        if run["seed"] in COUNTED_SEEDS
        and all((run | run["algorithm_keys"]).get(name) == value for name, value in facts.items())
    }


def _by_seed(figure: Callable[..., float], *kinds: Runs) -> dict[int, float]:
    """A figure of the runs of each seed that all kinds have."""
    seeds = sorted(set.intersection(*(set(runs) for runs in kinds)))
    return {seed: figure(*(runs[seed] for runs in kinds)) for seed in seeds}


def _rewards(words: str, more: Runs, less: Runs, bound: float = -TOLERANCE) -> Difference:
    """How much more reward the first has at the end, on the seeds on which one of them learned the task."""
    learnt = _by_seed(lambda *runs: max(map(last_reward, runs)), more, less)
    values = _by_seed(lambda first, second: last_reward(first) - last_reward(second), more, less)
    return Difference(words, {seed: value for seed, value in values.items() if learnt[seed] >= _LEARNT}, bound)


def _learns_as_much(results: Results, arm: str) -> Sequence[Difference]:
    gspo, grpo = (_runs(results, "ratio", algorithm, arm) for algorithm in COMPARED)
    return (_rewards(f"reward of the last {LAST} steps, GSPO less GRPO", gspo, grpo),)


def _clips_many_times_as_many(results: Results, arm: str) -> Sequence[Difference]:
    def magnitudes(gspo: Record, grpo: Record) -> float:
        shares = (fmean(run["series"]["clipped_tokens"]) for run in (gspo, grpo))
        first, second = (math.log10(max(share, _LEAST_SHARE)) for share in shares)
        return first - second

    values = _by_seed(magnitudes, *(_runs(results, "ratio", algorithm, arm) for algorithm in COMPARED))
    words = "clipped tokens, GSPO's as a multiple of GRPO's"
    return (Difference(words, values, math.log10(_MANY_TIMES), lambda value: f"{10**value:.0f}"),)


def _only_grpo_collapses(results: Results, arm: str) -> Sequence[Difference]:
    gspo, grpo = (_runs(results, "ratio", algorithm, arm) for algorithm in COMPARED)
    lost = _by_seed(lambda run: 1 - _end_over_best(run), grpo)
    return (
        Difference("share of its best reward that GRPO has lost at the end", lost, _COLLAPSE, "{:.2f}".format),
        Difference("share that GSPO still has", _by_seed(_end_over_best, gspo), _COLLAPSE, "{:.2f}".format),
    )


def _end_over_best(run: Record) -> float:
    rewards = run["series"]["reward_mean"]
    best = max(fmean(rewards[end - LAST : end]) for end in range(min(LAST, len(rewards)), len(rewards) + 1))
    return last_reward(run) / best if best else math.nan


def _averages_noise(results: Results, arm: str) -> Sequence[Difference]:
    def averaged(run: Record) -> float:
        longest = run["mismatch"][-1]
        return float(longest["token"] / longest["sequence"] / longest["tokens"] ** 0.5)

    measured = {seed: run for seed, run in _runs(results, "ratio", arm=arm).items() if run.get("mismatch")}
    words = "spread of independent tokens' mean, as a multiple of the sequence's"
    return (Difference(words, _by_seed(averaged, measured), 1 / _MOST_SHARED, "{:.2f}".format),)


def _gspo_token_is_alike(results: Results) -> Sequence[Difference]:
    by_sequence, by_token = (_runs(results, "ratio", algorithm) for algorithm in ("gspo", "gspo_token"))
    return (
        _rewards("reward, GSPO less GSPO-token", by_sequence, by_token),
        _rewards("GSPO-token less GSPO", by_token, by_sequence),
    )


def _noise_costs_less(results: Results) -> Sequence[Difference]:
    def saved(gspo: Record, noisy_gspo: Record, grpo: Record, noisy_grpo: Record) -> float:
        return last_reward(grpo) - last_reward(noisy_grpo) - (last_reward(gspo) - last_reward(noisy_gspo))

    sigma = max(SIGMAS)
    kinds = [
        _runs(results, experiment, algorithm, sigma=noise)
        for algorithm in COMPARED
        for experiment, noise in (("ratio", 0.0), ("noise", sigma))
    ]
    words = f"reward lost at sigma {sigma:g}, GRPO's less GSPO's"
    return (Difference(words, _by_seed(saved, *kinds), -TOLERANCE),)


def _engine_log_probs_will_do(results: Results) -> Sequence[Difference]:
    # Without a lag and with the engine's log-probs, a run is that of the ratios.
    engine = {lag: _runs(results, "lag", max_lag=lag, old_logprobs="inference") for lag in LAGS}
    engine[0] = _runs(results, "ratio")
    return [
        _rewards(
            f"reward at lag {lag}, the engine's less recomputed ones",
            engine[lag],
            _runs(results, "lag", max_lag=lag, old_logprobs="recompute"),
        )
        for lag in LAGS
    ]


def _more_updates_do_no_harm(results: Results) -> Sequence[Difference]:
    least, most = (_runs(results, "updates", num_mini_batches=number) for number in (min(UPDATES), max(UPDATES)))
    return (_rewards(f"reward, {max(UPDATES)} updates of a batch less {min(UPDATES)}", most, least),)


def _only_grpo_needs_routing_replay(results: Results, experiment: str = "routing") -> Sequence[Difference]:
    def runs(algorithm: str, routing: str) -> Runs:
        return _runs(results, experiment, algorithm, "mixture", routing_replay=routing)

    gspo, grpo = ((runs(algorithm, "none"), runs(algorithm, "learner")) for algorithm in COMPARED)
    return (
        _rewards("reward, GRPO with replay less without", grpo[1], grpo[0], TOLERANCE),
        _rewards("GSPO without less with", *gspo),
    )


def _bfloat16_does_no_harm(results: Results) -> Sequence[Difference]:
    less, more = (
        _runs(results, experiment, arm="mixture", routing_replay="none") for experiment in ("routing", "bfloat16")
    )
    return (_rewards("reward with recomputed log-probs, bfloat16 less float32", more, less),)


def _scaled_clip_learns_as_much(results: Results) -> Sequence[Difference]:
    fixed, scaled = (_runs(results, "clip", pg_clip_reference_length=length) for length in (None, 245))
    return (_rewards("reward, scaled less fixed", scaled, fixed),)


_OF_ARM: tuple[tuple[str, Callable[[Results, str], Sequence[Difference]]], ...] = (
    ("GSPO learns at least as much as GRPO in equal steps ({arm})", _learns_as_much),
    (f"GSPO clips at least {_MANY_TIMES:.0f} times as many tokens ({{arm}})", _clips_many_times_as_many),
    ("GRPO collapses and GSPO does not ({arm})", _only_grpo_collapses),
    ("A sequence's ratio averages the engine's mismatch over its tokens ({arm})", _averages_noise),
)
_OTHERS: tuple[tuple[str, Callable[[Results], Sequence[Difference]]], ...] = (
    ("Routing replay helps GRPO on a mixture, and GSPO needs none", _only_grpo_needs_routing_replay),
    ("GSPO does without recomputed log-probs", _engine_log_probs_will_do),
    ("A clip scaled by length learns at least as much as a fixed one", _scaled_clip_learns_as_much),
    ("Noise on the engine's log-probs costs GSPO no more than GRPO", _noise_costs_less),
    ("More updates of a batch do GSPO no harm", _more_updates_do_no_harm),
    ("GSPO-token learns as GSPO does", _gspo_token_is_alike),
    (
        "Routing replay helps GRPO on a mixture, and GSPO needs none, with both engines in bfloat16",
        lambda results: _only_grpo_needs_routing_replay(results, "bfloat16"),
    ),
    ("GSPO on a mixture learns as much with a learner in bfloat16 as in float32", _bfloat16_does_no_harm),
)
