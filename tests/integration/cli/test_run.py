"""`gspo run` as a process, with a real Redis and services in small: how it ends, and what it leaves behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import yaml

from gspo.common.config.loading import read_config
from tests.support.gpu_machine import gpu_machine

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
PATIENCE_S = 240.0


class Gspo:
    """Starts the command line in a folder of its own, and ends what a failed test leaves."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.run_dir = folder, folder / "runs" / "small"
        self._started: list[subprocess.Popen[str]] = []
        self.environment: dict[str, str] = {}
        self.configure()

    def configure(self, **sections: dict[str, object]) -> None:
        """Write the configuration, with these keys on top."""
        values: dict[str, dict[str, object]] = {"run": {"total_steps": 3}, "learner": {}, "services": {}}
        for section, keys in sections.items():
            values[section] = values.get(section, {}) | keys
        fixed = {"name": "small", "model": {"path": "."}, "data": {"prompts": "p.jsonl"}}
        reward = {"reward": {"functions": [{"path": "r.py"}]}}
        (self.folder / "config.yaml").write_text(yaml.safe_dump({**fixed, **reward, **values}))

    def start(self, *words: str, fake: str, services: str = "coordinator learner") -> subprocess.Popen[str]:
        """Start `gspo run WORDS` in a session of its own."""
        values = {**os.environ, **self.environment}
        path = os.pathsep.join(
            filter(None, [str(ROOT), str(ROOT / "proto"), str(ROOT / "services"), values.get("PYTHONPATH")])
        )
        process = subprocess.Popen(
            [sys.executable, str(HERE / "gspo_with_fake_services.py"), "run", *words],
            cwd=self.folder,
            env={**values, "PYTHONPATH": path, "FAKE": fake, "FAKE_SERVICES": services, "COLUMNS": "200"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._started.append(process)
        return process

    def run(self, *words: str, fake: str, services: str = "coordinator learner") -> tuple[int, str]:
        """Run to the end; exit code and output."""
        process = self.start(*(words or ("config.yaml",)), fake=fake, services=services)
        output, _ = process.communicate(timeout=PATIENCE_S)
        return process.returncode, output

    def remaining(self) -> list[psutil.Process]:
        """Running processes that were started for this folder."""
        return [process for process in psutil.process_iter() if self._is_ours(process)]

    def starts(self, name: str) -> list[str]:
        """The command line of every start of a service."""
        path = self.run_dir / f"{name}.starts"
        return path.read_text().splitlines() if path.exists() else []

    def gpus(self, name: str) -> list[str]:
        """CUDA_VISIBLE_DEVICES of every start of a service."""
        return (self.run_dir / f"{name}.gpus").read_text().splitlines()

    def close(self) -> None:
        """End the remaining processes."""
        for process in self._started:
            process.kill()
            process.communicate()
        for remaining in self.remaining():
            remaining.kill()

    def _is_ours(self, process: psutil.Process) -> bool:
        try:
            if process.status() == psutil.STATUS_ZOMBIE:
                return False
            return process.cwd() == str(self.folder)
        except psutil.Error:
            return False


@pytest.fixture
def gspo(tmp_path: Path) -> Iterator[Gspo]:
    """The command line in a fresh folder."""
    command_line = Gspo(tmp_path.resolve())
    yield command_line
    command_line.close()


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def until(condition: Callable[[], object], what: str) -> None:
    """Wait for a condition."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"still waiting for {what}"
        time.sleep(0.05)


def test_a_run_goes_to_its_end_and_leaves_no_process(gspo: Gspo) -> None:
    code, output = gspo.run(fake="learner:steps=3 learner:child", services="coordinator generation reward learner")
    assert code == 0, output
    assert "step 3/3  reward 0.300" in output
    assert re.search(r"held-out reward, sums +0\.250 ± 0\.030 -> 0\.750 ± 0\.030 \(\+0\.500 ± 0\.042\)", output)
    assert gspo.remaining() == [], "a grandchild in a session of its own must go too"
    assert yaml.safe_load((gspo.run_dir / "config.yaml").read_text())["staleness"]["max_lag"] == 1
    assert {path.name for path in (gspo.run_dir / "services").glob("*.log")} == {
        "redis.log",
        "coordinator-0.log",
        "generation-0.log",
        "reward-0.log",
        "learner-0.log",
    }


def test_what_dies_is_started_again_with_resume_on_the_same_gpus(gspo: Gspo, tmp_path: Path) -> None:
    gspo.environment = {**gpu_machine(tmp_path / "machine", 4), "CUDA_VISIBLE_DEVICES": "3,1"}
    code, output = gspo.run(fake="learner:steps=3 learner:die-once", services="coordinator generation learner")
    assert code == 0, output
    assert "generation-0  3    nobody\nlearner-0     1    nobody\n" in output
    assert [gspo.gpus(f"{service}-0") for service in ("coordinator", "generation", "learner")] == [
        ["3,1"],
        ["3"],
        ["1", "1"],
    ]
    assert "learner-0 died (killed by SIGSEGV): Segmentation fault. Starting it again in 0.5 s (1 of 5)" in output
    assert ["--resume" in start for start in gspo.starts("learner-0")] == [False, True]
    # Each process sees other GPUs, and all of them read the same values.
    assert "generation.dtype: bfloat16, generation.replicas: 1, learner.dtype: bfloat16" in output
    assert read_config(gspo.run_dir / "config.yaml").learner.dtype == "bfloat16"


def test_a_service_that_dies_too_often_ends_the_run_with_its_last_words(gspo: Gspo) -> None:
    gspo.configure(services={"max_restarts": 1})
    code, output = gspo.run(fake="learner:die")
    assert code == 1, output
    assert "error: learner-0 died 2 times (exit code 1; services.max_restarts is 1)" in output
    assert "Its last words: learner was asked to die" in output
    assert len(gspo.starts("learner-0")) == 2
    assert gspo.remaining() == []


def test_a_service_that_refuses_its_input_is_not_started_again(gspo: Gspo) -> None:
    code, output = gspo.run(fake="learner:refuse")
    assert code == 2, output
    assert "error: learner.deepspeed: is refused. Leave it out" in output
    assert len(gspo.starts("learner-0")) == 1
    assert gspo.remaining() == []


def test_a_check_that_refuses_starts_nothing(gspo: Gspo) -> None:
    code, output = gspo.run(fake="learner:refuse-check")
    assert (code, "error: model.path: is not a model. Give one" in output) == (2, True), output
    assert not (gspo.run_dir / "config.yaml").exists()
    assert gspo.starts("coordinator-0") == []


def test_what_a_check_warns_of_is_shown(gspo: Gspo) -> None:
    code, output = gspo.run(fake="coordinator:warn-check learner:steps=1")
    assert (code, output.count("3 of 8 prompts are skipped")) == (0, 1), output
    assert "what a library prints" not in output


def test_a_failed_run_exits_with_1_and_its_reason(gspo: Gspo) -> None:
    code, output = gspo.run(fake="learner:steps=1 learner:fail")
    assert (code, "failed: every reward failed" in output) == (1, True), output


def test_a_service_that_never_gets_ready_ends_the_start(gspo: Gspo) -> None:
    gspo.configure(run={"start_timeout_s": 8})
    code, output = gspo.run(fake="coordinator:never-ready coordinator:hang")
    assert code == 1, output
    assert "not ready after 8 s (run.start_timeout_s): coordinator-0: waiting for rewards of 3 groups (for " in output
    # A starting service has nothing to drain: it gets less than the 25 s of a training one.
    assert "waiting up to 2 s for coordinator-0 to end" in output
    assert "coordinator-0 did not end within 4 s of SIGTERM; killing it" in output
    assert gspo.remaining() == []


def test_kill_9_of_the_command_line_leaves_no_process(gspo: Gspo) -> None:
    process = gspo.start("config.yaml", fake="learner:child learner:hang")
    until((gspo.run_dir / "grandchild").exists, "the grandchild")
    assert len(gspo.remaining()) >= 5, "command line, guard, redis, coordinator, learner, grandchild"
    process.kill()
    until(lambda: not gspo.remaining(), "every process to go")


def test_ctrl_c_stops_says_how_to_resume_and_resumes(gspo: Gspo) -> None:
    process = gspo.start("config.yaml", "--plain", fake="")
    until(lambda: "all services are ready" in line_of(process), "the services")
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130, output
    assert f"gspo run --resume {gspo.run_dir}" in output
    assert gspo.remaining() == []

    code, output = gspo.run(fake="")
    assert (code, f"{gspo.run_dir}: already holds this run" in output) == (2, True), output
    gspo.configure(learner={"dtype": "bfloat16"})
    code, output = gspo.run("config.yaml", "--resume", fake="")
    assert (code, "learner.dtype" in output, "cannot change on resume" in output) == (2, True, True), output

    gspo.configure(learner={"learning_rate": 1e-4, "dtype": "float32"})
    code, output = gspo.run("config.yaml", "--resume", fake="learner:steps=2")
    assert code == 0, output
    assert "changed on resume: learner.learning_rate: 1.0e-06 -> 0.0001" in output
    assert yaml.safe_load((gspo.run_dir / "config.yaml").read_text())["learner"]["learning_rate"] == 1e-4
    assert "--resume" in gspo.starts("learner-0")[-1]


def test_a_drain_that_takes_too_long_is_given_up(gspo: Gspo) -> None:
    gspo.configure(run={"drain_timeout_s": 1})
    process = gspo.start("config.yaml", "--plain", fake="coordinator:deaf")
    until(lambda: "all services are ready" in line_of(process), "the services")
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, "longer than run.drain_timeout_s (1 s)" in output) == (130, True), output
    assert gspo.remaining() == []


def test_a_second_ctrl_c_ends_everything_at_once(gspo: Gspo) -> None:
    process = gspo.start("config.yaml", "--plain", fake="coordinator:deaf learner:hang learner:child")
    until(lambda: "all services are ready" in line_of(process), "the services")
    process.send_signal(signal.SIGINT)
    until(lambda: "stopping: up to 60 s" in line_of(process), "the first answer")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=20)  # far below the drain's 60 s, and the 25 s that SIGTERM would be given
    assert process.returncode == 130
    assert gspo.remaining() == []


def test_a_running_run_is_shown_and_not_shared(gspo: Gspo) -> None:
    process = gspo.start("config.yaml", "--plain", fake="")
    until(lambda: "all services are ready" in line_of(process), "the services")
    code, output = gspo.run("--resume", str(gspo.run_dir), fake="")
    assert (code, f"is in use by another gspo (process {process.pid})" in output) == (2, True), output

    command = [sys.executable, "-m", "gspo.cli", "status", str(gspo.run_dir)]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "proto"), str(ROOT / "services")]),
        "COLUMNS": "200",
    }
    status = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    for name in ("coordinator-0", "learner-0"):
        assert re.search(rf"{name} .* waiting for rewards of 3 groups .* 127\.0\.0\.1:\d+", status.stdout), (
            status.stdout
        )
