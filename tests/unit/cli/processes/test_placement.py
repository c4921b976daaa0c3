"""The GPUs of each process, and the refusals if they do not fit."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from gspo.cli import doctor
from gspo.cli.processes.gpu_locks import lock_gpus
from gspo.cli.processes.placement import Placement, place
from gspo.cli.processes.programs import Job, process_names, service_programs
from gspo.common.config.schema import Config
from gspo.common.errors import InputError
from gspo.common.host.machine import Gpu, visible_gpus
from gspo.common.streams.keys import SERVICES
from tests.support.gpu_machine import pretend_gpu_machine, uuid
from tests.support.service_process import make_run

GIB = 1 << 30
TENSOR, SHARE = "generation.engine.tensor_parallel_size", "generation.engine.gpu_memory_utilization"


def gpus(number: int, *, used_gib: int = 0) -> list[Gpu]:
    return [Gpu(str(n), f"GPU-{n}", 80 * GIB, used_gib * GIB) for n in range(number)]


def run_of(folder: Path, *, tensor: int = 1, replicas: int = 1, ranks: int = 1, share: float | None = None) -> Config:
    engine: dict[str, Any] = {} if tensor == 1 else {"tensor_parallel_size": tensor}
    if share is not None:
        engine["gpu_memory_utilization"] = share
    return make_run(folder, folder, generation={"engine": engine, "replicas": replicas}, learner={"ranks": ranks})


def placed(config: Config, visible: list[Gpu], services: tuple[str, ...] = SERVICES) -> Placement:
    return place(config, process_names(config, services), visible)


@pytest.mark.parametrize(
    ("number", "demand", "expected"),
    [
        (1, {}, {"generation-0": "0", "learner-0": "0"}),
        (2, {}, {"generation-0": "0", "learner-0": "1"}),
        (2, {"replicas": 2}, {"generation-0": "0", "generation-1": "1", "learner-0": "0"}),
        (2, {"tensor": 2}, {"generation-0": "0,1", "learner-0": "0"}),
        (8, {"replicas": 4, "ranks": 4}, {**{f"generation-{n}": f"{n}" for n in range(4)}, "learner-0": "4,5,6,7"}),
        (8, {"replicas": 2, "tensor": 2, "ranks": 4},
         {"generation-0": "0,1", "generation-1": "2,3", "learner-0": "4,5,6,7"}),
        (8, {"ranks": 8}, {"generation-0": "0", "learner-0": "0,1,2,3,4,5,6,7"}),
        (8, {"tensor": 4, "ranks": 6}, {"generation-0": "0,1,2,3", "learner-0": "0,1,4,5,6,7"}),
    ],
)  # fmt: skip
def test_who_gets_which(tmp_path: Path, number: int, demand: dict[str, int], expected: dict[str, str]) -> None:
    placement = placed(run_of(tmp_path, **demand), gpus(number))
    visible = {name: placement.environment(name)["CUDA_VISIBLE_DEVICES"] for name in placement.gpus}
    assert visible == expected
    # An index means what nvidia-smi shows, not CUDA's own order.
    assert placement.environment("generation-0")["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert placement.environment("coordinator-0") == placement.environment("reward-0") == {}


@pytest.mark.parametrize(
    ("number", "demand", "expected", "sharers"),
    [
        (1, {}, {"generation-0": "0", "learner-0": "0"}, "1"),
        (4, {"replicas": 4, "ranks": 4},
         {**{f"generation-{n}": f"{n}" for n in range(4)}, "learner-0": "0,1,2,3"}, "1,1,1,1"),
        (8, {"replicas": 2, "tensor": 2, "ranks": 4},
         {"generation-0": "0,1", "generation-1": "2,3", "learner-0": "0,1,2,3"}, "1,1,1,1"),
    ],
)  # fmt: skip
def test_shared_gpus_are_the_same_for_generators_and_ranks_at_vllms_whole_share(
    tmp_path: Path, number: int, demand: dict[str, int], expected: dict[str, str], sharers: str
) -> None:
    split = run_of(tmp_path, **demand)
    staleness = split.staleness.model_copy(update={"max_lag": 0})
    placement = placed(split.model_copy(update={"placement": "shared", "staleness": staleness}), gpus(number))
    assert {name: placement.environment(name)["CUDA_VISIBLE_DEVICES"] for name in placement.gpus} == expected
    assert placement.environment("learner-0")["GSPO_GENERATORS_PER_GPU"] == sharers


@pytest.mark.parametrize(
    ("number", "demand", "sharers"),
    [
        (1, {}, "1"),
        (2, {}, "0"),
        (8, {"tensor": 4, "ranks": 6}, "1,1,0,0,0,0"),
        (8, {"replicas": 4, "ranks": 4}, "0,0,0,0"),
    ],
)
def test_the_learner_knows_how_many_generators_share_its_gpus(
    tmp_path: Path, number: int, demand: dict[str, int], sharers: str
) -> None:
    placement = placed(run_of(tmp_path, **demand), gpus(number))
    assert placement.environment("learner-0")["GSPO_GENERATORS_PER_GPU"] == sharers
    assert "GSPO_GENERATORS_PER_GPU" not in placement.environment("generation-0")


def test_the_names_are_those_that_the_caller_gave(tmp_path: Path) -> None:
    visible = [Gpu("GPU-7"), Gpu("MIG-1"), Gpu("5")]
    placement = placed(run_of(tmp_path), visible)
    assert placement.environment("learner-0")["CUDA_VISIBLE_DEVICES"] == "MIG-1"
    assert placement.free == (visible[2],)


def test_without_gpus_or_engines_nothing_is_placed(tmp_path: Path) -> None:
    assert placed(run_of(tmp_path), []) == Placement()
    assert placed(run_of(tmp_path), gpus(2), ("reward",)) == Placement()


def test_the_table(tmp_path: Path) -> None:
    assert placed(run_of(tmp_path, tensor=2, replicas=1, ranks=3), gpus(4)).table().splitlines() == [
        "process       GPU      shared with",
        "generation-0  0, 1     learner-0",
        "learner-0     0, 2, 3  generation-0",
    ]
    assert placed(run_of(tmp_path), gpus(3)).table().splitlines()[-2:] == [
        "learner-0     1    nobody",
        "nobody        2",
    ]


def test_the_table_says_what_is_shared_in_shifts(tmp_path: Path) -> None:
    config = run_of(tmp_path, replicas=2, ranks=1).model_copy(update={"placement": "shared"})
    assert placed(config, gpus(2)).table().splitlines() == [
        "process       GPU  shared with",
        "generation-0  0    learner-0 in shifts",
        "generation-1  1    nobody",
        "learner-0     0    generation-0 in shifts",
    ]


@pytest.mark.parametrize(
    ("number", "demand", "key", "rule"),
    [
        (2, {"tensor": 4}, TENSOR, "generation-0 wants 4 GPUs, each a different one, and 2 can be seen"),
        (1, {"ranks": 2}, "learner.ranks", "learner-0 wants 2 GPUs, each a different one, and 1 can be seen"),
        (1, {"replicas": 2}, SHARE, r"0.92 \(vLLM default\) of GPU 0 for each of generation-0, generation-1"),
        (3, {"tensor": 2, "replicas": 2, "share": 0.6}, SHARE, "0.6 of GPU 0 for each .* more than it has: 80.0 GiB"),
    ],
)
def test_what_cannot_be_placed_is_refused_with_who_wants_what(
    tmp_path: Path, number: int, demand: dict[str, Any], key: str, rule: str
) -> None:
    with pytest.raises(InputError, match=rule) as caught:
        placed(run_of(tmp_path, **demand), gpus(number))
    assert caught.value.where == key
    table = caught.value.fix.splitlines()[1:]
    assert table[0].startswith("process  ") and len(table) >= 2
    assert ("gspo run CONFIG.yaml --cluster ray" in caught.value.fix) == (key == "learner.ranks")


def test_memory_that_other_programs_hold_is_not_vllms(tmp_path: Path) -> None:
    placed(run_of(tmp_path), gpus(2, used_gib=6))
    with pytest.raises(InputError, match=r"80\.0 GiB, of which other programs hold 7\.0\. Set it to at most 0.91"):
        placed(run_of(tmp_path), gpus(2, used_gib=7))
    placed(run_of(tmp_path, share=0.91), gpus(2, used_gib=7))


def test_programs_on_a_gpu_are_named_with_the_gpus_that_are_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_gpu_machine(monkeypatch, tmp_path / "machine", 4, used_gib=[70, 0, 79])
    with pytest.raises(InputError) as caught:
        placed(run_of(tmp_path), visible_gpus())
    assert caught.value.rule == (
        "0.92 (vLLM default) of GPU 0 for each of generation-0 is more than it has: 80.0 GiB, of which other programs "
        "hold 70.0 (process 4000, python: 70.0 GiB)"
    )
    assert caught.value.fix.splitlines()[0] == (
        "Set it to at most 0.12, or end the GPU's other programs, or choose 2 with little in use: "
        "CUDA_VISIBLE_DEVICES=1,3"
    )
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2")
    with pytest.raises(InputError, match=r"process 4002, python: 79.0 GiB\). end the GPU's other programs\n"):
        placed(run_of(tmp_path), visible_gpus())


def test_doctor_shows_the_placement_and_checks_each_service_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, str | None] = {}

    async def check_services(services: tuple[str, ...], _: Path, placement: Placement) -> list[str]:
        seen[services[0]] = placement.environment(f"{services[0]}-0").get("CUDA_VISIBLE_DEVICES")
        return []

    monkeypatch.setattr(doctor, "check_services", check_services)
    pretend_gpu_machine(monkeypatch, tmp_path / "machine", 2)
    first, *_ = doctor._checks(run_of(tmp_path))
    assert (first.level, "learner-0     1    nobody" in first.text) == ("OK", True)
    assert seen == {"coordinator": None, "generation": "0", "reward": None, "learner": "1"}
    assert first.advice == ""
    pretend_gpu_machine(monkeypatch, tmp_path / "larger", 3)
    with lock_gpus([Gpu("1", uuid(1))], tmp_path, []):
        _, locks, *_ = doctor._checks(run_of(tmp_path))
    assert (locks.level, f"GPU 1 by process {os.getpid()}, {tmp_path}" in locks.text) == ("warning", True)
    first, *_ = doctor._checks(run_of(tmp_path))
    assert "nobody        2" in first.text and "generation.replicas" in first.advice
    seen.clear()
    first, *_ = doctor._checks(run_of(tmp_path, tensor=4))
    assert (first.level, "generation-0 wants 4 GPUs" in first.text) == ("problem", True)
    assert seen == {"coordinator": None, "reward": None}


def test_programs_have_their_gpus_at_every_start(tmp_path: Path) -> None:
    config = run_of(tmp_path, replicas=2, ranks=2)
    job = Job(config, config.run_dir, placement=placed(config, gpus(4)))
    environments = {it.name: it.environment.get("CUDA_VISIBLE_DEVICES") for it in service_programs(job, "redis://h")}
    assert environments == {
        "coordinator-0": None, "generation-0": "0", "generation-1": "1", "reward-0": None, "learner-0": "2,3"
    }  # fmt: skip
