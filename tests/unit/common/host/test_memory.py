"""How much memory a container has left, from the files that cgroups have, and the checks that rest on it."""

from __future__ import annotations

import re
from contextlib import nullcontext
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import psutil
import pytest

from gspo.cli import findings
from gspo.common.errors import InputError
from gspo.common.host import machine
from gspo.common.host.machine import Gpu
from gspo.generation import check as generation_check
from gspo.generation.engine import staging
from gspo.generation.engine.staging import PolicyCopies
from gspo.learner import check as learner_check
from tests.support.service_process import make_run

GIB = 1 << 30


@pytest.fixture
def cgroup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    names = ("limit", "used", "stat")
    monkeypatch.setattr(machine, "_CGROUPS", ((*(str(tmp_path / name) for name in names), "inactive_file"),))
    return tmp_path


def test_a_containers_limit_counts_without_its_file_cache(cgroup: Path) -> None:
    (cgroup / "limit").write_text(f"{3 * GIB}\n")
    (cgroup / "used").write_text(f"{2 * GIB}\n")
    (cgroup / "stat").write_text(f"anon {GIB}\ninactive_file {GIB // 2}\n")
    assert machine.free_memory() == min(1.5 * GIB, psutil.virtual_memory().available)


def test_without_a_limit_it_is_the_machines(cgroup: Path) -> None:
    (cgroup / "limit").write_text("max\n")
    (cgroup / "used").write_text("1\n")
    (cgroup / "stat").write_text("inactive_file 0\n")
    assert machine.free_memory() > GIB / 8


def test_two_policies_that_do_not_fit_are_refused_before_the_kernel_kills(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {"weight": (1 << 18,)}  # 1 MiB in float32
    monkeypatch.setattr(staging, "free_memory", lambda: 2 * (1 << 20) - 1)
    with pytest.raises(InputError, match=r"model.path: .* 0.00 GiB of shared memory, and 0.00 GiB can be had"):
        PolicyCopies(tensors, "float32")
    monkeypatch.setattr(staging, "free_memory", lambda: 2 * (1 << 20))
    PolicyCopies(tensors, "float32").close()


def test_idle_gpus_of_a_container_are_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(generation_check, "visible_gpus", lambda: [Gpu(str(n)) for n in range(4)])
    monkeypatch.setattr(learner_check, "visible_gpus", lambda: [Gpu(str(n)) for n in range(4)])
    monkeypatch.setattr(learner_check, "shared_memory", lambda: 1 << 30)
    words = {}
    for number in (2, 4):
        config = make_run(
            tmp_path,
            tmp_path,
            generation={"dtype": "bfloat16", "engine": {"tensor_parallel_size": number}},
            learner={"dtype": "bfloat16", "ranks": number},
        )
        generation_check._check_gpus(config)
        learner_check._check_ranks(config)
        words[number] = capsys.readouterr().err
    idle = "warning: 2 of 4 GPUs here stay idle: {} uses 2. Raise it, or give the rest to others\n"
    keys = ("generation.engine.tensor_parallel_size", "learner.ranks")
    assert words == {2: "".join(idle.format(key) for key in keys), 4: ""}


def test_an_engine_of_more_gpus_than_there_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}
    config = make_run(tmp_path, tmp_path, generation={"engine": engine})
    for seen, rule in (
        (3, "3 can be used. Lower it to 3"),
        (0, "none can be used. Leave it out: on a CPU an engine is"),
    ):
        monkeypatch.setattr(generation_check, "visible_gpus", lambda: [Gpu(str(n)) for n in range(seen)])  # noqa: B023
        with pytest.raises(
            InputError, match=f"parallel_size 2 times pipeline_parallel_size 2 needs 4 GPUs, and {rule}"
        ):
            generation_check._check_gpus(config)
    monkeypatch.setattr(generation_check, "visible_gpus", lambda: [Gpu(str(n)) for n in range(4)])
    generation_check._check_gpus(config)


@pytest.mark.parametrize(
    ("installed", "refused"),
    [("0.32.0", True), ("0.32.0+cu130", True), ("0.32.0+cpu", False), ("0.32.0+rocm7", False), (None, False)],
)
def test_an_environment_for_gpus_where_none_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, installed: str | None, refused: bool
) -> None:
    def version(name: str) -> str:
        if installed is None:
            raise PackageNotFoundError(name)
        return installed

    config = make_run(tmp_path, tmp_path)
    monkeypatch.setattr("importlib.metadata.version", version)
    for check, key in ((generation_check._check_gpus, "generation.engine"), (learner_check._check_ranks, "learner.ra")):
        with (
            pytest.raises(InputError, match=rf"{key}.* for GPUs \(vllm {re.escape(str(installed))}")
            if refused
            else nullcontext()
        ):
            check(config)
    assert (findings.gpu().level == "problem") is refused


def test_ranks_that_have_too_little_shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_run(tmp_path, tmp_path, learner={"ranks": 2})
    monkeypatch.setattr(learner_check, "visible_gpus", lambda: [Gpu("0"), Gpu("1")])
    monkeypatch.setattr(learner_check, "shared_memory", lambda: 64 << 20)
    with pytest.raises(InputError, match=r"learner.ranks: NCCL .* holds 64 MiB here and must hold 128"):
        learner_check._check_ranks(config)
    monkeypatch.setattr(learner_check, "shared_memory", lambda: 128 << 20)
    learner_check._check_ranks(config)
