"""The GPU of a rank and its peak: by its name on a machine with GPUs, by a measured product on a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import structlog
import torch

from gspo.common.telemetry.gpu_use import peak_flops
from gspo.learner.ranks.process_group import join
from gspo.learner.training.rank_gpus import gather_gpus, measured_flops_per_s
from tests.support.gpu_machine import PRODUCT, pretend_gpu_machine, uuid


@pytest.fixture(autouse=True)
def alone() -> None:
    """A process group of this process."""
    join("gloo", 60, torch.device("cpu"))


@pytest.mark.parametrize(("product", "peak"), [(PRODUCT, 989.5e12), ("NVIDIA GB999", None)])
def test_a_gpu_has_the_peak_of_its_name_or_none_which_is_said_once(
    product: str, peak: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_gpu_machine(monkeypatch, tmp_path, 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: product)
    peak_flops.cache_clear()
    with structlog.testing.capture_logs() as logs:
        assert gather_gpus(torch.device("cuda", 1), torch.bfloat16, 1, 1) == {uuid(1): peak}
        assert peak_flops(product) == peak, "a generator has the same kind"
    assert [line["gpu"] for line in logs] == ([] if peak else [product])


def test_a_cpu_is_measured_once() -> None:
    gpus = gather_gpus(torch.device("cpu"), torch.float32, 1, 0)
    assert gpus == {"CPU of rank 0": measured_flops_per_s(torch.float32, 1)}
    measured = gpus["CPU of rank 0"]
    assert measured is not None and measured > 1e8
