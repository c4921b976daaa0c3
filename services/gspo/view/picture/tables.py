"""Tables and samples for the page of a report: evaluations, rollouts dropped by length, and rollouts for people."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from gspo.runlog.run_history import RunHistory
from gspo.runlog.run_log import EvaluationRecord
from gspo.runlog.step_files import read_columns

# Columns of an evaluation beside its rewards: head -> figure and format.
_COUNTS = {
    "tokens": ("response_tokens_mean", "{:.1f}"),
    "cut off": ("truncated_share", "{:.1%}"),
    "turns": ("turns_mean", "{:.1f}"),
    "tool calls": ("tool_calls_mean", "{:.3f}"),
    "prompts": ("num_prompts", "{:,.0f}"),
    "without a score": ("num_failed", "{:,.0f}"),
}
# Samples of each kind, and characters of one text.
_EACH, _LONGEST_TEXT = 3, 4000
_CHOSEN_BY = ["group", "reward"]
_SHOWN = (
    *("group", "number", "prompt", "text", "outcome", "reward", "failure"),
    *("parts_json", "advantage", "skipped", "version", "mask", "turns_json", "branch_starts"),
)


def evaluation_table(records: list[EvaluationRecord], best: int | None) -> dict[str, Any]:
    """The evaluations of one held-out file: `columns` that any of them has, and `rows` of (version, best, cells)."""
    names = dict.fromkeys(name for record in records for name in record.figures)
    ks = sorted(int(name.removeprefix("pass_at_")) for name in names if name.removeprefix("pass_at_").isdecimal())
    rewards = {"sampled": "sampled_mean", "greedy": "greedy_mean"} | {f"pass@{k}": f"pass_at_{k}" for k in ks if k > 1}
    rewards |= {name[5:-5]: name for name in names if name.startswith("part_") and name.endswith("_mean")}
    columns = {head: (name, "{:.3f}") for head, name in rewards.items()} | _COUNTS
    shown = {head: column for head, column in columns.items() if column[0] in names}
    rows = [
        (
            record.version,
            record.score is not None and record.version == best,
            [_cell(record.figures, *column) for column in shown.values()],
        )
        for record in records
    ]
    return {"columns": list(shown), "rows": rows}


def _cell(figures: dict[str, float], name: str, form: str) -> str:
    """The figure with its standard error, where it has one."""
    if name not in figures:
        return ""
    error = figures.get(f"{name.removesuffix('_mean')}_stderr")
    return form.format(figures[name]) + ("" if error is None else f" ± {error:.3f}")


def stale_by_length(history: RunHistory) -> list[dict[str, int]]:
    """A row for each doubling of the length that any rollout has; empty where none was dropped as too old.

    A row counts the rollouts whose answer has `first` to `last` tokens: `trained`, and `dropped`. Long answers take
    longest and grow too old first; a policy that never learns from them learns to be short.
    """
    dropped = Counter(map(_doubling, history.groups.dropped_lengths))
    trained: Counter[int] = Counter()
    for path in history.step_files.values() if dropped else ():
        trained.update(map(_doubling, _trained_lengths(path)))
    return [
        {"first": 1 << power, "last": (2 << power) - 1, "trained": trained[power], "dropped": dropped[power]}
        for power in sorted(trained.keys() | dropped.keys())
    ]


def _trained_lengths(path: Path) -> list[int]:
    """Sampled tokens of the trained rollouts of a step; none where the file cannot be read."""
    try:
        rows = read_columns(path, ["version", "skipped"]).to_pylist()
    except (OSError, ValueError):
        return []
    return [int((np.array(row["version"]) >= 0).sum()) for row in rows if row["skipped"] is None]


def _doubling(length: int) -> int:
    return max(0, length.bit_length() - 1)


def read_samples(history: RunHistory) -> dict[int, list[dict[str, Any]]]:
    """Some rollouts of the first and the last logged step: the best, the worst, and some without a score.

    Unreadable files, which RunHistory reports, are left out.

    Returns:
        The samples by step: each is its row of the step file with shortened texts. `kind` says why it was chosen,
        `versions` which versions sampled its counted tokens. `parts` has the values of several reward functions.
    """
    samples = {}
    for step in sorted({*list(history.step_files)[:1], *list(history.step_files)[-1:]}):
        path = history.step_files[step]
        try:
            chosen = _choose(read_columns(path, _CHOSEN_BY).to_pylist())
            rows = read_columns(path, _SHOWN).take(list(chosen)).to_pylist()
        except (OSError, ValueError):
            continue
        samples[step] = [_sample(kind, row) for kind, row in zip(chosen.values(), rows, strict=True)]
    return samples


def _choose(rows: list[dict[str, Any]]) -> dict[int, str]:
    """Row of the step -> reason for its choice: the highest and lowest rewards, from different groups if possible."""
    scored = [place for place, row in enumerate(rows) if row["reward"] is not None]
    falling = sorted(scored, key=lambda place: -rows[place]["reward"])
    rewards = [rows[place]["reward"] for place in falling]
    if len(set(rewards)) == 1:
        kinds = {"every reward is this": falling}
    else:
        middle = (rewards[0] + rewards[-1]) / 2 if rewards else 0.0
        kinds = {
            "among the highest": [place for place in falling if rows[place]["reward"] > middle],
            "among the lowest": [place for place in reversed(falling) if rows[place]["reward"] <= middle],
        }
    kinds["without a score"] = [place for place, row in enumerate(rows) if row["reward"] is None]
    return {place: kind for kind, places in kinds.items() for place in _of_other_groups(places, rows)}


def _of_other_groups(places: list[int], rows: list[dict[str, Any]]) -> list[int]:
    """Up to _EACH of `places` in their order; a second one of a group only if there are too few groups."""
    first_of: dict[int, int] = {}
    for place in places:
        first_of.setdefault(rows[place]["group"], place)
    return list(dict.fromkeys([*first_of.values(), *places]))[:_EACH]


def _sample(kind: str, row: dict[str, Any]) -> dict[str, Any]:
    counted = [version for version, counts in zip(row.pop("version"), row.pop("mask"), strict=True) if counts]
    versions = sorted(set(counted))
    parts = json.loads(row.pop("parts_json") or "[]")
    turns = json.loads(row.pop("turns_json") or "[]")
    conversation = "\n".join(f"{turn['role']}: {turn['content']}" for turn in turns)
    return row | {
        "kind": kind,
        "prompt": _short(row["prompt"]),
        "text": _short(conversation or row["text"]),
        "versions": f"{versions[0]} to {versions[-1]}" if len(versions) > 1 else "".join(map(str, versions)),
        "num_tokens": len(counted),
        "num_branches": 1 + len(row.pop("branch_starts")),
        "parts": ", ".join(f"{part['name']} {part['value']} x {part['weight']:g}" for part in parts if len(parts) > 1),
    }


def _short(text: str) -> str:
    """The beginning and the end of a long text: the end of an answer often decides its score."""
    if len(text) <= _LONGEST_TEXT:
        return text
    half = _LONGEST_TEXT // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half:,} characters left out ...]\n{text[-half:]}"
