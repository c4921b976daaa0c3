"""The experiments on long answers: declared runs, kept results, and verdicts, from runs written by hand."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
import yaml

from benchmarks.harness import example
from benchmarks.harness.child_process import MeasurementError
from benchmarks.harness.kept_runs import KeptRuns, chosen_names
from examples.experiments.long.claims import CONFIRMED, NO_VERDICT, REFUTED, UNDECIDED, Claim, claims
from examples.experiments.long.declared_runs import COUNTED_SEEDS, SCALES, Scale, best_rate, declared_runs, grid_name
from examples.experiments.long.long_page import write_page
from examples.experiments.long.measured_run import sections
from examples.experiments.long.noisy_run import with_noise
from gspo.common.config.loading import parse_config
from gspo.common.telemetry.findings import RecentSteps, findings_of_run
from gspo.common.telemetry.learning_rules import LEARNING_RULES
from tests.support.repository.source_files import ROOT


def result(algorithm: str, reward: float, **facts: Any) -> dict[str, Any]:
    figures = {"clipped_tokens": 0.5 if algorithm == "gspo" else 0.01, "tokens": 100.0, "reward_mean": reward}
    names = ("entropy", "grad_norm", "token_log_ratio_std", "log_ratio_std", "sigma_token", "sigma_sequence")
    return {
        "experiment": "ratio",
        "arm": "dense",
        "algorithm": algorithm,
        "seed": 0,
        "learning_rate": 1e-4,
        "sigma": 0.0,
        "algorithm_keys": {},
        "steps": 12,
        "busy_share": 0.9,
        "measured_unix_s": 0.0,
        "machine": {"processor": "a processor", "cores": 2, "packages": {"torch": "1"}},
        "series": {name: [value] * 12 for name, value in (figures | dict.fromkeys(names, 0.1)).items()},
        "accuracy": [{"step": 0, "mean": 0.1, "stderr": 0.01}, {"step": 12, "mean": 0.9, "stderr": 0.01}],
        "seconds": list(range(12)),
        **facts,
    }


def on_seeds(name: str, rewards: Sequence[float], algorithm: str = "gspo", **facts: Any) -> dict[str, Any]:
    """Runs on the counted seeds, one for each reward."""
    return {
        f"{name}-s{seed}": result(algorithm, reward, seed=seed, **facts)
        for seed, reward in zip(COUNTED_SEEDS, rewards, strict=False)
    }


def judged(results: dict[str, Any], start: str) -> Claim:
    (claim,) = (claim for claim in claims(results) if claim.text.startswith(start))
    return claim


LEARNS = "GSPO learns at least as much as GRPO in equal steps (dense)"


def test_without_results_no_claim_has_a_verdict() -> None:
    assert {claim.verdict for claim in claims({})} == {NO_VERDICT}


@pytest.mark.parametrize(
    ("gspo", "expected", "interval"),
    [
        ((0.6, 0.6), NO_VERDICT, None),
        ((0.6, 0.6, 0.6), CONFIRMED, (0.0, 0.0)),
        # The standard deviation is 0.01, so half of the interval is 4.303 * 0.01 / sqrt(3) = 0.0248.
        ((0.59, 0.60, 0.58), CONFIRMED, (-0.0348, 0.0148)),
        ((0.56, 0.57, 0.55), UNDECIDED, (-0.0648, -0.0152)),
        ((0.50, 0.51, 0.49), REFUTED, (-0.1248, -0.0752)),
    ],
)
def test_an_interval_over_three_seeds_decides(
    gspo: tuple[float, ...], expected: str, interval: tuple[float, float] | None
) -> None:
    claim = judged(on_seeds("gspo", gspo) | on_seeds("grpo", [0.6] * 3, "grpo"), LEARNS)
    assert claim.verdict == expected
    assert claim.differences[0].interval == (interval and pytest.approx(interval, abs=1e-4))


def test_the_seed_that_chose_the_learning_rates_counts_for_nothing() -> None:
    results = on_seeds("gspo", [0.6, 0.6]) | on_seeds("grpo", [0.6] * 3, "grpo")
    chose = {f"{name}-s0": result(name, 0.6) for name in ("gspo", "grpo")}
    assert judged(results | chose, LEARNS).verdict == NO_VERDICT


def test_a_collapse_is_a_reward_below_half_of_the_best_before() -> None:
    results = on_seeds("gspo", [0.8] * 3) | on_seeds("grpo", [0.8] * 3, "grpo")
    start = "GRPO collapses and GSPO does not (dense)"
    assert judged(results, start).verdict == REFUTED
    for run in results.values():
        run["series"]["reward_mean"] = [0.8] * 20 + [0.3 if run["algorithm"] == "grpo" else 0.8] * 10
    assert judged(results, start).verdict == CONFIRMED


def test_clipped_tokens_are_compared_by_their_magnitude() -> None:
    results = on_seeds("gspo", [0.8] * 3) | on_seeds("grpo", [0.8] * 3, "grpo")
    claim = judged(results, "GSPO clips at least 10 times as many tokens (dense)")
    (difference,) = claim.differences
    assert (claim.verdict, difference.shown(difference.bound)) == (CONFIRMED, "10")
    assert [difference.shown(value) for value in difference.values.values()] == ["50"] * 3


def test_a_sequence_averages_noise_where_its_spread_falls_like_that_of_independent_tokens() -> None:
    independent = [{"tokens": n, "answers": 9, "token": 0.1, "sequence": 0.1 / n**0.5} for n in (4, 16, 64)]
    equal = [row | {"sequence": 0.1} for row in independent]
    start = "A sequence's ratio averages the engine's mismatch over its tokens (dense)"
    assert judged(on_seeds("gspo", [0.5] * 3, mismatch=independent), start).verdict == CONFIRMED
    assert judged(on_seeds("gspo", [0.5] * 3, mismatch=equal), start).verdict == REFUTED


def test_noise_is_judged_at_the_largest_sigma_by_what_each_algorithm_loses() -> None:
    results = on_seeds("gspo", [0.8] * 3) | on_seeds("grpo", [0.8] * 3, "grpo")
    start = "Noise on the engine's log-probs"
    assert judged(results, start).verdict == NO_VERDICT
    for sigma, reward in ((0.03, 0.2), (0.1, 0.75)):
        results |= on_seeds(f"gspo-{sigma}", [reward] * 3, experiment="noise", sigma=sigma)
        results |= on_seeds(f"grpo-{sigma}", [0.5] * 3, "grpo", experiment="noise", sigma=sigma)
    assert judged(results, start).differences[0].mean == pytest.approx(0.25)
    assert judged(results, start).verdict == CONFIRMED


def test_updates_of_a_batch_are_compared_from_the_fewest_to_the_most() -> None:
    results: dict[str, Any] = {}
    for number, reward in ((1, 0.7), (2, 0.1), (8, 0.5)):
        keys = {"num_mini_batches": number}
        results |= on_seeds(f"updates-{number}", [reward] * 3, experiment="updates", algorithm_keys=keys)
    claim = judged(results, "More updates")
    assert claim.verdict == REFUTED
    assert claim.differences[0].mean == pytest.approx(-0.2)


def test_the_engines_log_probs_are_judged_at_each_lag() -> None:
    def runs(lag: int, name: str, rewards: list[float]) -> dict[str, Any]:
        keys = {"old_logprobs": name}
        return on_seeds(f"{lag}-{name}", rewards, experiment="lag", max_lag=lag, algorithm_keys=keys)

    # Without a lag, the runs of the ratios stand for those of the engine's log-probs.
    results = on_seeds("dense-gspo-best", [0.6] * 3) | runs(0, "inference", [0.1] * 3)
    for lag in (1, 4):
        results |= runs(lag, "inference", [0.6] * 3)
    for lag in (0, 1, 4):
        results |= runs(lag, "recompute", [0.6] * 3)
    start = "GSPO does without recomputed log-probs"
    assert judged(results, start).verdict == CONFIRMED
    assert judged(results | runs(4, "inference", [0.4] * 3), start).verdict == REFUTED
    del results["1-recompute-s3"]
    assert judged(results, start).verdict == NO_VERDICT
    # A part that is refuted decides, whether the others have their seeds or not.
    assert judged(results | runs(4, "inference", [0.4] * 3), start).verdict == REFUTED


@pytest.mark.parametrize(
    ("start", "experiment"),
    [
        ("Routing replay helps GRPO on a mixture, and GSPO needs none", "routing"),
        ("Routing replay helps GRPO on a mixture, and GSPO needs none, with both engines in bfloat16", "bfloat16"),
    ],
)
def test_routing_replay_is_to_help_one_algorithm_and_not_the_other(start: str, experiment: str) -> None:
    rewards = {("gspo", "none"): 0.8, ("gspo", "learner"): 0.82, ("grpo", "none"): 0.5, ("grpo", "learner"): 0.7}
    results: dict[str, Any] = {}
    for (algorithm, routing), reward in rewards.items():
        facts = {"experiment": experiment, "arm": "mixture", "algorithm_keys": {"routing_replay": routing}}
        results |= on_seeds(f"{algorithm}-{routing}", [reward] * 3, algorithm, **facts)
    (verdict,) = (claim.verdict for claim in claims(results) if claim.text == start)
    assert verdict == CONFIRMED
    for seed in COUNTED_SEEDS:
        results[f"gspo-learner-s{seed}"]["series"]["reward_mean"] = [0.9] * 12
    (verdict,) = (claim.verdict for claim in claims(results) if claim.text == start)
    assert verdict == REFUTED


def test_a_learner_in_bfloat16_is_compared_with_one_in_float32() -> None:
    facts: dict[str, Any] = {"arm": "mixture", "algorithm_keys": {"routing_replay": "none"}}
    results = on_seeds("routing", [0.6] * 3, experiment="routing", **facts)
    start = "GSPO on a mixture learns as much with a learner in bfloat16"
    assert judged(results, start).verdict == NO_VERDICT
    assert judged(results | on_seeds("b", [0.5] * 3, experiment="bfloat16", **facts), start).verdict == REFUTED


@pytest.mark.parametrize(("fixed", "scaled", "expected"), [(0.6, 0.57, CONFIRMED), (0.02, 0.03, NO_VERDICT)])
def test_runs_that_learn_nothing_compare_nothing(fixed: float, scaled: float, expected: str) -> None:
    keys = {"pg_clip_reference_length": 245}
    results = on_seeds("fixed", [fixed] * 3, experiment="clip")
    results |= on_seeds("scaled", [scaled] * 3, experiment="clip", algorithm_keys=keys)
    assert judged(results, "A clip scaled by length").verdict == expected


def test_gspo_token_is_alike_in_both_directions() -> None:
    results = on_seeds("gspo", [0.6] * 3) | on_seeds("token", [0.8] * 3, "gspo_token")
    assert judged(results, "GSPO-token learns as GSPO does").verdict == REFUTED


def test_the_best_rate_waits_for_every_run_of_the_grid() -> None:
    results = {grid_name("dense", "gspo", rate): result("gspo", reward) for rate, reward in ((3e-5, 0.2), (1e-4, 0.6))}
    with pytest.raises(MeasurementError, match=r"dense-gspo-0\.0003-s0"):
        best_rate("dense", "gspo", results)
    results[grid_name("dense", "gspo", 3e-4)] = result("gspo", 0.4)
    assert best_rate("dense", "gspo", results) == 1e-4
    assert best_rate("dense", "gspo_token", results) == 1e-4


def test_every_experiment_is_declared_and_patterns_choose_its_runs() -> None:
    runs = declared_runs()
    experiments = ["ratio", "noise", "lag", "updates", "routing", "bfloat16", "clip"]
    assert {run.experiment for run in runs.values()} == set(experiments)
    assert {name for name, run in runs.items() if run.learner_dtype == "bfloat16"} == {
        name for name in runs if name.startswith("bfloat16-")
    }
    assert chosen_names("lag-4-*-s1,dense-gspo-0.0001-s0", list(runs)) == [
        "dense-gspo-0.0001-s0",
        "lag-4-inference-s1",
        "lag-4-recompute-s1",
    ]
    with pytest.raises(typer.BadParameter, match="lag-5-\\* is no run"):
        chosen_names("dense-*,lag-5-*", list(runs))


# Of the recorded runs, those whose held-out accuracy is far below what it was.
_FELL = {
    "dense-gspo-0.0003-s0",
    "dense-grpo-0.0003-s0",
    "routing-learner-gspo-s0",
    "bfloat16-none-gspo",
    "bfloat16-learner-gspo",
}

# Those whose sequences were nearly all outside the clip by lag, and for which age is recorded.
_STALE = {"lag-4-inference-s2", "lag-4-inference-s3"}


def test_of_the_recorded_runs_only_those_that_fell_or_lagged_have_a_finding_on_learning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(example, "CACHE", tmp_path)
    (tmp_path / "cold_start.json").write_text("{}")
    declared, named = declared_runs(), {}
    results: dict[str, Any] = json.loads((ROOT / "docs/long.json").read_text())
    for name, run in results.items():
        keys = sections(declared[name], SCALES["small"], run["learning_rate"])
        file = example.write_example(name, tmp_path, example="long", **keys)
        recent, series = RecentSteps(kept=None), run["series"]
        for place in range(len(series["reward_mean"])):
            recent.add(place + 1, {figure: of[place] for figure, of in series.items() if of[place] is not None})
        for point in run["accuracy"]:
            recent.add_evaluation("", point["step"], {f"sampled_{key}": point[key] for key in ("mean", "stderr")})
        judged = findings_of_run(
            LEARNING_RULES, recent.judged(), parse_config(yaml.safe_load(file.read_text()), tmp_path)
        )
        if judged:
            named[name] = {finding.rule for finding, _ in judged}
    expected = {name: {"held_out_falls"} for name in _FELL} | {name: {"policy_is_stale"} for name in _STALE}
    assert named == expected


@pytest.mark.parametrize("scale", list(SCALES.values()), ids=list(SCALES))
def test_every_declared_run_has_a_configuration_that_loads(
    scale: Scale, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(example, "CACHE", tmp_path)
    (tmp_path / "cold_start.json").write_text("{}")
    for name, run in declared_runs().items():
        written = example.write_example(name, tmp_path, example="long", **sections(run, scale, 1e-4))
        file = written if written.is_file() else written / "config.yaml"
        config = parse_config(yaml.safe_load(file.read_text()), file.parent)
        assert (config.seed, config.staleness.max_lag, config.learner.dtype) == (
            run.seed,
            run.max_lag,
            run.learner_dtype,
        )


def test_a_kept_run_is_not_made_again_and_those_before_a_failure_stay(tmp_path: Path) -> None:
    calls: list[str] = []

    def measure(name: str) -> dict[str, Any]:
        calls.append(name)
        if name == "fails":
            raise MeasurementError("it failed")
        return {"name": name}

    kept = KeptRuns(tmp_path / "runs.json")
    with pytest.raises(typer.Exit):
        kept.make(["first", "fails", "last"], measure)
    assert kept.results == {"first": {"name": "first"}}
    kept.make(["first", "last"], measure)
    assert calls == ["first", "fails", "last"]
    kept.make(["first"], measure, again=True)
    assert calls[-1] == "first"
    assert list(json.loads((tmp_path / "runs.json").read_text())) == ["first", "last"]


def test_noise_has_its_sigma_and_a_replay_gets_the_same() -> None:
    logp_T = np.full(20_000, -1.0, dtype=np.float32)
    noisy_T = with_noise(logp_T, 0.1, (3, 5, 7))
    assert np.std(noisy_T - logp_T) == pytest.approx(0.1, rel=0.03)
    assert np.mean(noisy_T - logp_T) == pytest.approx(0.0, abs=0.003)
    assert (noisy_T == with_noise(logp_T, 0.1, (3, 5, 7))).all()
    assert (noisy_T != with_noise(logp_T, 0.1, (3, 5, 8))).any()
    assert (with_noise(logp_T, 0.0, (3, 5, 7)) == logp_T).all()


def test_the_page_begins_with_the_verdicts_and_leaves_times_of_a_busy_machine_out(tmp_path: Path) -> None:
    results = {"dense-gspo-0.0001-s0": result("gspo", 0.8), "dense-grpo-0.0001-s0": result("grpo", 0.4)}
    results |= {"dense-gspo-best-s1": result("gspo", 0.8, seed=1), "dense-grpo-best-s1": result("grpo", 0.4, seed=1)}
    page = write_page(results, SCALES["small"], tmp_path / "long.md").read_text()
    first = page.partition("-->")[2].strip()
    assert first.startswith("Of 16 claims: 16 no verdict.")
    assert "| reward of the last 10 steps, GSPO less GRPO | -0.050 | +0.400 | - | - | - | - | - |" in page
    assert "| dense-gspo-0.0001-s0, 0.0001 | 0.100 | 0.900 | 0.800 | 0.800 | 50.00% |" in page
    assert "Times are left out: other work took up to 90% of the machine" in page
    assert "s a step" not in page
    assert (tmp_path / "long-ratio.png").stat().st_size > 0
    assert "Processor: a processor. " in page
    results["dense-grpo-0.0001-s0"]["machine"] = results["dense-grpo-0.0001-s0"]["machine"] | {"processor": "another"}
    page = write_page(results, SCALES["small"], tmp_path / "long.md").read_text()
    assert "Processor: a processor, runs: 3. Another: another, runs: 1. " in page
    quiet = {name: run | {"busy_share": 0.0} for name, run in results.items()}
    assert "| s a step |" in write_page(quiet, SCALES["small"], tmp_path / "long.md").read_text()


def test_the_page_splits_what_is_outside_the_clip_where_it_was_recorded(tmp_path: Path) -> None:
    run = result("gspo", 0.8, experiment="clip")
    shares = {"noise": [0.2, None, 0.1], "at_start": [0.3] * 3, "movement": [0.1] * 3, "sequences": [0.4] * 3}
    run["series"] = {name: values[:3] for name, values in run["series"].items()}
    run["series"] |= {f"outside_clip_{name}": values for name, values in shares.items()}
    run["series"]["noise_clip"] = [0.001, 0.002, 0.9]
    results = {"clip-fixed-s0": run, "dense-gspo-0.0001-s0": result("gspo", 0.8)}
    page = write_page(results, SCALES["small"], tmp_path / "long.md").read_text()
    table = page.partition("## Why sequences are outside the clip")[2]
    assert "| clip-fixed-s0 | 40.0% | 30.0% | 15.0% | 15.0% | - | 0.002 |" in table
    assert "dense-gspo" not in table


def test_the_page_can_be_written_before_any_run(tmp_path: Path) -> None:
    page = write_page({}, SCALES["small"], tmp_path / "long.md").read_text()
    assert "Of 16 claims: 16 no verdict." in page
