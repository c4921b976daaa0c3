"""Planned memory against sizes made by hand: the output layer as gspo_core/logprobs.py allocates it, the snapshot."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.plans.published_models import published_models
from gspo.cli.plan.choice import trained_size_of
from gspo.common.planning.memory import learner_host_bytes, pass_bytes
from tests.support.training.rollout_rows import make_config

# A vocabulary of 151,936 tokens, states of 1,024 numbers.
QWEN3 = published_models()["Qwen3-0.6B"]
WEIGHT, CHUNK = 151_936 * 1024, 151_936 * 512
STATES = 2 * 4096 * 1024


@pytest.mark.parametrize(
    ("dtype", "on_gpu", "num_bytes"),
    [
        # A chunk has all 4,096 rows. Weight and logits have copies in bfloat16, and log-probs of 256 rows stand beside.
        ("bfloat16", True, 4 * (STATES + WEIGHT + 8 * CHUNK + CHUNK / 2) + 2 * (WEIGHT + 8 * CHUNK)),
        ("float32", True, 4 * (STATES + WEIGHT + CHUNK + CHUNK / 2)),
        # A CPU multiplies the float32 weight itself, and makes log-probs of 2**22 logits at a time.
        ("bfloat16", False, 4 * (STATES + WEIGHT + CHUNK + 2**22)),
    ],
)
def test_the_output_layer_has_its_logits_gradient_and_rounded_copies(
    dtype: str, on_gpu: bool, num_bytes: float
) -> None:
    config = make_config(Path("model"), learner={"dtype": dtype, "micro_batch_tokens": 4096})
    assert pass_bytes(config, QWEN3, on_gpu=on_gpu)[1] == num_bytes


@pytest.mark.parametrize(("stage", "part"), [(2, 1.0), (3, 0.25)])
def test_a_host_has_the_snapshot_of_its_ranks(stage: int, part: float) -> None:
    """Four of sixteen ranks, the first one included; below ZeRO 3 that one has all of it."""
    config = make_config(Path("model"), learner={"zero_stage": stage}, staleness={"max_lag": 1})
    size = trained_size_of(config, QWEN3)
    with_lag, without = (
        learner_host_bytes(config.with_keys(staleness={"max_lag": lag}), size, 16, 4, on_gpu=True) for lag in (1, 0)
    )
    assert with_lag - without == pytest.approx(part * 4 * QWEN3.num_parameters)
