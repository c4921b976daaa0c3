"""The check of a chaos run sees each breach in a log that was sound before."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.chaos.invariants import FinishedRun, check
from benchmarks.simulated.answers import key_of_bits, log_probs
from benchmarks.simulated.settings import Settings
from benchmarks.simulated.trainer import SimulatedTrainer
from gspo.learner.assembly.rows import Row
from gspo.learner.push.policy_weights import weights_from
from gspo.learner.storage.step_log import StepLog
from gspo.learner.training.trainer_api import configured_hyperparameters
from tests.support.service_process import make_run
from tests.support.tiny_model import make_tiny_model
from tests.support.training.rollout_rows import make_rows

STEPS = 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def sound(tmp_path: Path, model: Path) -> FinishedRun:
    """The log of a run of three steps, as the simulated run writes it."""
    config = make_run(tmp_path, model, staleness={"max_lag": 1})
    run_dir = config.run_dir
    log, maker = StepLog(run_dir / "log"), SimulatedTrainer(config, model, run_dir, Settings(time_scale=0))
    (run_dir / "log").mkdir()
    (run_dir / "services").mkdir()
    policy, versions, loaded, metrics, ledger = weights_from(0, maker.policy()), [], [], [], []
    for step in range(1, STEPS + 1):
        versions.append({"version": step - 1, "digest": policy.digest})
        loaded.append({"event": "version_loaded", "version": step - 1, "digest": policy.digest[:12]})
        key = key_of_bits(policy.bits[min(policy.bits)])
        rows = [_row(row, step, key) for row in make_rows(model, step=step, num_groups=2)]
        log.write(step, rows)
        maker.train(step, rows, (), configured_hyperparameters(config, step))
        policy = weights_from(step, maker.policy())
        metrics.append({"step": step})
        trained = sum(int(row.mask.sum()) for _, row in _logged(log) if row.skipped is None)
        ledger.append({"step": step, "unix_s": 0, "account": "a", "tokens": {"generated": trained, "trained": trained}})
    versions.append({"version": STEPS, "digest": policy.digest})
    settled = [{"group": 2 * STEPS, "settlement": "unused", "reason": "the end"}]
    for name, lines in (("log/policy.jsonl", versions), ("log/metrics.jsonl", metrics), ("log/settled.jsonl", settled),
                        ("log/ledger.jsonl", ledger), ("services/generation-0.log", loaded)):  # fmt: skip
        _write(run_dir / name, lines)
    groups = {"issued": 2 * STEPS + 1, "trained": 2 * STEPS, "filtered": 0, "stale": 0, "failed": 0, "unused": 1}
    (run_dir / "summary.json").write_text(json.dumps({"groups": groups}))
    return FinishedRun(run_dir, config, 0, {"open": 0, "dead": 3}, {"scored": 8})


def _logged(log: StepLog) -> list[tuple[int, Row]]:
    return [(step, row) for step in log.steps() for row in log.read(step)]


def _row(row: Row, step: int, key: int) -> Row:
    version_T = np.full(len(row.token_ids), step - 1, np.int32)
    # A branch begins with a context of its own.
    logp_T = np.concatenate(
        [
            log_probs(row.token_ids[first:last].tolist(), 0 if first else len(row.prompt_token_ids), key)
            for first, last in row.branch_bounds
        ]
    )
    return replace(row, group=row.group + 2 * (step - 1), version=version_T, logp=logp_T)


def _write(path: Path, lines: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def _read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def broken(run: FinishedRun) -> set[int]:
    return {result.number for result in check(run) if result.broken}


def test_a_sound_log_breaks_nothing(sound: FinishedRun) -> None:
    results = check(sound)
    assert [result.number for result in results] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [result.broken for result in results] == [()] * 8


def _change_last_step(run: FinishedRun, change: Callable[[Row], Row]) -> None:
    log = StepLog(run.run_dir / "log")
    first, *others = log.read(STEPS)
    log.path(STEPS).unlink()
    log.write(STEPS, [change(first), *others])


@pytest.mark.parametrize(
    ("number", "change"),
    [
        (1, lambda row: replace(row, group=0, number=0)),
        (2, lambda row: replace(row, version=np.zeros_like(row.version))),
        (3, lambda row: replace(row, logp=row.logp - np.float32(0.01))),
        (3, lambda row: replace(row, version=row.version - 1)),
        (5, lambda row: replace(row, failure="raised")),
        (7, lambda row: replace(row, reward=9.0)),
    ],
    ids=["twice", "old", "other log-probs", "other version", "failed and counts", "another row"],
)
def test_a_changed_rollout_is_seen(sound: FinishedRun, number: int, change: Callable[[Row], Row]) -> None:
    _change_last_step(sound, change)
    assert number in broken(sound)


def test_a_group_that_never_ended_is_seen(sound: FinishedRun) -> None:
    _write(sound.run_dir / "log/settled.jsonl", [{"group": 2 * STEPS + 1, "settlement": "unused", "reason": "end"}])
    assert broken(sound) == {1}


def test_a_group_that_ended_twice_or_for_no_reason_is_seen(sound: FinishedRun) -> None:
    settled = _read(sound.run_dir / "log/settled.jsonl")
    _write(sound.run_dir / "log/settled.jsonl", [*settled, {"group": 0, "settlement": "failed", "reason": ""}])
    (finding,) = [result for result in check(sound) if result.broken]
    assert finding.broken == ("group 0 is settled 2 times", "group 0 is failed for no reason")


def test_other_digests_are_seen(sound: FinishedRun) -> None:
    loaded = _read(sound.run_dir / "services/generation-0.log")
    _write(sound.run_dir / "services/generation-0.log", [*loaded, {**loaded[0], "version": STEPS}])
    assert broken(sound) == {4}
    versions = _read(sound.run_dir / "log/policy.jsonl")
    _write(sound.run_dir / "log/policy.jsonl", [*versions, {**versions[0], "version": STEPS}])
    assert broken(sound) == {4, 7}


@pytest.mark.parametrize(
    "change",
    [
        {"exit_code": 1},
        {"in_redis": {"open": 1}},
        {"in_partial": ("7-0",)},
        {"on_their_way": frozenset({99})},
        {"longest": {"prompts": 1_000}},
        {"longest": {"scored": 100_000}},
    ],
)
def test_an_end_that_is_none_is_seen(sound: FinishedRun, change: dict[str, Any]) -> None:
    assert broken(replace(sound, **change)) == {6}


@pytest.mark.parametrize(
    "change",
    [{"generated": 1}, {"trained": 1}, {"generated": 3, "in_flight": 3}, {"generated": -1, "trained": -1}],
    ids=["lost", "twice", "left over", "not the step files'"],
)
def test_a_ledger_that_does_not_close_is_seen(sound: FinishedRun, change: dict[str, int]) -> None:
    *before, last = _read(sound.run_dir / "log/ledger.jsonl")
    last["tokens"] = {"in_flight": 0, **last["tokens"]}
    last["tokens"] |= {column: last["tokens"][column] + num for column, num in change.items()}
    _write(sound.run_dir / "log/ledger.jsonl", [*before, last])
    assert broken(sound) == {8}


def test_a_run_without_a_ledger_is_seen(sound: FinishedRun) -> None:
    (sound.run_dir / "log/ledger.jsonl").write_text("")
    assert broken(sound) == {8}
