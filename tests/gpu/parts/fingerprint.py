"""Fingerprints of a model's tensors where they are, against those of host memory, and both ways from there."""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from gspo.common.weights.device_fingerprint import device_fingerprint, on_host
from gspo.common.weights.fingerprint import Fingerprint, fingerprint
from gspo.generation.engine.worker.policy_tensors import DeviceTensors, host_tensors
from tests.gpu.part_run import PartRun

_TIMED = 5


def run(case: PartRun) -> None:
    """All tensors by each form; then cut ones and other widths."""
    if not case.on_gpu:
        os.environ["TRITON_INTERPRET"] = "1"
    # Here: Triton reads the variable when the kernel is defined.
    from gspo.common.weights.fingerprint_kernel import kernel_fingerprints

    tensors = list(load_file(case.model / "model.safetensors", device=case.device).values())
    expected = [fingerprint(bits_of(tensor)) for tensor in tensors]
    num_bytes = sum(tensor.nbytes for tensor in tensors)
    case.note(tensors=len(tensors), gib=num_bytes / 2**30)
    case.require(on_host(kernel_fingerprints(tensors)) == expected, "the kernel differs from NumPy")
    by_torch = torch.stack([device_fingerprint(tensor) for tensor in tensors])
    case.require(on_host(by_torch) == expected, "torch differs from NumPy")
    _check_cuts(case, kernel_fingerprints)
    kernel_s = _seconds(case, lambda: kernel_fingerprints(tensors))
    torch_s = _seconds(case, lambda: [device_fingerprint(tensor) for tensor in tensors])
    host = bits_of(max(tensors, key=Tensor.numel))
    numpy_s, sha_s = _seconds(case, lambda: fingerprint(host)), _seconds(case, lambda: hashlib.sha256(host.data))
    case.note(kernel_ms=kernel_s * 1e3, torch_gb_s=num_bytes / torch_s / 1e9)
    case.note(numpy_gb_s=host.nbytes / numpy_s / 1e9, sha256_gb_s=host.nbytes / sha_s / 1e9)
    case.judge("kernel, GB/s", num_bytes / kernel_s / 1e9, at_least=400)
    _read_policy(case, tensors)


def _read_policy(case: PartRun, tensors: Sequence[Tensor]) -> None:
    """A policy's file to the device: through page-locked buffers, and one tensor after another from the file."""
    device, content, places = torch.device(case.device), bytearray(), []
    for number, tensor in enumerate(tensors):
        dtype = str(tensor.dtype).removeprefix("torch.")
        places.append({"name": str(number), "dtype": dtype, "shape": list(tensor.shape), "offset": len(content)})
        content += bits_of(tensor).tobytes()
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as file:
        file.write(content)
        file.flush()
        reader = DeviceTensors(device)
        read = [tensor for _, tensor in reader.read(file.name, places)]
        case.require(all(map(torch.equal, read, tensors)), "a tensor is another one after the buffers")
        del read
        locked_s = _seconds(case, lambda: [tensor.shape for _, tensor in reader.read(file.name, places)])
        plain_s = _seconds(case, lambda: [tensor.to(device) for _, tensor in host_tensors(file.name, places)])
    case.note(plain_load_gb_s=len(content) / plain_s / 1e9)
    case.judge("page-locked load, GB/s", len(content) / locked_s / 1e9, at_least=10)


def bits_of(tensor: Tensor) -> np.ndarray:
    """The elements in host memory, as unsigned integers of their width."""
    flat = tensor.detach().cpu().contiguous().view(-1)
    return flat.view({1: torch.int8, 2: torch.int16, 4: torch.int32}[tensor.element_size()]).numpy()


def _check_cuts(case: PartRun, kernel: Callable[[Sequence[Tensor], Sequence[int]], Tensor]) -> None:
    """Odd sizes of each dtype in parts, also where a part begins within a word, and nothing at all."""
    chance = torch.Generator(case.device).manual_seed(0)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for size in (0, 1, 2049, 70_001):
            whole = torch.randn(size, generator=chance, device=case.device).to(dtype)
            starts = [0, size // 3, size // 2]
            parts = list(whole.tensor_split(starts[1:]))
            expected = fingerprint(bits_of(whole))
            for name, lanes in (
                ("kernel", kernel(parts, starts)),
                ("torch", torch.stack([device_fingerprint(it, at) for it, at in zip(parts, starts, strict=True)])),
            ):
                total = sum(on_host(lanes), Fingerprint())
                case.require(total == expected, f"{name} differs on parts of {size} elements of {dtype}")


def _seconds(case: PartRun, work: Callable[[], object]) -> float:
    """The shortest of some times."""
    seconds = []
    for _ in range(_TIMED if case.on_gpu else 1):
        case.synchronize()
        began = time.monotonic()
        work()
        case.synchronize()
        seconds.append(time.monotonic() - began)
    return min(seconds)
