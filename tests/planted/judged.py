"""Recorded figures of a planted run, judged by the rules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from gspo.common.config.schema import Config
from gspo.common.telemetry.advice import all_findings
from gspo.common.telemetry.findings import NUMBER, RecentSteps
from gspo.common.telemetry.learning_rules import LEARNING_RULES
from tests.planted.faults import FAULTS
from tests.support.repository.source_files import ROOT

# In place of the example's files, which do not matter here.
_FILES: dict[str, Any] = {
    "name": "planted",
    "model": {"path": "model"},
    "data": {"prompts": "prompts.jsonl"},
    "run": {"total_steps": 10},
}
_REWARD = {"functions": [{"path": "reward.py"}]}
_SECTIONS = ("algorithm", "staleness", "learner", "reward", "evaluation")
_MOST_STEPS = 10


def configured_run(name: str) -> Config:
    """The configuration of a planted run, without paths of files."""
    example = yaml.safe_load((ROOT / "examples/arithmetic/config.yaml").read_text())
    keys = {section: example.get(section, {}) | dict(FAULTS[name].sections.get(section, {})) for section in _SECTIONS}
    keys["reward"] |= _REWARD
    return Config.model_validate(_FILES | keys)


def steps_by_finding(name: str, run: Mapping[str, Any]) -> dict[str, list[int]]:
    """The findings of a recorded run, each with the steps that have it; 0 is the start."""
    recent = RecentSteps(kept=None)
    for step in run["steps"]:
        recent.add(int(step[NUMBER]), step)
    for record in run["evaluations"]:
        recent.add_evaluation(record["file"], record["version"], record["figures"])
    seen = {finding.rule: steps for finding, steps in all_findings(recent.judged(), configured_run(name))}
    return seen | {check["rule"]: [0] for check in run["checks"]}


def judge(name: str, run: Mapping[str, Any]) -> None:
    """A planted fault is named within ten steps; a healthy run has no finding on learning."""
    seen = steps_by_finding(name, run)
    if rules := FAULTS[name].rules:
        assert any(seen.get(rule, [_MOST_STEPS + 1])[0] <= _MOST_STEPS for rule in rules), seen
    else:
        assert not seen.keys() & {rule.name for rule in LEARNING_RULES}, seen
