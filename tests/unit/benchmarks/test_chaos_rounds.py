"""The schedule of a chaos campaign, its kept rounds, its page, and the proxy that loses replies."""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks.__main__ import app
from benchmarks.chaos.harness.faulty_service import AfterImport
from benchmarks.chaos.harness.redis_proxy import REDIS_HOST, Drops, Route, serve
from benchmarks.chaos.invariants import InvariantResult
from benchmarks.chaos.kept_rounds import RoundName, keep_round, kept_rounds, missing_rounds
from benchmarks.chaos.report import write_report
from benchmarks.chaos.rounds import FaultOutcome, Round
from benchmarks.chaos.schedule import CLOCK_MOVES_S, STOP_S, kinds, round_of, services
from benchmarks.chaos.workloads import AGENTS, SIMULATED, WORKLOADS, Workload
from gspo.cli.processes.redis_server import free_port

GROUPS = {"issued": 9, "trained": 8, "filtered": 0, "stale": 0, "failed": 0, "unused": 1}
MACHINE = {"cores": 2, "processor": "a processor"}


def played(workload: str, number: int, problem: str = "", broken: tuple[str, ...] = ()) -> Round:
    """A round of one fault."""
    fault = FaultOutcome("kill redis", ("redis",), 1.0, 0.0, None if problem else 2.5, problem, 3)
    finding = InvariantResult(1, "nothing is lost", "4 rollouts, 9 groups", broken)
    return Round(workload, 0, number, 2, "0123abcd", 1.8e9, MACHINE, [fault], [finding], 5, GROUPS, {}, 0, 60.0)


def test_a_seed_repeats_a_schedule_and_another_does_not() -> None:
    assert round_of(5, 2, kinds()) == round_of(5, 2, kinds())
    assert round_of(5, 2, kinds()) != round_of(6, 2, kinds())
    assert round_of(5, 2, kinds()) != round_of(5, 3, kinds())


@pytest.mark.parametrize("workload", WORKLOADS.values(), ids=list(WORKLOADS))
def test_a_round_strikes_every_process_in_every_way(workload: Workload) -> None:
    planned = round_of(0, 0, workload.kinds(is_root=True), workload.processes)
    counted = Counter(fault.kind for fault in planned)
    assert set(counted.values()) == {1}
    for process in workload.processes:
        assert {f"kill {process}", f"stop {process}"} <= set(counted)
        assert process == "redis" or {f"drop replies {process}", f"close client {process}"} <= set(counted)
    others = {"stop all", "flush redis", "corrupt push", "hang reward", "fill disk", "slow disk", *CLOCK_MOVES_S}
    assert others <= set(counted)
    assert ("cut network" in counted) == workload.is_simulated
    for fault in planned:
        assert fault.verb != "stop" or fault.lasts_s == STOP_S
        assert set(fault.targets) <= {*services(workload.processes), "redis", "all"}


def test_without_root_no_network_is_cut_and_no_disk_struck() -> None:
    assert not {"cut network", "fill disk", "slow disk"} & set(SIMULATED.kinds(is_root=False))


def test_a_kept_round_is_not_played_again_and_an_interrupted_one_is(tmp_path: Path) -> None:
    numbers = [("simulated", 3), ("agents", 1)]
    keep_round(tmp_path, played("simulated", 1))
    (tmp_path / "simulated-seed-0-round-2.77.tmp").write_text("half of a fi")
    missing = missing_rounds(tmp_path, 0, numbers)
    assert [str(name) for name in missing] == [
        "simulated-seed-0-round-0",
        "simulated-seed-0-round-2",
        "agents-seed-0-round-0",
    ]
    assert missing_rounds(tmp_path, 1, numbers[1:]) == [RoundName("agents", 1, 0)]
    for name in missing:
        keep_round(tmp_path, played(name.workload, name.number))
    assert missing_rounds(tmp_path, 0, numbers) == []
    kept = [(record["workload"], record["number"]) for record in kept_rounds(tmp_path, 0)]
    assert kept == [("simulated", 0), ("simulated", 1), ("simulated", 2), ("agents", 0)]


def test_rounds_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for number in (10, 9, 2):
        keep_round(tmp_path, played("simulated", number))
    assert [record["number"] for record in kept_rounds(tmp_path, 0)] == [2, 9, 10]


def page_of(folder: Path, *rounds: Round) -> tuple[str, dict[str, Any]]:
    for record in rounds:
        keep_round(folder, record)
    write_report(folder, 0, folder)
    assert (folder / "chaos.png").stat().st_size
    return (folder / "chaos.md").read_text(), json.loads((folder / "chaos.json").read_text())


def test_the_page_tells_simulated_faults_from_those_on_real_engines(tmp_path: Path) -> None:
    page, figures = page_of(tmp_path, played("simulated", 0), played("simulated", 1), played("agents", 0))
    assert "**3 faults of 1 kinds in 3 rounds: 2 in simulated runs, 1 in runs of the real engines." in page
    assert "No invariant was broken, and the run recovered after every fault.**" in page
    assert "| kill redis | - | 2 | 2.5 | 2.5 | 0 | 1 | 2.5 | 2.5 | 0 |" in page
    assert "| 1. nothing is lost | 8 rollouts, 18 groups | never |" in page
    assert "| agents 0 | 2027-01-15 08:00 | 0123abcd | 1 | 2 | 5 | 9 | 1 | nothing |" in page
    assert [fault["is_simulated"] for record in figures["rounds"] for fault in record["faults"]] == [True, True, False]


def test_the_page_lists_what_broke_and_who_did_not_recover(tmp_path: Path) -> None:
    page, _ = page_of(tmp_path, played("simulated", 0, broken=("group 3 is lost",)), played("agents", 0, "no steps"))
    assert "Breaches of an invariant: 1. Faults without recovery: 1.**" in page
    assert "Broken in simulated 0 (commit 0123abcd):\n\n- invariant 1: group 3 is lost\n" in page
    assert "Broken in agents 0 (commit 0123abcd):\n\n- " in page
    assert "kill redis redis: NOT RECOVERED: no steps\n" in page


def test_a_report_of_kept_rounds_fails_where_one_broke(tmp_path: Path) -> None:
    words = ["chaos", "--report", "--results", str(tmp_path), "--out", str(tmp_path)]
    keep_round(tmp_path, played("simulated", 0))
    assert CliRunner().invoke(app, words).exit_code == 0
    keep_round(tmp_path, replace(played("simulated", 1), findings=[InvariantResult(1, "rule", "1 steps", ("lost",))]))
    assert CliRunner().invoke(app, words).exit_code == 1


def test_an_unknown_workload_is_refused(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["chaos", "--workload", "agent", "--results", str(tmp_path)])
    assert done.exit_code == 2
    assert AGENTS.name in done.output


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A Redis whose only reply is PONG."""
    while await reader.read(100):
        writer.write(b"+PONG\r\n")
    writer.close()


async def _ask(port: int) -> bytes:
    """The bytes of a reply until it is whole, or the connection ends."""
    reader, writer = await asyncio.open_connection(REDIS_HOST, port)
    writer.write(b"PING\r\n")
    received = b""
    while not received.endswith(b"\n") and (more := await reader.read(100)):
        received += more
    writer.close()
    return received


async def _replies(folder: Path) -> tuple[list[bytes], list[bytes]]:
    """Replies that no fault strikes (before it, or to another service), and those meanwhile."""
    redis = await asyncio.start_server(_answer, REDIS_HOST, 0)
    routes = [Route(f"reward-{n}", REDIS_HOST, free_port(), f"127.0.0.{10 + n}") for n in range(2)]
    serving = asyncio.create_task(serve(folder, routes, redis.sockets[0].getsockname()[1]))
    await asyncio.sleep(0.1)
    before = [await _ask(routes[0].port) for _ in range(3)]
    (folder / "drop-reward-0").touch()
    await asyncio.sleep(0.1)
    meanwhile = [await _ask(routes[0].port) for _ in range(60)]
    beside = [await _ask(routes[1].port) for _ in range(20)]
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)
    redis.close()
    return [*before, *beside], meanwhile


def test_the_proxy_cuts_replies_of_the_struck_service_alone(tmp_path: Path) -> None:
    others, meanwhile = asyncio.run(_replies(tmp_path))
    assert set(others) == {b"+PONG\r\n"}
    assert set(meanwhile) == {b"+PONG\r\n", b"+PO", b""}
    lost = (tmp_path / "drop-reward-0").read_text().splitlines()
    assert len(lost) == sum(reply != b"+PONG\r\n" for reply in meanwhile)


def test_no_reply_is_lost_after_the_end_of_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "drop-reward-0"
    file.touch()
    monkeypatch.setattr(time, "monotonic", lambda: 1.0)  # it looks for the file once
    drops = Drops(file)
    assert any(drops.is_next_lost() for _ in range(20))
    file.unlink()
    assert not any(drops.is_next_lost() for _ in range(20))
    assert not file.exists()


def test_a_module_is_changed_at_its_first_import_and_no_earlier(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "struck_module.py").write_text("VALUE = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", [AfterImport("struck_module", _double), *sys.meta_path])
    assert "struck_module" not in sys.modules
    assert importlib.import_module("struck_module").VALUE == 2
    assert sys.modules.pop("struck_module").VALUE == 2


def _double(module: Any) -> None:
    module.VALUE *= 2
