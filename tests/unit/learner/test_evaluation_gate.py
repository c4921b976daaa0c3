"""When newer weights wait for an evaluation, and what ends the wait."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gspo.common.config.loading import parse_config
from gspo.common.telemetry.activity import Activity
from gspo.learner.evaluation_gate import EvaluationGate
from gspo.learner.storage.candidates import candidate_folder
from gspo.learner.storage.run_directory import RunDir
from gspo_proto.rollout_pb2 import EvaluationDone
from tests.support.push_peers import policy


@pytest.fixture
def run_dir(tmp_path: Path) -> Iterator[RunDir]:
    with RunDir(tmp_path / "run") as run_dir:
        yield run_dir


def held_out(
    run_dir: RunDir, start_timeout_s: float = 30.0, data: dict[str, Any] | None = None, **evaluation: Any
) -> EvaluationGate:
    values: dict[str, Any] = {
        "name": "small",
        "model": {"path": "."},
        "data": data or {"prompts": "p.jsonl"},
        "reward": {"functions": [{"path": "r.py"}]},
        "evaluation": {"prompts": {"a": "a.jsonl", "b": "b.jsonl"}, "every": 2, "timeout_s": 0.05, **evaluation},
        "run": {"total_steps": 6, "start_timeout_s": start_timeout_s},
    }
    return EvaluationGate(parse_config(values, run_dir.path), run_dir, Activity("learner"))


def done(version: int, file: str, score: float | None = None) -> EvaluationDone:
    label = f"v{version}/{file}"
    return EvaluationDone(evaluation=label, version=version, step=version, file=file, score=score)


@pytest.mark.parametrize(("version", "hold"), [(0, True), (1, True), (6, True), (2, False)])
async def test_the_gate_does_not_wait_for_versions_without_evaluation(
    run_dir: RunDir, version: int, hold: bool
) -> None:
    async with asyncio.timeout(1):
        await held_out(run_dir, hold_weights=hold).wait(version, lambda: False)


async def test_every_file_is_waited_for_once(run_dir: RunDir) -> None:
    known = held_out(run_dir)
    waiting = asyncio.create_task(known.wait(2, lambda: False))
    for file in ("b", "a"):
        await asyncio.sleep(0.05)
        assert not waiting.done()
        await known.record(done(2, file))
    async with asyncio.timeout(5):
        await waiting
    async with asyncio.timeout(1):
        await held_out(run_dir).wait(2, lambda: False)


async def test_a_stop_and_a_deadline_end_the_wait(run_dir: RunDir) -> None:
    async with asyncio.timeout(5):
        await held_out(run_dir).wait(2, lambda: True)
        # Twice evaluation.timeout_s, and what a generator may take to join.
        began_s = time.monotonic()
        await held_out(run_dir, start_timeout_s=0.1).wait(2, lambda: False)
        assert time.monotonic() - began_s >= 0.2


async def test_only_the_file_that_is_named_decides_which_version_is_kept(run_dir: RunDir) -> None:
    def write(folder: Path) -> None:
        folder.mkdir(parents=True)

    known = held_out(run_dir, keep_best="b/sampled_mean")
    for version, score in ((0, 0.25), (1, 0.5), (2, 0.75)):
        if keeper := known.keeper_of(version):  # version 1 is not measured, so it is not kept
            keeper.save_candidate(version, write)
        await known.record(done(version, "a"))
        await known.record(done(version, "b", score))
        assert '"version": 0' in (run_dir.path / "best" / "best.json").read_text() or version == 2
    assert '"version": 2' in (run_dir.path / "best" / "best.json").read_text()
    assert [folder.name for folder in (run_dir.path / "candidates").iterdir()] == []
    # The next start reads the scores back.
    assert held_out(run_dir, keep_best="b/sampled_mean")._best.version == 2  # type: ignore[union-attr]


async def test_with_several_sources_the_best_version_has_the_best_weighted_mean(run_dir: RunDir) -> None:
    sources = [
        {"name": "a", "prompts": "a.jsonl", "weight": 3},
        {"name": "b", "prompts": "b.jsonl"},
    ]
    known = held_out(run_dir, data={"sources": sources}, keep_best="sampled_mean")
    saved: list[int] = []

    def write(path: Path) -> None:
        path.mkdir(parents=True)
        saved.append(int(path.name.removeprefix("step-")))

    for version, scores in ((0, (0.5, 0.9)), (2, (0.75, 0.1)), (4, (0.1, 1.0))):
        known.keeper_of(version).save_candidate(version, write)  # type: ignore[union-attr]
        for file, score in zip("ab", scores, strict=True):
            await known.record(done(version, file, score))
            if file == "a":  # its mean is not known yet
                assert (run_dir.path / "candidates" / f"step-{version:06d}").exists()
        assert not list((run_dir.path / "candidates").iterdir())
    assert saved == [0, 2, 4]
    # 0.6, 0.5875, 0.325: by file a alone version 2 would be the best, by file b version 4.
    assert json.loads((run_dir.path / "best" / "best.json").read_text()) == {
        "version": 0,
        "step": 0,
        "figure": "sampled_mean",
        "score": pytest.approx(0.6),
    }
    assert held_out(run_dir, data={"sources": sources}, keep_best="sampled_mean").keeper_of(0)
    assert run_dir.scores({"a": 3.0, "b": 1.0}) == pytest.approx({0: 0.6, 2: 0.5875, 4: 0.325})


def alone(_version: int, _folder: Path) -> None:
    """There are no other ranks."""


def recorded_versions(run_dir: RunDir, last: int) -> None:
    for version in range(last + 1):
        run_dir.append_version(version, policy(version).digest, policy(version).dtype)


async def test_a_version_whose_evaluation_was_stopped_is_served_again_until_it_is_recorded(run_dir: RunDir) -> None:
    recorded_versions(run_dir, 3)
    stopped = held_out(run_dir)
    await stopped.record(done(2, "a"))
    stopped.keep_unmeasured(policy(2), alone)
    kept = run_dir.path / "candidates" / "unmeasured-000002"
    assert kept.is_dir()
    resumed = held_out(run_dir)
    unmeasured = resumed.begin(policy(3))
    assert unmeasured is not None and (unmeasured.version, unmeasured.digest) == (2, policy(2).digest)
    assert not resumed.holds(3)
    await resumed.record(done(2, "b"))
    assert not kept.exists()
    assert held_out(run_dir).begin(policy(3)) is None


async def test_the_candidate_of_a_version_that_was_never_measured_is_served_and_others_go(run_dir: RunDir) -> None:
    recorded_versions(run_dir, 5)
    gate = held_out(run_dir, keep_best="a/sampled_mean")
    for version in (2, 4):
        held_out(run_dir).keep_unmeasured(policy(version), alone)
        (run_dir.path / "candidates" / f"unmeasured-{version:06d}").rename(candidate_folder(run_dir.path, version))
    unmeasured = gate.begin(policy(5))
    assert unmeasured is not None and unmeasured.version == 4
    assert [path.name for path in (run_dir.path / "candidates").iterdir()] == ["step-000004"]


async def test_where_the_weights_are_gone_the_newest_version_is_measured_and_may_be_kept(run_dir: RunDir) -> None:
    recorded_versions(run_dir, 3)
    held_out(run_dir).keep_unmeasured(policy(2), alone)
    run_dir.append_version(2, "of another machine", "bfloat16")
    gate = held_out(run_dir, keep_best="a/sampled_mean")
    assert gate.begin(policy(3)) is None
    assert not list((run_dir.path / "candidates").iterdir())
    assert gate.holds(3) and gate.keeper_of(3)
    for file in "ab":
        await gate.record(done(3, file))
    assert not gate.holds(3)
