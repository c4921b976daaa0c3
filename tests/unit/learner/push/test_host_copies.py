"""Copies in host memory: no tensor sees its memory change, and memory without a tensor is used again."""

from __future__ import annotations

import ctypes
import gc
import os

import pytest
import torch
from torch import Tensor

from gspo.learner.push import host_copies
from gspo.learner.push.host_copies import (
    ALLOCATOR_VARIABLES,
    EXACTLY_LOCKED,
    HostCopies,
    ReusedBlocks,
    lock_no_more_than_needed,
)

NUM_ELEMENTS = 10


def copy_of(copies: HostCopies, value: float, *, is_reused: bool = True) -> list[Tensor]:
    """Two tensors of a value, one of them with its dimensions swapped."""
    with copies.begin(NUM_ELEMENTS, is_reused=is_reused) as copy:
        return [copy.add(torch.full((3, 2), value).T), copy.add(torch.full((4,), value))]


def test_a_copy_is_cast_and_contiguous() -> None:
    first, second = copy_of(HostCopies(torch.device("cpu"), torch.bfloat16), 1.0 + 2**-12)
    assert (first.shape, first.dtype, first.is_contiguous()) == (torch.Size([2, 3]), torch.bfloat16, True)
    assert first.tolist() == [[1.0] * 3] * 2 and second.tolist() == [1.0] * 4
    assert second.data_ptr() - first.data_ptr() == first.nbytes, "the tensors lie in one block"


def test_memory_is_used_again_when_nothing_refers_to_it() -> None:
    copies = HostCopies(torch.device("cpu"), torch.float32)
    first = copy_of(copies, 1.0)
    place = first[0].data_ptr()
    # Of the copy there remains an array over one of its tensors, as a version's bits are.
    bits = first[1].view(torch.uint32).numpy()
    kept = bits.copy()
    del first
    second, third = copy_of(copies, 2.0), copy_of(copies, 3.0)
    assert place not in {second[0].data_ptr(), third[0].data_ptr()}
    assert (bits == kept).all()
    del bits
    gc.collect()
    assert copy_of(copies, 4.0)[0].data_ptr() == place
    assert second[0].tolist() == [[2.0] * 3] * 2, "a later copy wrote into one that is held"


def test_a_copy_for_one_use_takes_no_kept_memory() -> None:
    copies = HostCopies(torch.device("cpu"), torch.float32)
    place = copy_of(copies, 1.0)[0].data_ptr()
    once = copy_of(copies, 2.0, is_reused=False)
    assert once[0].data_ptr() != place
    assert copy_of(copies, 3.0)[0].data_ptr() == place


def test_page_locked_memory_is_exactly_as_large_as_asked_and_a_block_that_is_too_small_is_let_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """CUDA's part is played by a set of locked places: no GPU is needed to count bytes."""
    locked: dict[int, int] = {}

    class Cuda:
        def cudaHostRegister(self, place: int, num_bytes: int, _flags: int) -> int:
            locked[place] = num_bytes
            return 0

        def cudaHostUnregister(self, place: int) -> None:
            del locked[place]

    monkeypatch.setattr(host_copies, "_cuda", Cuda)
    blocks = ReusedBlocks(is_locked=True)
    place = ctypes.addressof(blocks.take(1000))
    assert locked == {place: 1000}
    smaller = blocks.take(900)
    assert ctypes.addressof(smaller) == place, "the memory is not used again"
    del smaller
    larger = blocks.take(5000)
    assert locked == {ctypes.addressof(larger): 5000}


def test_torch_takes_the_setting_for_page_locked_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ALLOCATOR_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    lock_no_more_than_needed()
    assert torch._C._accelerator_getAllocatorSettings() == EXACTLY_LOCKED
    assert not any(name in os.environ for name in ALLOCATOR_VARIABLES), "a process of another torch would inherit it"
    with pytest.raises(ValueError, match="stoull"):  # a build for CPUs takes any value of a name that it does not know
        torch._C._accelerator_setAllocatorSettings(f"{EXACTLY_LOCKED.partition(':')[0]}:many")


def test_a_torch_that_does_not_know_the_setting_goes_on_without_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(settings: str) -> None:
        raise ValueError(f"Unrecognized key '{settings.partition(':')[0]}' in Accelerator allocator config.")  # 2.11's

    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", refuse)
    lock_no_more_than_needed()
    assert "Unrecognized key 'pinned_max_round_threshold_mb'" in capsys.readouterr().out


def test_a_users_own_setting_of_the_allocator_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", asked.append)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    lock_no_more_than_needed()
    assert not asked
