"""The planned memory of one of 64 ranks that train Qwen3-32B, against DeepSpeed on tensors without data."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.plans.published_models import published_models
from gspo.common.model.trained_parameters import TrainedSize
from gspo.common.planning.memory import FLOAT32_BYTES, rank_memory
from tests.support.training.fake_rank_cases import NUM_RANKS
from tests.support.training.rollout_rows import make_config

pytestmark = [pytest.mark.timeout(900), pytest.mark.long]
# DeepSpeed's reduce_bucket_size.
BUCKET_BYTES = FLOAT32_BYTES * 5 * 10**8


@pytest.mark.parametrize("num_layers", [8, pytest.param(64, marks=pytest.mark.long)])
def test_a_rank_of_64_holds_what_is_planned(tmp_path: Path, num_layers: int) -> None:
    out = tmp_path / "measured.json"
    command = [sys.executable, "-m", "tests.support.training.fake_rank_cases", str(out), str(num_layers)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=840, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    measured, profile = json.loads(out.read_text()), published_models()["Qwen3-32B"]
    assert (measured["num_parameters"] == profile.num_parameters) == (num_layers == profile.num_layers)
    size = TrainedSize(measured["num_parameters"], measured["num_parameters"])
    config = make_config(tmp_path, learner={"zero_stage": 3, "deepspeed": {}})
    planned = rank_memory(config, size, NUM_RANKS, profile=profile)
    # Beside them small weights stay whole on every rank: up to 0.7 M elements.
    assert measured["between_steps"] == pytest.approx(planned.states + BUCKET_BYTES, rel=0.01)
    assert measured["at_update"] == pytest.approx(planned.states + planned.update, rel=0.01)
    # A full bucket is reduced from a copy.
    planned_gathered = planned.buckets - 2 * BUCKET_BYTES
    assert 0.85 * planned_gathered <= FLOAT32_BYTES * measured["gathered_elements"] <= planned_gathered
