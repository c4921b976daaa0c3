"""The experiments on long answers: declared runs, kept results, and verdicts, from runs written by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
import yaml

from benchmarks.harness import example
from benchmarks.harness.child_process import MeasurementError
from benchmarks.harness.kept_runs import KeptRuns, chosen_names
from examples.experiments.long.claims import NOT_RUN, UNTESTED, claims
from examples.experiments.long.declared_runs import SCALES, Scale, best_rate, declared_runs, grid_name
from examples.experiments.long.long_page import write_page
from examples.experiments.long.measured_run import sections
from examples.experiments.long.noisy_run import with_noise
from gspo.common.config.loading import parse_config


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


def verdict(results: dict[str, Any], start: str) -> str:
    (claim,) = (claim for claim in claims(results) if claim.text.startswith(start))
    return claim.verdict


def test_without_results_no_claim_has_a_verdict() -> None:
    assert {claim.verdict for claim in claims({})} == {NOT_RUN}
    assert {claim.figures for claim in claims({}) if claim.verdict == NOT_RUN} == {"-"}


@pytest.mark.parametrize(("gspo", "expected"), [(0.60, "confirmed"), (0.57, "confirmed"), (0.55, "not confirmed")])
def test_rewards_are_compared_up_to_two_standard_errors(gspo: float, expected: str) -> None:
    results = {"a": result("gspo", gspo), "b": result("grpo", 0.6)}
    assert verdict(results, "GSPO learns at least as much as GRPO in equal steps (dense)") == expected
    assert verdict(results, "GSPO learns at least as much as GRPO in equal steps (mixture)") == NOT_RUN


def test_each_algorithm_is_compared_at_its_best_learning_rate() -> None:
    results = {
        "a": result("gspo", 0.9, learning_rate=3e-4),
        "b": result("gspo", 0.1),
        "c": result("grpo", 0.7),
        "d": result("grpo", 0.2, learning_rate=3e-4),
    }
    (claim, *_) = claims(results)
    assert "GSPO 0.900 at 0.0003, GRPO 0.700 at 0.0001 (seeds: 1, learning rates tried: 2 of 3)" in claim.figures


def test_a_collapse_is_a_reward_below_half_of_the_best_before() -> None:
    stable, collapsed = result("gspo", 0.8), result("grpo", 0.8)
    results = {"a": stable, "b": collapsed}
    assert verdict(results, "GRPO collapses and GSPO does not (dense)") == "not confirmed"
    stable["series"]["reward_mean"] = [0.8] * 30
    collapsed["series"]["reward_mean"] = [0.8] * 20 + [0.3] * 10
    assert verdict(results, "GRPO collapses and GSPO does not (dense)") == "confirmed"


def test_a_sequence_averages_noise_where_its_spread_falls_like_that_of_independent_tokens() -> None:
    independent = [{"tokens": n, "answers": 9, "token": 0.1, "sequence": 0.1 / n**0.5} for n in (4, 16, 64)]
    equal = [row | {"sequence": 0.1} for row in independent]
    start = "A sequence's ratio averages the engine's mismatch over its tokens (dense)"
    assert verdict({"a": result("gspo", 0.5, mismatch=independent)}, start) == "confirmed"
    assert verdict({"a": result("gspo", 0.5, mismatch=equal)}, start) == "not confirmed"


def test_noise_is_judged_at_the_largest_sigma_that_both_have() -> None:
    results = {"a": result("gspo", 0.8), "b": result("grpo", 0.8)}
    start = "Noise on the engine's log-probs"
    assert verdict(results, start) == NOT_RUN
    for sigma, reward in ((0.01, 0.2), (0.1, 0.75)):
        results[f"gspo-{sigma}"] = result("gspo", reward, experiment="noise", sigma=sigma)
        results[f"grpo-{sigma}"] = result("grpo", 0.5, experiment="noise", sigma=sigma)
    assert verdict(results, start) == "confirmed"
    # A second seed counts where the runs without noise have it too.
    results["gspo-0.1-s1"] = result("gspo", 0.2, experiment="noise", sigma=0.1, seed=1)
    results["grpo-0.1-s1"] = result("grpo", 0.8, experiment="noise", sigma=0.1, seed=1)
    assert verdict(results, start) == "confirmed"
    results |= {"a1": result("gspo", 0.8, seed=1), "b1": result("grpo", 0.8, seed=1)}
    assert verdict(results, start) == "not confirmed"
    del results["grpo-0.1"], results["grpo-0.1-s1"]
    assert verdict(results, start) == "not confirmed"


def test_updates_of_a_batch_are_compared_with_the_four_of_the_other_runs() -> None:
    updates = {
        f"updates-{number}-gspo": result(
            "gspo", reward, experiment="updates", algorithm_keys={"num_mini_batches": number}
        )
        for number, reward in ((1, 0.5), (8, 0.7))
    }
    results = updates | {"a": result("gspo", 0.65), "b": result("gspo", 0.9, seed=1)}
    (claim,) = (claim for claim in claims(results) if claim.text.startswith("More updates"))
    assert claim.verdict == "confirmed"
    assert claim.figures == "reward by updates of a batch: 1: 0.500, 4: 0.650, 8: 0.700 (one seed)"


@pytest.mark.parametrize(("second", "expected"), [(0.6, "confirmed"), (0.4, "not confirmed")])
def test_the_engines_log_probs_are_judged_at_each_lag_over_the_seeds_that_both_have(
    second: float, expected: str
) -> None:
    rewards = {(0, "inference"): 0.6, (0, "recompute"): 0.6, (4, "inference"): second, (4, "recompute"): 0.6}
    results = {
        f"{lag}-{name}-{seed}": result(
            "gspo", reward, experiment="lag", seed=seed, max_lag=lag, algorithm_keys={"old_logprobs": name}
        )
        for (lag, name), reward in rewards.items()
        for seed in (0, 1)
    }
    start = "GSPO does without recomputed log-probs"
    assert verdict(results, start) == expected
    del results["4-recompute-0"], results["4-inference-1"]
    assert verdict(results, start) == "confirmed"
    # Without a lag, the run of the ratios stands for one of the engine's log-probs.
    del results["0-inference-1"]
    results |= {"dense-gspo-0.0001-s0": result("gspo", 0.6), "dense-gspo-best-s1": result("gspo", 0.1, seed=1)}
    assert verdict(results, start) == "not confirmed"


def test_routing_replay_is_judged_over_the_seeds_that_all_four_kinds_have() -> None:
    rewards = {("gspo", "none"): 0.8, ("gspo", "learner"): 0.82, ("grpo", "none"): 0.5, ("grpo", "learner"): 0.7}
    results = {
        f"{algorithm}-{routing}-{seed}": result(
            algorithm,
            reward,
            experiment="routing",
            arm="mixture",
            seed=seed,
            algorithm_keys={"routing_replay": routing},
        )
        for (algorithm, routing), reward in rewards.items()
        for seed in (0, 1)
    }
    start = "Routing replay helps GRPO"
    assert verdict(results, start) == "confirmed"
    results["grpo-learner-1"]["series"]["reward_mean"] = [0.1] * 12
    assert verdict(results, start) == "not confirmed"
    del results["gspo-none-1"]
    assert verdict(results, start) == "confirmed"
    del results["gspo-learner-0"]
    assert verdict(results, start) == NOT_RUN


@pytest.mark.parametrize(("reward", "expected"), [(0.57, "confirmed"), (0.55, "not confirmed")])
def test_a_learner_in_bfloat16_is_compared_with_one_in_float32(reward: float, expected: str) -> None:
    facts = {"arm": "mixture", "algorithm_keys": {"routing_replay": "none"}}
    results = {"routing-none-gspo-s0": result("gspo", 0.6, experiment="routing", **facts)}
    start = "GSPO on a mixture learns as much with a learner in bfloat16"
    assert verdict(results, start) == NOT_RUN
    results["bfloat16-none-gspo"] = result("gspo", reward, experiment="bfloat16", **facts)
    assert verdict(results, start) == expected


@pytest.mark.parametrize(("scaled", "expected"), [(0.57, "confirmed"), (0.55, "not confirmed")])
def test_the_scaled_clip_is_compared_with_the_fixed_one(scaled: float, expected: str) -> None:
    keys = {"pg_clip_reference_length": 245}
    results = {
        "clip-fixed-s0": result("gspo", 0.6, experiment="clip"),
        "clip-scaled-s0": result("gspo", scaled, experiment="clip", algorithm_keys=keys),
    }
    assert verdict(results, "A clip scaled by length") == expected


def test_runs_that_learn_nothing_compare_nothing() -> None:
    results = {
        "clip-fixed-s0": result("gspo", 0.02, experiment="clip"),
        "clip-scaled-s0": result("gspo", 0.03, experiment="clip", algorithm_keys={"pg_clip_reference_length": 245}),
    }
    assert verdict(results, "A clip scaled by length") == UNTESTED


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
    page = write_page(results, SCALES["small"], tmp_path / "long.md").read_text()
    first = page.partition("-->")[2].strip()
    assert first.startswith("Of 16 claims: 2 confirmed, 1 not confirmed, 13 not run yet.")
    assert "| dense-gspo-0.0001-s0, 0.0001 | 0.100 | 0.900 | 0.800 | 0.800 | 50.00% |" in page
    assert "Times are left out: other work took up to 90% of the machine" in page
    assert "s a step" not in page
    assert (tmp_path / "long-ratio.png").stat().st_size > 0
    assert "Processor: a processor. " in page
    results["dense-grpo-0.0001-s0"]["machine"] = results["dense-grpo-0.0001-s0"]["machine"] | {"processor": "another"}
    page = write_page(results, SCALES["small"], tmp_path / "long.md").read_text()
    assert "Processor: a processor, runs: 1 and another, runs: 1. " in page
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
    assert "Of 16 claims: 16 not run yet." in page
