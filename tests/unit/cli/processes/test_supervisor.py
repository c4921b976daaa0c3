"""How the supervisor answers deaths: pauses that grow while a start fails, and stay short after a long run."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import time
from pathlib import Path

import pytest

from gspo.cli.processes import supervisor as supervisor_module
from gspo.cli.processes.child import Program
from gspo.cli.processes.exit_codes import RunError, ServiceRefusedError
from gspo.cli.processes.guard import processes_of
from gspo.cli.processes.supervisor import ProcessSupervisor


async def pauses(tmp_path: Path, command: str) -> tuple[list[float], str]:
    """Seconds before each restart of a program that dies again and again, and the final message."""
    messages: list[str] = []
    async with ProcessSupervisor(tmp_path, 3, messages.append) as supervisor:
        supervisor.start([Program("worker", ("sh", "-c", command))])
        with pytest.raises(RunError) as ended:
            await supervisor.watch()
    waits = [re.search(r"again in ([\d.]+) s", line) for line in messages]
    assert all(waits)
    return [float(wait[1]) for wait in waits if wait], str(ended.value)


async def test_pauses_grow_while_it_dies_soon_after_its_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor_module, "_FIRST_PAUSE_S", 0.05)
    pauses_s, words = await pauses(tmp_path, "echo no port is free; exit 3")
    assert pauses_s == [0.05, 0.1, 0.2]
    assert "worker died 4 times (exit code 3; services.max_restarts is 3). Its last words: no port is free" in words


async def test_one_that_lived_is_started_again_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor_module, "_FIRST_PAUSE_S", 0.05)
    monkeypatch.setattr(supervisor_module, "_STARTED_S", 0.1)
    pauses_s, _ = await pauses(tmp_path, "sleep 0.2; exit 3")
    assert pauses_s == [0.05, 0.05, 0.05]


async def test_an_end_is_reported_when_the_children_have_ended_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as vLLM's processes, which may have the memory of a GPU."""
    monkeypatch.setattr(supervisor_module, "_FIRST_PAUSE_S", 0.05)
    remaining: list[int] = []

    async def ended() -> None:
        remaining.append(len(processes_of(supervisor._supervisor_id)))

    async with ProcessSupervisor(tmp_path, 1, lambda _line: None) as supervisor:
        supervisor.start([Program("worker", ("sh", "-c", "sleep 300 & exit 3"), ended=ended)])
        with pytest.raises(RunError):
            await supervisor.watch()
    assert remaining == [0, 0]


def dying(kind: str = "ValueError", step: int | None = 3, *, is_outside: bool = False) -> str:
    """A command that dies as a service does."""
    failure = {"kind": kind, "place": "loss.py:7", "step": step, "is_outside": is_outside}
    line = json.dumps({"event": "service_failed", "reason": f"{kind}: no such reward", "failure": failure})
    return f"echo {shlex.quote(line)} >&2; exit 1"


async def test_one_that_asks_for_its_start_is_not_counted_as_dead(tmp_path: Path) -> None:
    """Such as a learner that makes a step with smaller micro-batches; no error of it is taken for the one before."""
    starts = tmp_path / "starts"
    script = f"echo start $1 >> {starts}; [ $(wc -l < {starts}) -gt 3 ] && exit 2; {dying()[:-1]}4"
    messages: list[str] = []
    async with ProcessSupervisor(tmp_path, 0, messages.append) as supervisor:
        supervisor.start([Program("worker", ("sh", "-c", script, "sh"), restart_options=("--resume",))])
        with pytest.raises(ServiceRefusedError):
            await supervisor.watch()
    assert messages == ["worker starts again: ValueError: no such reward"] * 3
    assert starts.read_text().splitlines() == ["start", *["start --resume"] * 3]


async def test_the_same_error_twice_is_no_accident(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor_module, "_FIRST_PAUSE_S", 0.05)
    pauses_s, words = await pauses(tmp_path, dying())
    assert pauses_s == [0.05]
    assert "worker died twice of the same error" in words
    assert "in step 3: ValueError: no such reward (raised at loss.py:7)" in words
    assert str(tmp_path / "worker.log") in words


async def test_an_error_from_outside_keeps_its_restarts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor_module, "_FIRST_PAUSE_S", 0.05)
    pauses_s, words = await pauses(tmp_path, dying("ConnectionError", is_outside=True))
    assert len(pauses_s) == 3
    assert "worker died 4 times" in words


async def test_a_kill_between_two_deaths_of_one_error_hides_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor_module, "_FIRST_PAUSE_S", 0.05)
    once = f"{tmp_path}/killed"
    command = f'n=$(cat {once} 2>/dev/null); echo x$n > {once}; test "$n" = x && kill -9 $$; {dying()}'
    pauses_s, words = await pauses(tmp_path, command)
    assert len(pauses_s) == 2
    assert "worker died twice of the same error" in words


@pytest.mark.parametrize(("step", "num_restarts"), [(None, 3), (3, 1)])
async def test_after_a_long_run_only_the_same_step_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int | None, num_restarts: int
) -> None:
    """A replay may take hours to come to the step again."""
    monkeypatch.setattr(supervisor_module, "_FIRST_PAUSE_S", 0.05)
    monkeypatch.setattr(supervisor_module, "STEADY_S", 0.1)
    pauses_s = []
    async with ProcessSupervisor(tmp_path, 1, lambda line: pauses_s.append(line)) as supervisor:
        supervisor.start([Program("worker", ("sh", "-c", f"sleep 0.2; {dying(step=step)}"))])
        with pytest.raises((RunError, TimeoutError)):
            async with asyncio.timeout(1.5):
                await supervisor.watch()
    assert len(pauses_s) >= num_restarts if step is None else len(pauses_s) == num_restarts


async def test_of_several_ranks_the_first_error_counts(tmp_path: Path) -> None:
    lost = dying("RanksError", None, is_outside=True).removesuffix("; exit 1")
    async with ProcessSupervisor(tmp_path, 0, lambda _line: None) as supervisor:
        supervisor.start([Program("worker", ("sh", "-c", f"{lost}; {dying()}"))])
        with pytest.raises(RunError) as ended:
            await supervisor.watch()
    assert ended.value.failure is not None
    assert (ended.value.failure.kind, ended.value.failure.step) == ("ValueError", 3)


async def test_one_without_work_is_not_waited_for(tmp_path: Path) -> None:
    async with ProcessSupervisor(tmp_path, 0, lambda _line: None) as supervisor:
        supervisor.start([Program(name, ("sh", "-c", "trap '' TERM; sleep 300")) for name in ("starting", "other")])
        await asyncio.sleep(0.5)
        began = time.monotonic()
        end = asyncio.create_task(supervisor.end(1.0, terminate_s=1.0, idle={"starting"}))
        while supervisor.children["starting"].is_running:
            await asyncio.sleep(0.01)
        assert time.monotonic() - began < 0.9
        assert supervisor.children["other"].is_running
        await end
    assert not supervisor.children["other"].is_running


async def test_a_retired_program_is_not_started_again(tmp_path: Path) -> None:
    starts = tmp_path / "starts"
    async with ProcessSupervisor(tmp_path, 5, lambda _line: None) as supervisor:
        supervisor.start([Program(name, ("sh", "-c", f"echo {name} >> {starts}; sleep 300")) for name in ("a", "b")])
        while not starts.exists() or len(starts.read_text().split()) < 2:
            await asyncio.sleep(0.01)
        watch = asyncio.create_task(supervisor.watch())
        await supervisor.retire(["b"], 5.0)
        await asyncio.sleep(1.5)
        assert [*supervisor.children] == ["a"]
        assert sorted(starts.read_text().split()) == ["a", "b"]
        assert not watch.done()
        watch.cancel()
