"""The fingerprints of torch and of Triton's kernel, which its interpreter runs here, are NumPy's to the bit."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
import pytest
import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from gspo.common.weights.device_fingerprint import device_fingerprint, on_host
from gspo.common.weights.fingerprint import Fingerprint, fingerprint

KERNEL = "gspo.common.weights.fingerprint_kernel"
DTYPES = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32, torch.int8: torch.int8}
# Around a word, a row and a program of the kernel.
SIZES = (0, 3, 4097, 16 * 4096 + 1)
Form: TypeAlias = Callable[[Sequence[Tensor], Sequence[int]], Tensor]


def by_torch(tensors: Sequence[Tensor], starts: Sequence[int]) -> Tensor:
    return torch.stack([device_fingerprint(tensor, start) for tensor, start in zip(tensors, starts, strict=True)])


@pytest.fixture(params=["torch", "kernel"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Form]:
    if request.param == "torch":
        yield by_torch
        return
    # Triton reads it when the kernel is defined.
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    sys.modules.pop(KERNEL, None)
    yield importlib.import_module(KERNEL).kernel_fingerprints
    sys.modules.pop(KERNEL)


def test_the_kernel_compiles_for_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes Python that no GPU runs."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    sys.modules.pop(KERNEL, None)
    kernel = importlib.import_module(KERNEL)
    pointers = dict.fromkeys(("run_table", "programs", "column_factors", "lanes"), "*i64")
    constants = dict.fromkeys(kernel.CONSTANTS, "constexpr")
    source = ASTSource(kernel.fingerprint_rows, pointers | constants, kernel.CONSTANTS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of coming versions
        compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32))
    assert compiled.asm["ptx"].count(".add.u64") and compiled.asm["cubin"]


def random_tensor(dtype: torch.dtype, size: int) -> Tensor:
    chance = torch.Generator().manual_seed(size)
    return (
        torch.randint(-128, 128, (4 * size,), generator=chance, dtype=torch.int8).view(DTYPES[dtype])[:size].view(dtype)
    )


def bits(tensor: Tensor) -> np.ndarray:
    return tensor.view(DTYPES[tensor.dtype]).numpy()


@pytest.mark.parametrize("dtype", DTYPES)
def test_whole_tensors_and_the_parts_of_any_cut(form: Form, dtype: torch.dtype) -> None:
    whole = [random_tensor(dtype, size) for size in SIZES]
    expected = [fingerprint(bits(tensor)) for tensor in whole]
    assert on_host(form(whole, [0] * len(whole))) == expected
    for tensor, sum_of_parts in zip(whole, expected, strict=True):
        starts = [0, len(tensor) // 3, len(tensor) // 2]
        parts = on_host(form(list(tensor.tensor_split(starts[1:])), starts))
        assert sum(parts, Fingerprint()) == sum_of_parts


def test_what_is_not_contiguous_is_refused(form: Form) -> None:
    with pytest.raises(ValueError, match="not contiguous"):
        form([torch.zeros(4, 4).T], [0])
