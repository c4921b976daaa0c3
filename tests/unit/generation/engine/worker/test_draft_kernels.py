"""The kernels of vLLM that check draft tokens: those that are wrong are replaced, and those that are right stay."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from vllm.platforms import current_platform
from vllm.v1.sample import rejection_sampler

from gspo.generation.engine.worker import draft_kernels
from gspo.generation.engine.worker.draft_kernels import repair_kernels

EXPAND, REJECT = "expand_kernel", "rejection_random_sample_kernel"


@pytest.fixture(autouse=True)
def _vllms_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own kernels for the CPU, as its worker registers them."""
    with monkeypatch.context() as registering:  # its search for kernels fails at a module of numba's, if it is loaded
        for name in [name for name in sys.modules if name.startswith("llvmlite")]:
            registering.delitem(sys.modules, name)
        current_platform.register_triton_kernel_overrides()
    assert set(draft_kernels._wrong_kernels()) == {EXPAND, REJECT}


def expanded(values: torch.Tensor, replace_to: int = 0) -> list[float]:
    """The values of three requests with two drafts, none and one."""
    end_B = torch.tensor([2, 2, 3], dtype=torch.int32)
    expanded_T: torch.Tensor = rejection_sampler.expand_batch_to_tokens(values, end_B, 3, replace_to=replace_to)
    return [float(value) for value in expanded_T]


def test_every_request_has_its_own_temperature_and_cut() -> None:
    repair_kernels()
    assert expanded(torch.tensor([0.5, 0.25, 0.0]), replace_to=1) == [0.5, 0.5, 1.0]
    assert expanded(torch.tensor([0.5, 0.25, 0.75])) == [0.5, 0.5, 0.75]
    assert expanded(torch.tensor([7, 8, 9], dtype=torch.int32)) == [7, 7, 9]


def test_each_draft_is_taken_or_replaced_by_its_own_probability() -> None:
    """In the order of requests: the second draft is rejected, a placeholder is, none is, and none is tried (greedy)."""
    repair_kernels()
    likely, unlikely = [0.25, 0.75], [0.75, 0.25]
    output_BK = torch.full((4, 3), -1, dtype=torch.int32)
    rejection_sampler._rejection_random_sample(
        output_BK,
        torch.tensor([2, 4, 6, 8], dtype=torch.int32),
        torch.tensor([1, 1, -1, -1, 1, 1, 1, 1], dtype=torch.int32),
        None,
        torch.tensor([likely, unlikely, likely, likely, likely, likely, likely, likely]),
        torch.tensor([[5], [6], [7], [8]], dtype=torch.int32),
        torch.tensor([2, 3, 4, 4, 4, 4, 4, 4], dtype=torch.int32),
        torch.full((8,), 0.5, dtype=torch.float64),
        torch.tensor([False, False, False, True]),
        2,
        None,
    )
    assert output_BK.tolist() == [[1, 3, -1], [4, -1, -1], [1, 1, 7], [-1, -1, -1]]


def test_a_kernel_that_is_right_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def own(*arguments: Any) -> None:
        calls.append(arguments)
        draft_kernels._expand(*arguments)

    monkeypatch.setattr(rejection_sampler.expand_kernel, "_impl", own)
    repair_kernels()
    calls.clear()
    assert expanded(torch.tensor([0.5, 0.25, 0.75])) == [0.5, 0.5, 0.75]
    assert len(calls) == 1


@pytest.mark.parametrize("name", [EXPAND, REJECT])
def test_an_engine_whose_kernels_stay_wrong_does_not_start(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    is_right, _ = draft_kernels._CHECKED[name]
    monkeypatch.setattr(draft_kernels, "_CHECKED", {name: (is_right, lambda *arguments: None)})
    with pytest.raises(RuntimeError, match=rf"generation\.draft_tokens: vLLM's {name} .* Set draft_tokens: 0"):
        repair_kernels()
