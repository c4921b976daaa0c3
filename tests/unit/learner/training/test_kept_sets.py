"""Training on tokens that were sampled from few others: against a plain loop over all logits, and over every cut."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gspo.learner.assembly.rows import Row
from gspo.learner.training.trainer import Trainer
from tests.support.tiny_model import make_tiny_model
from tests.support.training.rollout_rows import digest, make_config, make_rows, set_logp, train, with_sets
from tests.unit.learner.training.test_trainer import GSPO, PlainLoop, assert_same_weights

TOP_K, TEMPERATURE = 12, 0.7
SAMPLING: dict[str, Any] = {"temperature": TEMPERATURE, "top_k": TOP_K, "top_p": 0.95}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("policy"), scale=4.0)


def rows_of(folder: Path, *, noise: float = 0.01, **sizes: Any) -> list[Row]:
    return with_sets(folder, make_rows(folder, temperature=TEMPERATURE, **sizes), TOP_K, noise)


class PlainSets(PlainLoop):
    """The plain loop with a softmax over all logits, of which those outside of a set are minus infinity."""

    def _logp(self, row: Row) -> torch.Tensor:
        return set_logp(self.model, row)


@pytest.mark.parametrize("packing", [True, False])
def test_losses_and_weights_are_those_of_a_dense_masked_softmax(folder: Path, packing: bool) -> None:
    config = make_config(folder, algorithm=GSPO, sampling=SAMPLING, learner={"packing": packing})
    trainer, plain = Trainer(config, folder), PlainSets(folder)
    for step in (1, 2):
        rows = rows_of(folder, step=step)
        # Ties have left some tokens without a set.
        rows[0] = without_sets(rows[0], slice(0, 2))
        figures = train(trainer, step, rows).metrics
        assert figures["loss"] == pytest.approx(plain.train(rows), rel=1e-5, abs=1e-7)
        assert figures["skipped_tokens_tied"] == rows[0].num_tied
    assert_same_weights(trainer, plain.model.state_dict())


def without_sets(row: Row, places: slice) -> Row:
    """The row as if ties had made the sets of some tokens too many to report."""
    sizes, mask = row.kept_sizes.copy(), row.mask.copy()
    is_there = np.ones(len(row.kept_ids), dtype=np.bool_)
    is_there[int(sizes[: places.start].sum()) : int(sizes[: places.stop].sum())] = False
    sizes[places], mask[places] = 0, False
    return replace(row, kept_sizes=sizes, mask=mask, kept_ids=row.kept_ids[is_there])


@pytest.mark.parametrize("learner", [{}, {"packing": False, "micro_batch_tokens": 100_000}], ids=str)
def test_at_equal_weights_every_ratio_is_one(folder: Path, learner: dict[str, Any]) -> None:
    """To the bit against the learner's own old log-probs, and to the engine's rounding against those of behavior."""
    for old_logprobs, most in (("recompute", 0.0), ("inference", 2e-6)):
        algorithm = {**GSPO, "old_logprobs": old_logprobs, "num_mini_batches": 1}
        config = make_config(folder, algorithm=algorithm, sampling=SAMPLING, learner=learner)
        rows = rows_of(folder, num_mini_batches=1, noise=0.0)
        figures = train(Trainer(config, folder), 1, rows).metrics
        assert abs(figures["log_ratio_max"]) <= most and abs(figures["log_ratio_mean"]) <= most
        assert figures["sigma_token"] < 2e-6
    # Over the whole distribution the same log-probs would be far away.
    biased = [replace(row, kept_sizes=row.kept_sizes[:0], kept_ids=row.kept_ids[:0]) for row in rows]
    assert train(Trainer(config, folder), 1, biased).metrics["sigma_token"] > 0.05


@pytest.mark.parametrize(
    "keys",
    [
        {"learner": {"lora": {"rank": 4}}},
        {"algorithm": {"entropy_coef": 0.1, "use_kl_loss": True, "preset": "grpo"}},
        {"learner": {"dtype": "bfloat16"}},
    ],
    ids=str,
)
def test_packing_and_the_cut_change_nothing(folder: Path, keys: dict[str, Any]) -> None:
    rows, results = rows_of(folder, num_mini_batches=1), []
    tolerance = 1e-3 if "dtype" in str(keys) else 1e-5
    for packing, tokens in ((True, 128), (False, 100_000)):
        learner = {"packing": packing, "micro_batch_tokens": tokens, **keys.get("learner", {})}
        config = make_config(folder, algorithm=keys.get("algorithm", GSPO), sampling=SAMPLING, learner=learner)
        trainer = Trainer(config, folder)
        results.append((train(trainer, 1, rows).metrics, trainer.engine.policy()))
    for name in ("loss", "grad_norm", "entropy", "k3"):
        assert results[0][0][name] == pytest.approx(results[1][0][name], rel=30 * tolerance, abs=1e-6), name
    for name, tensor in results[0][1].items():
        assert (tensor - results[1][1][name]).norm() < 10 * tolerance * tensor.norm(), name


def test_the_same_step_makes_the_same_bits(folder: Path) -> None:
    config, rows = make_config(folder, algorithm=GSPO, sampling=SAMPLING), rows_of(folder)
    digests = set()
    for _ in range(2):
        trainer = Trainer(config, folder)
        train(trainer, 1, rows)
        digests.add(digest(trainer))
    assert len(digests) == 1
