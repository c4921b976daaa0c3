"""The node and the GPUs of each process, and the refusals if the allocation is too small."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gspo.cli.cluster.layout import Layout, Node, lay_out
from gspo.common.config.schema import Config
from gspo.common.errors import InputError
from gspo.common.host.machine import GENERATORS_PER_GPU, Gpu
from tests.support.service_process import make_run


def run_of(folder: Path, *, replicas: int = 1, ranks: int = 1, tensor: int = 1, group: int = 1) -> Config:
    engine: dict[str, Any] = {} if tensor == 1 else {"tensor_parallel_size": tensor}
    return make_run(
        folder,
        folder,
        generation={"engine": engine, "replicas": replicas},
        learner={"ranks": ranks, "sequence_ranks": group},
    )


def allocation(*num_gpus: int) -> list[Node]:
    return [
        Node(f"n{number}", tuple(Gpu(str(gpu), total_bytes=80 << 30) for gpu in range(count)))
        for number, count in enumerate(num_gpus, 1)
    ]


def gpus_of(layout: Layout, process: str) -> dict[str, str]:
    nodes = layout.nodes[process]
    return {node: ",".join(gpu.name for gpu in layout.placements[node].gpus.get(process, ())) for node in nodes}


@pytest.mark.parametrize(
    ("num_gpus", "demand", "expected"),
    [
        # The learner fills the batch node, generators the other.
        ((8, 8), {"ranks": 8, "replicas": 2, "tensor": 4},
         {"learner-0": {"n1": "0,1,2,3,4,5,6,7"},
          "generation-0": {"n2": "0,1,2,3"}, "generation-1": {"n2": "4,5,6,7"}}),
        # Both share a node where the learner leaves GPUs free; no GPU has two processes.
        ((4, 2), {"ranks": 2, "replicas": 4},
         {"learner-0": {"n1": "2,3"}, "generation-0": {"n1": "0"}, "generation-1": {"n2": "0"},
          "generation-2": {"n1": "1"}, "generation-3": {"n2": "1"}}),
        # Equally many ranks on each node: 3 + 3, not 4 + 2.
        ((4, 4), {"ranks": 6, "replicas": 2},
         {"learner-0": {"n1": "1,2,3", "n2": "1,2,3"}, "generation-0": {"n1": "0"}, "generation-1": {"n2": "0"}}),
        # A batch node without GPUs.
        ((0, 2), {}, {"learner-0": {"n2": "1"}, "generation-0": {"n2": "0"}}),
        # Without GPUs, a rank takes a node, and generators the nodes with the fewest processes.
        ((0, 0), {"replicas": 3},
         {"learner-0": {"n1": ""}, "generation-0": {"n2": ""}, "generation-1": {"n1": ""}, "generation-2": {"n2": ""}}),
        ((0, 0), {"ranks": 2}, {"learner-0": {"n1": "", "n2": ""}, "generation-0": {"n1": ""}}),
    ],
)  # fmt: skip
def test_who_is_where(
    tmp_path: Path, num_gpus: tuple[int, ...], demand: dict[str, int], expected: dict[str, dict[str, str]]
) -> None:
    layout = lay_out(run_of(tmp_path, **demand), allocation(*num_gpus))
    assert {process: gpus_of(layout, process) for process in layout.nodes} == expected


@pytest.mark.parametrize(
    ("num_gpus", "demand", "key", "words"),
    [
        ((8, 8), {"ranks": 24}, "learner.ranks", "n1: 8, n2: 8 GPUs"),
        ((4, 2), {"ranks": 6}, "learner.ranks", "equally many on each node"),
        ((2, 2), {"ranks": 2, "replicas": 3}, "generation.replicas", "n1: 0, n2: 0 GPUs"),
        # Free GPUs on two nodes make no generator of two.
        ((2, 2), {"ranks": 2, "replicas": 1, "tensor": 4}, "generation.replicas", "4 GPU(s), each on one node"),
        # Ranks that share lines stay on one node.
        ((4, 4), {"ranks": 6, "group": 2}, "learner.ranks", "in groups of 2"),
        ((0, 0), {"ranks": 3}, "learner.ranks", "2 nodes without GPUs"),
    ],
)
def test_too_small(tmp_path: Path, num_gpus: tuple[int, ...], demand: dict[str, int], key: str, words: str) -> None:
    with pytest.raises(InputError) as refusal:
        lay_out(run_of(tmp_path, **demand), allocation(*num_gpus))
    assert refusal.value.where == key
    assert words in str(refusal.value)


def shared_run(folder: Path, **demand: int) -> Config:
    return run_of(folder, **demand).model_copy(update={"placement": "shared"})


def test_under_shared_placement_generators_have_the_gpus_of_the_ranks_on_each_node(tmp_path: Path) -> None:
    layout = lay_out(shared_run(tmp_path, ranks=16, replicas=3, tensor=4), allocation(8, 8, 8))
    every = "0,1,2,3,4,5,6,7"
    assert {process: gpus_of(layout, process) for process in layout.nodes} == {
        "learner-0": {"n1": every, "n2": every},
        "generation-0": {"n1": "0,1,2,3"},
        "generation-1": {"n2": "0,1,2,3"},
        "generation-2": {"n1": "4,5,6,7"},
    }
    assert layout.placements["n1"].environment("learner-0")[GENERATORS_PER_GPU] == "1,1,1,1,1,1,1,1"
    assert layout.placements["n2"].environment("learner-0")[GENERATORS_PER_GPU] == "1,1,1,1,0,0,0,0"


def test_a_generator_on_other_gpus_than_the_ranks_is_not_shared(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"do not fit on the GPUs of 4 rank\(s\) \(learner.ranks\)"):
        lay_out(shared_run(tmp_path, ranks=4, replicas=2, tensor=4), allocation(8, 8))
