"""Some rollouts of the first and the last step, for people: the best, the worst, and some without a score."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gspo.cli.report.history import RunHistory
from gspo.runlog.step_files import read_columns

_EACH = 3
_LONGEST_TEXT = 4000
_SHOWN = (
    "group",
    "number",
    "prompt",
    "text",
    "outcome",
    "reward",
    "failure",
    "parts_json",
    "advantage",
    "skipped",
    "version",
    "mask",
    "turns_json",
)


@dataclass(frozen=True)
class Sample:
    """One rollout for people.

    Attributes:
        versions: Policy versions that sampled its counted tokens, as text.
        parts: The values of the reward functions, where there are several.
    """

    kind: str
    group: int
    number: int
    prompt: str
    text: str
    outcome: str
    reward: float | None
    failure: str | None
    parts: str
    advantage: float | None
    skipped: str | None
    versions: str
    num_tokens: int


@dataclass(frozen=True)
class StepSamples:
    """The samples of one step."""

    step: int
    samples: tuple[Sample, ...]


def read_samples(log: RunHistory) -> list[StepSamples]:
    """Samples of the first and the last logged step, without unreadable files, which read_history reports."""
    samples = []
    for step in sorted({*list(log.step_files)[:1], *list(log.step_files)[-1:]}):
        try:
            samples.append(StepSamples(step, _read_step(log.step_files[step])))
        except (OSError, ValueError):
            continue
    return samples


def _read_step(path: Path) -> tuple[Sample, ...]:
    chosen = _choose(read_columns(path, ["group", "reward"]).to_pylist())
    rows = read_columns(path, _SHOWN).take(list(chosen)).to_pylist()
    return tuple(_sample(kind, row) for kind, row in zip(chosen.values(), rows, strict=True))


def _choose(rows: list[dict[str, Any]]) -> dict[int, str]:
    """Row of the step -> reason for its choice: the highest and lowest rewards, from different groups if possible."""
    scored = [place for place, row in enumerate(rows) if row["reward"] is not None]
    falling = sorted(scored, key=lambda place: -rows[place]["reward"])
    if scored and rows[falling[0]]["reward"] == rows[falling[-1]]["reward"]:
        chosen = dict.fromkeys(_of_other_groups(falling, rows), "every reward is this")
    else:
        middle = (rows[falling[0]]["reward"] + rows[falling[-1]]["reward"]) / 2 if scored else 0.0
        highest = [place for place in falling if rows[place]["reward"] > middle]
        lowest = [place for place in reversed(falling) if rows[place]["reward"] <= middle]
        chosen = dict.fromkeys(_of_other_groups(highest, rows), "among the highest")
        chosen |= dict.fromkeys(_of_other_groups(lowest, rows), "among the lowest")
    failed = [place for place, row in enumerate(rows) if row["reward"] is None]
    return chosen | dict.fromkeys(_of_other_groups(failed, rows), "without a score")


def _of_other_groups(places: list[int], rows: list[dict[str, Any]]) -> list[int]:
    """Up to _EACH of `places` in their order; a second one of a group only if there are too few groups."""
    first_of: dict[int, int] = {}
    for place in places:
        first_of.setdefault(rows[place]["group"], place)
    return list(dict.fromkeys([*first_of.values(), *places]))[:_EACH]


def _sample(kind: str, row: dict[str, Any]) -> Sample:
    counted = [version for version, counts in zip(row.pop("version"), row.pop("mask"), strict=True) if counts]
    versions = sorted(set(counted))
    parts = json.loads(row.pop("parts_json") or "[]")
    text = _conversation(json.loads(row.pop("turns_json") or "[]")) or row["text"]
    return Sample(
        kind=kind,
        **{**row, "prompt": _short(row["prompt"]), "text": _short(text)},
        versions=f"{versions[0]} to {versions[-1]}" if len(versions) > 1 else "".join(map(str, versions)),
        num_tokens=len(counted),
        parts=", ".join(f"{part['name']} {part['value']} x {part['weight']:g}" for part in parts if len(parts) > 1),
    )


def _conversation(turns: list[dict[str, Any]]) -> str:
    return "\n".join(f"{turn['role']}: {turn['content']}" for turn in turns)


def _short(text: str) -> str:
    """The beginning and the end of a long text: the end of an answer often decides its score."""
    if len(text) <= _LONGEST_TEXT:
        return text
    half = _LONGEST_TEXT // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half:,} characters left out ...]\n{text[-half:]}"
