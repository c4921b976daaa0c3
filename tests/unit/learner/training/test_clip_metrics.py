"""Why sequences are outside the clip, where the truth is known: chosen log-probs, and a trainer with chosen noise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gspo.common.config.algorithm import AlgorithmConfig
from gspo.learner.objective.figures import at_start, clip_metrics, compared_stats, mismatch_metrics
from gspo.learner.training.trainer import Trainer
from gspo_core.stats import Stats, merge
from gspo_core.stats import figures as figures_of
from tests.support.tiny_model import make_tiny_model
from tests.support.training.rollout_rows import make_config, make_rows, train, with_version
from tests.unit.gspo_core.loss.objective_loss import objective_loss

CLIP = (0.004, 0.005)
NUM_UPDATES, NUM_SEQUENCES = 4, 3_200
PARTS = ("outside_clip_noise", "outside_clip_lag", "outside_clip_movement")
# Standard deviations of the noise of a token, of the noise that a sequence's tokens share, of a sequence's drift since
# its sampling, and of its movement by each update. Then the mean of the noise.
TOKEN, SHARED, LAG, MOVE, MEAN = 0.008, 0.0012, 0.003, 0.0015, -0.0004


def outside(log_s: Any, scale: Any) -> float:
    low, high = CLIP
    ratio = np.exp(log_s)
    return float(((ratio < 1 - low * scale) | (ratio > 1 + high * scale)).mean())


@pytest.mark.parametrize("reference_length", [None, 16])
@pytest.mark.parametrize("lag", [0.0, LAG])
def test_the_parts_are_those_that_were_put_in(lag: float, reference_length: int | None) -> None:
    """Answers of 3 to 39 tokens in four updates. The truth counts the sequences outside with fewer causes.

    The noise is measured on 2,000 other sequences of such lengths, as a probe does. It has heavy tails.
    """
    rng = np.random.default_rng(0)
    length = rng.integers(3, 40, NUM_SEQUENCES)
    noise = means_of_noise(rng, length)
    drift = noise + lag * rng.normal(size=NUM_SEQUENCES)
    update = np.arange(NUM_SEQUENCES) % NUM_UPDATES
    final = drift + MOVE * update * rng.normal(size=NUM_SEQUENCES)
    scale = np.sqrt(reference_length / length) if reference_length else 1.0
    truth = np.diff([0.0, *(outside(log_s, scale) for log_s in (noise, drift, final))])
    keys: dict[str, Any] = {"pg_clip_low": CLIP[0], "pg_clip_high": CLIP[1]}
    algorithm = AlgorithmConfig(**keys, pg_clip_reference_length=reference_length)

    stats = [stats_of(algorithm, final[update == k], length[update == k]) for k in range(NUM_UPDATES)]
    merged = merge([*stats, at_start(stats[0]), probe(rng, algorithm)])
    lengths = torch.tensor(length)
    mismatch = mismatch_metrics(algorithm, merged, figures_of(merged), lengths)
    figures = clip_metrics(algorithm, figures_of(merged), lengths, mismatch, is_fresh=False)
    # Shares of 800 sequences have a standard error of up to 1.8 %, and the noise is measured, not known.
    assert [figures[name] for name in PARTS] == pytest.approx(truth, abs=0.04)
    assert sum(figures[name] for name in PARTS) == pytest.approx(outside(final, scale))
    assert truth[0] > 0.03 and (truth[1] > 0.1) == (lag > 0) and truth[2] > 0.05, "a part is too small to show anything"
    assert figures["log_ratio_std_at_start"] == pytest.approx(drift.std(), rel=0.05)
    # At its own clip, noise alone puts one sequence in a hundred outside.
    narrow = np.exp(noise)
    beyond = np.abs(narrow - 1) > mismatch["noise_clip"] * scale
    assert beyond.mean() == pytest.approx(0.01, abs=0.005)


def stats_of(algorithm: AlgorithmConfig, log_s: Any, length: Any) -> Stats:
    """Sums of an update whose sequences have these log-ratios, each at every token."""
    mask = torch.arange(int(length.max())) < torch.tensor(length)[:, None]
    logp = torch.tensor(log_s)[:, None] * mask
    low, high = algorithm.clip
    reference = algorithm.pg_clip_reference_length
    return objective_loss(logp, 0 * logp, 0 * logp, mask, low=low, high=high, reference_length=reference).stats


def means_of_noise(rng: np.random.Generator, length: Any) -> Any:
    """Half of the sequences have four times the noise of the others."""
    size = rng.choice([0.5, 2.0], len(length))
    return MEAN + size * (
        SHARED * rng.normal(size=len(length)) + TOKEN * rng.normal(size=len(length)) / np.sqrt(length)
    )


def probe(rng: np.random.Generator, algorithm: AlgorithmConfig) -> Stats:
    length = rng.integers(3, 40, 2_000)
    mask_BT = torch.tensor(np.arange(40) < length[:, None])
    noise_BT = torch.tensor(means_of_noise(rng, length))[:, None] * mask_BT
    return compared_stats(algorithm, noise_BT, torch.zeros_like(noise_BT), mask_BT, mask_BT, None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("policy"), scale=4.0)


def trained(folder: Path, step: int, rows: Any, trainer: Trainer | None = None, **keys: Any) -> dict[str, float]:
    trainer = trainer or Trainer(make_config(folder, **keys), folder)
    return dict(train(trainer, step, rows).metrics)


def test_an_engine_that_computes_as_the_learner_does_has_no_noise(folder: Path) -> None:
    """Float32 on both sides and no lag: all that is outside has moved within the step."""
    figures = trained(folder, 1, make_rows(folder, noise=0.0), algorithm={"pg_clip": 1e-3})
    assert (figures["outside_clip_noise"], figures["outside_clip_lag"]) == (0, 0)
    assert figures["outside_clip_movement"] == figures["outside_clip_sequences"] > 0.2
    assert figures["noise_share"] < 1e-6 and figures["noise_clip"] < 1e-5


def test_without_a_lag_all_that_is_outside_at_the_start_is_noise(folder: Path) -> None:
    rows = make_rows(folder, noise=0.05, num_groups=16, num_mini_batches=1)
    figures = trained(folder, 1, rows, algorithm={"pg_clip": 0.01, "num_mini_batches": 1})
    assert figures["outside_clip_noise"] == figures["outside_clip_sequences"] > 0.2
    assert (figures["outside_clip_lag"], figures["outside_clip_movement"]) == (0, 0)
    assert figures["noise_share"] == figures["outside_clip_noise"]


def test_with_a_lag_the_rest_at_the_start_is_drift_and_unknown_without_a_probe(folder: Path) -> None:
    """The rollouts of step 5 are of the weights before step 4, whose update moves many answers outside."""
    steps = {step: make_rows(folder, step=step, num_groups=16, noise=0.05) for step in (4, 5)}
    algorithm = {"pg_clip": 0.05}
    with_probe = Trainer(make_config(folder, algorithm=algorithm), folder)
    without = Trainer(make_config(folder, algorithm=algorithm, learner={"mismatch_every": 0}), folder)
    for trainer in (with_probe, without):
        figures = trained(folder, 4, with_version(steps[4], 2), trainer)
        assert not {"outside_clip_noise", "outside_clip_lag", "noise_clip"} & figures.keys()
        assert figures["outside_clip_at_start"] >= 0
    probed, unknown = (trained(folder, 5, with_version(steps[5], 3), trainer) for trainer in (with_probe, without))
    assert probed["outside_clip_noise"] == probed["noise_share"] < 0.2
    assert probed["outside_clip_lag"] == pytest.approx(probed["outside_clip_at_start"] - probed["noise_share"])
    assert probed["outside_clip_lag"] > 0.2
    assert not {"outside_clip_noise", "outside_clip_lag", "noise_clip"} & unknown.keys()
    for name in ("outside_clip_at_start", "outside_clip_movement", "outside_clip_sequences"):
        assert probed[name] == unknown[name]


def test_under_recompute_neither_noise_nor_lag_is_in_the_ratio(folder: Path) -> None:
    algorithm = {"pg_clip": 1e-3, "old_logprobs": "recompute"}
    figures = trained(folder, 1, make_rows(folder, noise=0.05), algorithm=algorithm)
    assert not {"outside_clip_noise", "outside_clip_lag"} & figures.keys()
    assert figures["outside_clip_at_start"] == 0
    assert figures["outside_clip_movement"] == figures["outside_clip_sequences"] > 0.2


def test_the_start_is_the_first_update_that_was_applied(folder: Path) -> None:
    rows = make_rows(folder, noise=0.0)
    trainer = Trainer(make_config(folder, algorithm={"pg_clip": 1e-3}), folder)
    figures = train(trainer, 1, rows, not_applied=[0]).metrics
    assert figures["outside_clip_at_start"] == 0 < figures["outside_clip_movement"]
