"""A version that several ranks make together has the tensors and the digest of one that one rank makes alone."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from gspo.learner.push.policy_weights import PolicyWeights
from gspo.learner.training.policy_engine import PolicyEngine
from tests.integration.learner.spread.share_cases import CASES, GENERATION
from tests.support.tiny_model import make_tiny_model
from tests.support.training.rollout_rows import make_config
from tests.support.training.started_ranks import run_ranks

# By day test_trainer_ranks.py compares the versions of two ranks.
pytestmark = [pytest.mark.timeout(300), pytest.mark.long]
NUM_RANKS = [1, 2, 4]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {"plain": make_tiny_model(folder / "plain"), "mixture": make_tiny_model(folder / "mixture", num_experts=4)}


@pytest.fixture(scope="module")
def alone(models: dict[str, Path]) -> dict[str, PolicyWeights]:
    """The first version of each model, by one rank without ZeRO."""
    configs = {name: make_config(folder, generation=GENERATION) for name, folder in models.items()}
    engines = {name: PolicyEngine(configs[name], folder) for name, folder in models.items()}
    return {name: engine.begin_version(0, "", is_reused=False)() for name, engine in engines.items()}


@pytest.fixture(scope="module", params=NUM_RANKS, ids=lambda number: f"{number}-ranks")
def shared(request: Any, models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The digests, and what each rank owns."""
    out = tmp_path_factory.mktemp("shares")
    words = [f"{name}={path}" for name, path in models.items()]
    run_ranks(request.param, "tests.integration.learner.spread.share_cases", out, *words, timeout_s=240)
    files = ["digests.json", *(f"owned-{rank}.json" for rank in range(request.param))]
    return [json.loads((out / file).read_text()) for file in files]


@pytest.mark.parametrize("case", CASES)
def test_ranks_make_the_versions_of_one_rank(
    shared: list[dict[str, Any]], alone: dict[str, PolicyWeights], case: str
) -> None:
    digests, *owned = (facts[case] for facts in shared)
    first, second, whole = digests
    policy = alone[CASES[case][0]]
    assert first == policy.digest
    assert first != second == whole
    # Each tensor has one owner, and each rank has layers.
    assert sorted(chain(*owned)) == sorted(entry.name for entry in policy.entries)
    assert all(owned)
    layers = [{name.split(".")[2] for name in names if ".layers." in name} for names in owned]
    assert sum(map(len, layers)) == len(set().union(*layers)), "a layer has two owners"
