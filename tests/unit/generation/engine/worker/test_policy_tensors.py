"""A policy's file, read through small buffers; on a CPU the same copies go to the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gspo.generation.engine.worker.policy_tensors import DeviceTensors, host_tensors

BUFFER_BYTES = 1000
SHAPES: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
    "small": (torch.bfloat16, (3, 5)),
    "scalar": (torch.float32, ()),
    "of four buffers": (torch.float32, (33, 30)),
    "fills one": (torch.bfloat16, (500,)),
    "ids": (torch.int64, (7,)),
    "last": (torch.bfloat16, (20, 20)),
}


def written(file: Path) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """The tensors of a policy's file, and their places in it."""
    chance = torch.Generator().manual_seed(0)
    tensors = {name: (torch.randn(shape, generator=chance) * 100).to(dtype) for name, (dtype, shape) in SHAPES.items()}
    content, places = bytearray(64), []
    for name, tensor in tensors.items():
        form = {"name": name, "dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}
        places.append(form | {"offset": len(content)})
        data = tensor.view(-1).view(torch.uint8).numpy().tobytes()
        content += data + bytes(-len(data) % 64)
    file.write_bytes(content)
    return tensors, places


@pytest.mark.parametrize("buffer_bytes", [64, BUFFER_BYTES, 1 << 20])
def test_each_tensor_is_that_of_the_file_though_all_are_kept(tmp_path: Path, buffer_bytes: int) -> None:
    tensors, places = written(tmp_path / "policy")
    reader = DeviceTensors(torch.device("cpu"), buffer_bytes)
    for order in (places, places[::-1]):
        kept = list(reader.read(str(tmp_path / "policy"), order))
        assert [name for name, _ in kept] == [place["name"] for place in order]
        for name, tensor in kept:
            assert tensor.dtype == tensors[name].dtype and torch.equal(tensor, tensors[name])
    assert [name for name, _ in host_tensors(str(tmp_path / "policy"), places)] == list(tensors)


def test_what_the_device_has_no_memory_for_stays_in_host_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors, places = written(tmp_path / "policy")
    reader = DeviceTensors(torch.device("cpu"), BUFFER_BYTES)
    asked: list[int] = []

    def has_memory(num_bytes: int) -> bool:
        asked.append(num_bytes)
        return num_bytes <= BUFFER_BYTES

    monkeypatch.setattr(reader, "_has_memory", has_memory)
    read = dict(reader.read(str(tmp_path / "policy"), places))
    assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())
    assert max(asked) == 33 * 30 * 4


def test_a_file_that_ends_early_ends_the_load(tmp_path: Path) -> None:
    _, places = written(tmp_path / "policy")
    whole = (tmp_path / "policy").read_bytes()
    (tmp_path / "policy").write_bytes(whole[: places[-1]["offset"] + 10])
    with pytest.raises(EOFError, match="the policy's file ends at byte"):
        list(DeviceTensors(torch.device("cpu"), BUFFER_BYTES).read(str(tmp_path / "policy"), places))
