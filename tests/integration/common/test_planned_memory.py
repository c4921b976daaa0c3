"""The planned memory of a rank against real training: the slope of anonymous memory between two sizes of a model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from gspo.common.model.trained_parameters import TrainedSize
from gspo.common.planning.memory import host_bytes, published_bytes, rank_memory, snapshot_bytes
from tests.support.tiny_model import make_tiny_model
from tests.support.training.memory_cases import memory_config
from tests.support.training.started_ranks import run_ranks

pytestmark = [pytest.mark.timeout(600), pytest.mark.long]
# Widths and layers of two models, of 13 and 50 M parameters, and of 101 and 403 M, which take up to 14 GiB. Lengths and
# vocabulary are so small that only the parameters differ in memory. As in real models, the layers are so many that the
# one which is gathered for a version is small beside those that a rank owns.
TENS, HUNDREDS = ((256, 16), (512, 16)), ((512, 32), (1024, 32))
# ZeRO stage, offload, ranks.
CASES = ((0, "none", 1), (2, "none", 2), (3, "none", 2))


@pytest.fixture(scope="module")
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A tiny model, and both of a pair: the process takes memory for its libraries with the first one."""
    folder = tmp_path_factory.mktemp("models")
    sizes = zip(("small", "large"), request.param, strict=True)
    pair = [make_tiny_model(folder / name, hidden_size=width, layers=layers) for name, (width, layers) in sizes]
    return [make_tiny_model(folder / "tiny"), *pair]


@pytest.mark.parametrize(
    ("models", "case"),
    [
        (TENS, CASES[0]),
        *(pytest.param(TENS, case, marks=pytest.mark.long) for case in CASES[1:]),
        *(pytest.param(HUNDREDS, case, marks=pytest.mark.long) for case in CASES),
    ],
    indirect=["models"],
)
def test_memory_grows_with_the_parameters_as_planned(
    models: list[Path], case: tuple[int, str, int], tmp_path: Path
) -> None:
    stage, offload, num_ranks = case
    run_ranks(num_ranks, "tests.support.training.memory_cases", tmp_path, stage, offload, *models, timeout_s=500)
    planned = planned_growth(models, case)
    for rank in range(num_ranks):
        peaks = json.loads((tmp_path / f"{rank}.json").read_text())
        grown = {part: peaks["large"][part] - peaks["small"][part] for part in ("training", "versions")}
        first = planned["snapshot"] if rank == 0 else 0
        kept = planned["snapshot"] / num_ranks if stage == 3 else first
        assert grown["training"] == pytest.approx(planned["training"] + kept, rel=0.15)
        assert grown["versions"] == pytest.approx(planned["versions"], rel=0.15)


def planned_growth(models: list[Path], case: tuple[int, str, int]) -> dict[str, float]:
    """Bytes of a rank's training, of the version that is kept under a lag, and of its versions for pushes."""
    stage, offload, num_ranks = case
    config = memory_config(models[0], stage, offload)
    sizes = [TrainedSize(count, count) for count in map(num_parameters, models[1:])]
    small, large = (
        {
            "training": host_bytes(config, rank_memory(config, size, num_ranks, on_gpu=False), on_gpu=False),
            "snapshot": snapshot_bytes(config, size),
            "versions": published_bytes(config, size.num_parameters, num_ranks, 1),
        }
        for size in sizes
    )
    return {part: large[part] - small[part] for part in small}


def num_parameters(folder: Path) -> int:
    return sum(tensor.numel() for tensor in load_file(folder / "model.safetensors").values())
