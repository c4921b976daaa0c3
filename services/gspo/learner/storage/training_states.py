"""The states of training in safetensors files: weights and AdamW's moments by the parameter's name, for any number of
ranks.

Each rank writes the shares that it updates, and reads back the ranges that it needs. policy_engine.py knows the shares
of each ZeRO stage.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from gspo.common.errors import InputError
from gspo.common.host.durable_write import apply_umask, fsync

WEIGHT, STEP = "weight", "step"
MOMENTS = ("exp_avg", "exp_avg_sq")
# A file has at most so many elements of weights, about 800 MB with their moments, or one share.
_FILE_ELEMENTS = 2**26
_STARTS = "starts"
OptimizerState = dict[Tensor, dict[str, Tensor]]


@dataclass(frozen=True)
class WeightRange:
    """A range of a trained parameter, as the rank that updates it has it.

    Attributes:
        name: The parameter's name in the model.
        start: Index of the first element in the flattened parameter.
        weight: Float32 [elements], a view of the weights that the optimizer updates.
        owner: The optimizer's tensor that these are in; it has one state for all of it.
        offset: Index of the first element in the flattened owner.
    """

    name: str
    start: int
    weight: Tensor
    owner: Tensor
    offset: int

    def of(self, moment: Tensor) -> Tensor:
        """The view of this range in a moment of the owner."""
        return moment.view(-1).narrow(0, self.offset, len(self.weight))


@dataclass(frozen=True)
class StatesFile:
    """Some of a rank's shares with their moments, copied to host memory, as one file holds them.

    Attributes:
        tensors: Float32 [elements], by kind and the parameter's name.
        starts: The parameter's name -> index of the share's first element.
    """

    name: str
    tensors: dict[str, Tensor]
    starts: dict[str, int]

    def write(self, folder: Path) -> None:
        """Write it; it is on the disk when this returns. On a shared disk only the host that wrote can make sure."""
        path = folder / self.name
        save_file(self.tensors, path, metadata={_STARTS: json.dumps(self.starts)})
        apply_umask(path)
        fsync(path)


def copy_shares(
    rank: int, shares: Iterable[WeightRange], state: Mapping[Tensor, Mapping[str, Tensor]]
) -> Iterator[StatesFile]:
    """Copy a rank's shares with their moments to host memory, one file after another."""
    for number, part in enumerate(_files_of(shares)):
        tensors = {}
        for share in part:
            tensors[f"{WEIGHT}:{share.name}"] = share.weight
            if moments := state.get(share.owner):
                tensors |= {f"{kind}:{share.name}": share.of(moments[kind]) for kind in MOMENTS}
                tensors[f"{STEP}:{share.name}"] = moments[STEP].view(1)
        copies = {key: tensor.detach().to("cpu", copy=True) for key, tensor in tensors.items()}
        starts = {share.name: share.start for share in part}
        yield StatesFile(f"rank-{rank:05d}-{number:04d}.safetensors", copies, starts)


def _files_of(shares: Iterable[WeightRange]) -> Iterator[list[WeightRange]]:
    part: list[WeightRange] = []
    for share in shares:
        if part and sum(len(it.weight) for it in part) + len(share.weight) > _FILE_ELEMENTS:
            yield part
            part = []
        part.append(share)
    if part:
        yield part


class WrittenStates:
    """The shares that all ranks wrote to a folder; opening reads the headers alone.

    Raises:
        InputError: The folder has none.
    """

    def __init__(self, folder: Path) -> None:
        # Key of a tensor -> the files with a range of it, and where each begins.
        self._ranges: dict[str, list[tuple[int, Any]]] = defaultdict(list)
        files = sorted(folder.glob("rank-*.safetensors"))
        if not files:
            raise InputError(
                str(folder),
                "another version of gspo wrote this checkpoint: it has no states by name (rank-*.safetensors)",
                "Resume with that version, or move the folder away: then the logged steps are trained again",
            )
        for path in files:
            file = safe_open(path, framework="pt")
            starts = json.loads(file.metadata()[_STARTS])  # type: ignore[no-untyped-call]
            for key in file.keys():  # type: ignore[no-untyped-call]  # noqa: SIM118 - it is no mapping
                self._ranges[key].append((starts[key.partition(":")[2]], file))

    def restore(self, shares: Sequence[WeightRange], state: OptimizerState) -> None:
        """Give shares and moments the written values; they may lie in other ranges than those written.

        Raises:
            ValueError: A part of them was not written.
        """
        state.clear()
        with torch.no_grad():
            for share in shares:
                share.weight.copy_(self.read(share.name, share.start, len(share.weight)))
                if f"{STEP}:{share.name}" in self._ranges:
                    self._restore_moments(share, state)

    def _restore_moments(self, share: WeightRange, state: OptimizerState) -> None:
        if share.owner not in state:
            _, file = self._ranges[f"{STEP}:{share.name}"][0]
            step = file.get_tensor(f"{STEP}:{share.name}").view(()).to(share.owner.device)
            state[share.owner] = {STEP: step, **{kind: torch.zeros_like(share.owner.detach()) for kind in MOMENTS}}
        for kind in MOMENTS:
            moment = self.read(share.name, share.start, len(share.weight), kind)
            share.of(state[share.owner][kind]).copy_(moment)

    def read(self, name: str, start: int, num: int, kind: str = WEIGHT) -> Tensor:
        """Elements `start` to `start + num` of a flattened parameter or moment: float32 [num], in host memory.

        Raises:
            ValueError: A part of them was not written.
        """
        values, missing = torch.empty(num), num
        for first, file in self._ranges.get(f"{kind}:{name}", ()):
            written = file.get_slice(f"{kind}:{name}")
            begin, end = max(start, first), min(start + num, first + written.get_shape()[0])
            if begin < end:
                values[begin - start : end - start] = written[begin - first : end - first]
                missing -= end - begin
        if missing:
            raise ValueError(f"{missing} elements of {name} ({kind}) are in no file of the checkpoint")
        return values
