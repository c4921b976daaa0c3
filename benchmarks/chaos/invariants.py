"""Check a finished run against the invariants of ARCHITECTURE.md, from its step files and log alone.

The weights of each version are made again from the log, step by step, so every digest and every log-prob is computed
anew. It needs no process of the run.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness.gspo_run import logged
from benchmarks.simulated.answers import key_of_bits, log_probs
from benchmarks.simulated.settings import Settings
from benchmarks.simulated.trainer import SimulatedTrainer
from gspo.common.config.schema import Config
from gspo.learner.assembly.rows import Row
from gspo.learner.push.policy_weights import PolicyWeights, weights_from
from gspo.learner.storage.step_log import StepLog
from gspo.learner.training.trainer_api import configured_hyperparameters
from gspo.runlog.token_ledger import LEDGER, LedgerRecord

SETTLEMENTS = ("trained", "filtered", "stale", "failed", "unused")


@dataclass(frozen=True)
class FinishedRun:
    """A finished run: its directory, its log and its rest in Redis.

    Attributes:
        exit_code: That of `gspo run`.
        in_redis: Remaining fields by hash, and dead letters.
        longest: The largest number of entries seen in each stream.
        on_their_way: Groups with entries in a stream.
        in_partial: Rollouts that the hash `partial` still has.
    """

    run_dir: Path
    config: Config
    exit_code: int
    in_redis: dict[str, int]
    longest: dict[str, int]
    on_their_way: frozenset[int] = frozenset()
    in_partial: tuple[str, ...] = ()

    def lines(self, name: str) -> list[dict[str, Any]]:
        """The records of a file of the log."""
        return logged(self.run_dir, name)

    @cached_property
    def steps(self) -> dict[int, list[Row]]:
        """The rows of each step file."""
        log = StepLog(self.run_dir / "log")
        return {step: log.read(step) for step in log.steps()}

    @property
    def rows(self) -> Iterator[tuple[int, Row]]:
        """Every row, with its step."""
        return ((step, row) for step, rows in self.steps.items() for row in rows)

    @cached_property
    def policies(self) -> dict[int, PolicyWeights]:
        """Every version, trained from the log by a simulated trainer of the same seed."""
        trainer = SimulatedTrainer(self.config, Path(self.config.model.path), self.run_dir, Settings(time_scale=0))
        policies = {0: weights_from(0, trainer.policy())}
        for step, rows in self.steps.items():
            trainer.train(step, rows, (), configured_hyperparameters(self.config, step))
            policies[step] = weights_from(step, trainer.policy())
        return policies

    @cached_property
    def groups(self) -> dict[str, int]:
        """The summary's number of groups by settlement; empty without a summary."""
        path = self.run_dir / "summary.json"
        groups: dict[str, int] = json.loads(path.read_text())["groups"] if path.exists() else Counter()
        return groups


@dataclass(frozen=True)
class InvariantResult:
    """One invariant, the amount of checked data, and everything that breaks it."""

    number: int
    what: str
    seen: str
    broken: tuple[str, ...]


@dataclass(frozen=True)
class Invariant:
    """A rule, the kinds of data that it is checked on, and a function that finds what breaks it."""

    what: str
    units: tuple[str, ...]
    breaks: Callable[[FinishedRun], Iterator[str]]


def check(run: FinishedRun, invariants: Sequence[Invariant] = ()) -> list[InvariantResult]:
    """Check every invariant; by default those of a simulated run."""
    metrics = run.lines("metrics.jsonl")
    counts = {
        "rollouts": sum(map(len, run.steps.values())),
        "groups": run.groups["issued"],
        "tokens": sum(len(row.token_ids) for _, row in run.rows),
        "versions": len({line["version"] for line in run.lines("policy.jsonl")}),
        "compared tokens": int(sum(line.get("figures", {}).get("mismatch_tokens", 0) for line in metrics)),
        "failed scores": sum(row.failure is not None for _, row in run.rows),
        "steps": len(run.steps),
    }
    return [
        InvariantResult(
            number,
            invariant.what,
            ", ".join(f"{counts[unit]} {unit}" for unit in invariant.units),
            tuple(invariant.breaks(run)),
        )
        for number, invariant in enumerate(invariants or SIMULATED, 1)
    ]


def _settled_once(run: FinishedRun) -> Iterator[str]:
    rollouts = Counter((row.group, row.number) for _, row in run.rows)
    yield from (f"rollout {name} is in the log {times} times" for name, times in rollouts.items() if times > 1)
    settled = Counter(group for rows in run.steps.values() for group in {row.group for row in rows})
    otherwise = run.lines("settled.jsonl")
    settled.update(line["group"] for line in otherwise)
    yield from (f"group {group} is settled {times} times" for group, times in settled.items() if times > 1)
    yield from (
        f"group {line['group']} is {line['settlement']} for no reason" for line in otherwise if not line["reason"]
    )
    if missing := set(range(max(settled, default=-1) + 1)) - set(settled):
        yield f"groups {sorted(missing)[:10]} were issued and never settled"
    if not run.groups["issued"] == len(settled) == sum(run.groups[name] for name in SETTLEMENTS):
        yield f"the summary counts {dict(run.groups)}, the log {len(settled)} groups"


def _young_enough(run: FinishedRun) -> Iterator[str]:
    for step, row in run.rows:
        if row.skipped is None and row.mask.any():
            age = step - 1 - int(row.version[row.mask].min())
            if age > run.config.staleness.max_lag:
                yield f"step {step}: rollout {row.group}-{row.number} is {age} versions old"


def _of_their_weights(run: FinishedRun) -> Iterator[str]:
    keys = {version: key_of_bits(policy.bits[min(policy.bits)]) for version, policy in run.policies.items()}
    for step, row in run.rows:
        for number, (first, last) in enumerate(row.branch_bounds):
            token_T, logp_T, version_T = (x[first:last] for x in (row.token_ids, row.logp, row.version))
            begin = 0 if number else len(row.prompt_token_ids)
            for version in set(version_T.tolist()):
                # The context of an agent's answers has no log-prob.
                key = keys.get(version, -1)
                expected_T = log_probs(token_T.tolist(), begin, key) if version >= 0 else np.zeros_like(logp_T)
                if not np.array_equal(expected_T[version_T == version], logp_T[version_T == version]):
                    yield f"step {step}: rollout {row.group}-{row.number}: log-probs not of version {version}"


def _same_digests(run: FinishedRun) -> Iterator[str]:
    loaded = 0
    for path, event in loaded_versions(run):
        loaded += 1
        policy = run.policies.get(event["version"])
        if policy is None or not policy.digest.startswith(event["digest"]):
            yield f"{path.name} served version {event['version']} with digest {event['digest']}"
    if not loaded:
        yield "no generator loaded anything"
    for path in (run.run_dir / "services").glob("learner-*.log"):
        if '"generators_differ"' in path.read_text(errors="replace"):
            yield f"{path.name}: engines had different weights under one digest"


def loaded_versions(run: FinishedRun) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Every load of weights in the logs of the generators, with `version` and the first characters of `digest`."""
    for path in (run.run_dir / "services").glob("generation-*.log"):
        for line in path.read_text(errors="replace").splitlines():
            if '"version_loaded"' in line:
                with suppress(json.JSONDecodeError):  # the disk was full in the middle of it
                    yield path, json.loads(line)


def _no_number(run: FinishedRun) -> Iterator[str]:
    for step, row in run.rows:
        if row.failure is not None and (row.reward is not None or row.skipped is None):
            yield f"step {step}: rollout {row.group}-{row.number} failed and counts"


def _complete(run: FinishedRun) -> Iterator[str]:
    steps = sorted(run.steps)
    if run.exit_code:
        yield f"`gspo run` ended with exit code {run.exit_code}"
    if steps != list(range(1, len(steps) + 1)):
        yield f"the steps in the log are not 1 to {len(steps)}"
    if (recorded := [line["step"] for line in run.lines("metrics.jsonl")]) != steps:
        yield f"{len(recorded)} steps have figures, {len(steps)} are in the log"
    yield from (f"{count} left in {name}" for name, count in run.in_redis.items() if name == "open" and count)
    settled = {line["group"] for line in run.lines("settled.jsonl")} | {row.group for _, row in run.rows}
    if run.in_partial:
        yield f"{len(run.in_partial)} left in partial, such as {', '.join(run.in_partial[:20])}"
    if lost := run.on_their_way - settled:
        yield f"groups {sorted(lost)[:10]} are still in a stream, and no service settled them"
    groups = run.config.num_slots * run.config.staleness.max_attempts
    rollouts = groups * run.config.algorithm.num_return_sequences_in_group
    for name, bound in {"prompts": groups, "rollouts": rollouts, "scored": rollouts}.items():
        if run.longest.get(name, 0) > bound:
            yield f"{name} had {run.longest[name]} entries, and the slots allow {bound}"


def _recorded_digests(run: FinishedRun) -> Iterator[str]:
    recorded: dict[int, set[str]] = {}
    for line in run.lines("policy.jsonl"):
        recorded.setdefault(line["version"], set()).add(line["digest"])
    for version, policy in run.policies.items():
        if recorded.get(version) != {policy.digest}:
            yield f"version {version} is recorded as {recorded.get(version)}, and the log makes {policy.digest}"


def _closed_ledger(run: FinishedRun) -> Iterator[str]:
    records = [LedgerRecord.model_validate(line) for line in run.lines(LEDGER)]
    if not records:
        yield "there is no token ledger"
        return
    for record in records:
        if record.difference:
            yield f"step {record.step}: {record.difference} of {record.tokens['generated']} tokens have no column"
    if in_flight := records[-1].tokens.get("in_flight", 0):
        yield f"{in_flight} tokens are in flight, and the run has ended"
    last = {record.account: record for record in records}
    in_ledger = sum(record.tokens.get("trained", 0) for record in last.values())
    in_steps = sum(int(row.mask.sum()) for _, row in run.rows if row.skipped is None)
    # Redis cannot count entries that a wipe took; the learner may have them in memory, and train them.
    if in_ledger > in_steps or (len(last) == 1 and in_ledger < in_steps):
        yield f"{in_ledger} tokens are trained by the ledger, {in_steps} by the step files, {len(last)} accounts"


SETTLED_ONCE = Invariant(
    "no rollout is in two steps, and every issued group is settled once, with a reason",
    ("rollouts", "groups"),
    _settled_once,
)
YOUNG_ENOUGH = Invariant("no counted token older than max_lag", ("rollouts",), _young_enough)
NO_NUMBER = Invariant("a failed score is never a number", ("failed scores",), _no_number)
COMPLETE = Invariant("the run ends, Redis is empty, no stream exceeds the slots", ("steps",), _complete)
CLOSED_LEDGER = Invariant("every generated token is in one column of the ledger", ("tokens",), _closed_ledger)
SIMULATED = (
    SETTLED_ONCE,
    YOUNG_ENOUGH,
    Invariant("each log-prob is that of the weights of its version", ("tokens",), _of_their_weights),
    Invariant("learner and generators agree on the digest of a version", ("versions",), _same_digests),
    NO_NUMBER,
    COMPLETE,
    Invariant("a replay of the log gives the recorded digests", ("versions",), _recorded_digests),
    CLOSED_LEDGER,
)
