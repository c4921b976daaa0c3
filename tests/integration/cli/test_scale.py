"""`gspo scale` on a running run of services in small: processes come and go, and bad input changes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from gspo.cli.monitor.status import StatusPage
from gspo.cli.run.scaling import scale
from gspo.common.config.loading import read_config
from gspo.common.errors import InputError
from tests.integration.cli.test_run import Gspo, line_of, until
from tests.support.gpu_machine import gpu_machine


@pytest.fixture
def gspo(tmp_path: Path) -> Iterator[Gspo]:
    command_line = Gspo(tmp_path.resolve())
    yield command_line
    command_line.close()


def refusal(gspo: Gspo, words: str) -> str:
    with pytest.raises(InputError) as error:
        scale(gspo.run_dir, words)
    return str(error.value)


def test_generators_come_and_go_while_the_run_runs(gspo: Gspo, tmp_path: Path) -> None:
    gspo.environment = gpu_machine(tmp_path / "machine", 4)
    gspo.configure(generation={"replicas": 1}, learner={"ranks": 1})
    process = gspo.start("config.yaml", "--plain", fake="", services="coordinator generation learner")
    until(lambda: "all services are ready" in line_of(process), "the services")

    assert scale(gspo.run_dir, "generation=3") == "generation: 1 -> 3; starting generation-1, generation-2"
    until(lambda: len(list(gspo.run_dir.glob("generation-?.gpus"))) == 3, "three generators")
    assert "--resume" in gspo.starts("generation-2")[0]
    assert [gspo.gpus(f"generation-{number}") for number in range(3)] == [["0"], ["2"], ["3"]]
    page = StatusPage(gspo.run_dir, read_config(gspo.run_dir / "config.yaml"))
    console = Console(width=200)
    with console.capture() as drawn:
        console.print(page.draw([]))
    assert "running: coordinator 0 of 1, generation 0 of 3, reward 0 of 1, learner 0 of 1" in drawn.get()

    for words, rule in {
        "generation=4": "1 more need 1 GPUs, and free are 0 (none). Set at most generation=3",
        "generation=0": "is not between 1 and 4096",
        "learner=2": "has no number of processes in this run. Choose of generation, reward",
        "generation": "is not SERVICE=NUMBER",
    }.items():
        assert rule in refusal(gspo, words)

    assert scale(gspo.run_dir, "generation=1").startswith("generation: 3 -> 1; generation-1, generation-2 end")
    until(lambda: "generation-1, generation-2 ended" in line_of(process), "the end of two generators")
    assert scale(gspo.run_dir, "generation=2") == "generation: 1 -> 2; starting generation-1"
    until(lambda: len(gspo.starts("generation-1")) == 2, "a second generator again")
    process.kill()
    until(lambda: not gspo.remaining(), "the end of all processes")
    assert "does not run" in refusal(gspo, "generation=2")
