"""Check a finished run against the invariants of ARCHITECTURE.md, from its step files and log alone.

The version's weights are made again from the log, step by step, so every digest and every log-prob is computed anew.
It needs no process of the run.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.simulated.answers import key_of_bits, log_probs
from benchmarks.simulated.settings import Settings
from benchmarks.simulated.trainer import SimulatedTrainer
from gspo.common.config.schema import Config
from gspo.learner.assembly.rows import Row
from gspo.learner.push.policy_weights import PolicyWeights, weights_from
from gspo.learner.storage.step_log import StepLog
from gspo.learner.training.trainer_api import configured_hyperparameters

ENDINGS = ("trained", "filtered", "stale", "failed", "unused")


@dataclass(frozen=True)
class FinishedRun:
    """A finished run: its directory, its log and its rest in Redis.

    Attributes:
        exit_code: Of `gspo run`.
        in_redis: Fields that are left, by hash, and dead letters.
        longest: Most entries that were seen in each stream.
        on_their_way: Groups of which a stream still holds something.
    """

    run_dir: Path
    config: Config
    exit_code: int
    in_redis: dict[str, int]
    longest: dict[str, int]
    on_their_way: frozenset[int] = frozenset()

    def lines(self, name: str) -> list[dict[str, Any]]:
        """The records of a file of the log."""
        path = self.run_dir / "log" / name
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@dataclass(frozen=True)
class InvariantResult:
    """One invariant and what breaks it; nothing does where `broken` is empty. `seen` says how much was looked at."""

    number: int
    what: str
    seen: str
    broken: tuple[str, ...]


def check(left: FinishedRun) -> list[InvariantResult]:
    """Every invariant."""
    steps = _read_steps(left.run_dir)
    policies = _made_again(left, steps)
    rows = sum(len(found) for found in steps.values())
    parts: list[tuple[int, str, str, Callable[[], Iterator[str]]]] = [
        (1, "no rollout is in two steps, and every issued group is settled once, with a reason",
         f"{rows} rollouts, {_summary(left)['groups']['issued']} groups", lambda: _settled_once(left, steps)),
        (2, "no counted token older than max_lag", f"{rows} rollouts", lambda: _young_enough(left, steps)),
        (3, "each log-prob is that of the weights of its version", f"{_num_tokens(steps)} tokens",
         lambda: _of_their_weights(steps, policies)),
        (4, "learner and generators agree on the digest of a version", f"{len(policies)} versions",
         lambda: _same_digests(left, policies)),
        (5, "a failed score is never a number", f"{_num_failed(steps)} failed scores", lambda: _no_number(steps)),
        (6, "the run ends, Redis is empty, no stream exceeds the slots",
         f"{len(steps)} steps", lambda: _complete(left, steps)),
        (7, "a replay of the log gives the recorded digests", f"{len(policies)} versions",
         lambda: _recorded_digests(left, policies)),
    ]  # fmt: skip
    return [InvariantResult(number, what, seen, tuple(look())) for number, what, seen, look in parts]


def _read_steps(run_dir: Path) -> dict[int, list[Row]]:
    log = StepLog(run_dir / "log")
    return {step: log.read(step) for step in log.steps()}


def _summary(left: FinishedRun) -> dict[str, Any]:
    path = left.run_dir / "summary.json"
    summary: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"groups": Counter()}
    return summary


def _made_again(left: FinishedRun, steps: dict[int, list[Row]]) -> dict[int, PolicyWeights]:
    """Every version, trained from the log by a stand-in of the same seed."""
    maker = SimulatedTrainer(left.config, Path(left.config.model.path), left.run_dir, Settings(time_scale=0))
    policies = {0: weights_from(0, maker.policy())}
    for step, rows in steps.items():
        maker.train(step, rows, (), configured_hyperparameters(left.config, step))
        policies[step] = weights_from(step, maker.policy())
    return policies


def _settled_once(left: FinishedRun, steps: dict[int, list[Row]]) -> Iterator[str]:
    rollouts = Counter((row.group, row.number) for rows in steps.values() for row in rows)
    yield from (f"rollout {one} is in the log {times} times" for one, times in rollouts.items() if times > 1)
    endings = Counter(group for rows in steps.values() for group in {row.group for row in rows})
    otherwise = left.lines("settled.jsonl")
    endings.update(line["group"] for line in otherwise)
    yield from (f"group {group} is settled {times} times" for group, times in endings.items() if times > 1)
    yield from (
        f"group {line['group']} is {line['settlement']} for no reason" for line in otherwise if not line["reason"]
    )
    issued = set(range(max(endings, default=-1) + 1))
    if missing := issued - set(endings):
        yield f"groups {sorted(missing)[:10]} were issued and never settled"
    told = _summary(left)["groups"]
    if told["issued"] != len(endings) or sum(told[name] for name in ENDINGS) != told["issued"]:
        yield f"the summary counts {dict(told)}, the log {len(endings)} groups"


def _young_enough(left: FinishedRun, steps: dict[int, list[Row]]) -> Iterator[str]:
    for step, rows in steps.items():
        for row in rows:
            if row.skipped is None and row.mask.any():
                age = step - 1 - int(row.version[row.mask].min())
                if age > left.config.staleness.max_lag:
                    yield f"step {step}: rollout {row.group}-{row.number} is {age} versions old"


def _of_their_weights(steps: dict[int, list[Row]], policies: dict[int, PolicyWeights]) -> Iterator[str]:
    keys = {version: key_of_bits(policy.bits[min(policy.bits)]) for version, policy in policies.items()}
    for step, rows in steps.items():
        for row in rows:
            first = len(row.prompt_token_ids)
            for version in set(row.version.tolist()):
                expected_T = log_probs(row.token_ids.tolist(), first, keys.get(version, -1))
                if not np.array_equal(expected_T[row.version == version], row.logp[row.version == version]):
                    yield f"step {step}: rollout {row.group}-{row.number}: log-probs not of version {version}"


def _same_digests(left: FinishedRun, policies: dict[int, PolicyWeights]) -> Iterator[str]:
    loaded = 0
    for path in (left.run_dir / "services").glob("generation-*.log"):
        for line in path.read_text(errors="replace").splitlines():
            if '"version_loaded"' not in line:
                continue
            try:
                told = json.loads(line)
            except json.JSONDecodeError:
                continue  # the disk was full in the middle of it
            loaded += 1
            made = policies.get(told["version"])
            if made is None or not made.digest.startswith(told["digest"]):
                yield f"{path.name} served version {told['version']} with digest {told['digest']}"
    if not loaded:
        yield "no generator loaded anything"


def _no_number(steps: dict[int, list[Row]]) -> Iterator[str]:
    for step, rows in steps.items():
        for row in rows:
            if (row.failure is not None) and (row.reward is not None or row.skipped is None):
                yield f"step {step}: rollout {row.group}-{row.number} failed and counts"


def _complete(left: FinishedRun, steps: dict[int, list[Row]]) -> Iterator[str]:
    if left.exit_code:
        yield f"`gspo run` ended with exit code {left.exit_code}"
    if sorted(steps) != list(range(1, len(steps) + 1)):
        yield f"the steps in the log are not 1 to {len(steps)}"
    recorded = [line["step"] for line in left.lines("metrics.jsonl")]
    if recorded != sorted(steps):
        yield f"{len(recorded)} steps have figures, {len(steps)} are in the log"
    yield from (
        f"{left.in_redis[name]} left in {name}" for name in left.in_redis if name != "dead" and left.in_redis[name]
    )
    settled = {line["group"] for line in left.lines("settled.jsonl")} | {
        row.group for rows in steps.values() for row in rows
    }
    if lost := left.on_their_way - settled:
        yield f"groups {sorted(lost)[:10]} are still on their way, and nobody settled them"
    groups = left.config.num_slots * left.config.staleness.max_attempts
    bounds = {"prompts": groups}
    bounds |= dict.fromkeys(("rollouts", "scored"), groups * left.config.algorithm.num_return_sequences_in_group)
    for name, bound in bounds.items():
        if left.longest.get(name, 0) > bound:
            yield f"{name} had {left.longest[name]} entries, and the slots allow {bound}"


def _recorded_digests(left: FinishedRun, policies: dict[int, PolicyWeights]) -> Iterator[str]:
    recorded: dict[int, set[str]] = {}
    for line in left.lines("policy.jsonl"):
        recorded.setdefault(line["version"], set()).add(line["digest"])
    for version, policy in policies.items():
        if recorded.get(version) != {policy.digest}:
            yield f"version {version} is recorded as {recorded.get(version)}, and the log makes {policy.digest}"


def _num_tokens(steps: dict[int, list[Row]]) -> int:
    return sum(len(row.token_ids) for rows in steps.values() for row in rows)


def _num_failed(steps: dict[int, list[Row]]) -> int:
    return sum(row.failure is not None for rows in steps.values() for row in rows)
