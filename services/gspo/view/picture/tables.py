"""Tables of a run's page: evaluations, groups, rollouts dropped by length, the configuration, and rollouts to read."""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gspo.common.config.schema import Config
from gspo.runlog.run_history import SETTLEMENTS, RunHistory
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
_MEANINGS = {
    "trained": "in a step file",
    "filtered": "left out by the learner before training",
    "stale": "too old to be trained",
    "failed": "no rollout of it has a score",
    "unused": "open when the run ended",
}
_REASONS_SHOWN = 3
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
    return [sum(version >= 0 for version in row["version"]) for row in rows if row["skipped"] is None]


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


def endings(history: RunHistory) -> list[tuple[str, str, int, str]]:
    """Each settlement with its meaning, its groups, and their reasons."""
    counts = history.groups.counts
    return [(name, _MEANINGS[name], counts[name], _reasons(history, name)) for name in SETTLEMENTS]


def _reasons(history: RunHistory, settlement: str) -> str:
    reasons = history.groups.reasons[settlement]
    shown = [f"{reason} ({count})" for reason, count in reasons.most_common(_REASONS_SHOWN)]
    more = len(reasons) - len(shown)
    return "; ".join([*shown, f"and {more} other reason(s)"] if more > 0 else shown)


def config_keys(config: Config | None) -> dict[str, str]:
    """Every key of a configuration with its value as JSON; empty if it could not be read."""
    return dict(_flat("", config.model_dump(mode="json"))) if config else {}


def _flat(prefix: str, value: Any) -> Iterator[tuple[str, str]]:
    """(key, value) of nested sections; a list is one value."""
    if isinstance(value, dict) and value:
        for name, item in value.items():
            yield from _flat(f"{prefix}.{name}" if prefix else name, item)
    else:
        yield prefix, json.dumps(value, ensure_ascii=False)


def what_ran(config: Config) -> dict[str, Any]:
    """The main facts of a configuration, in words."""
    algorithm, staleness, learner = config.algorithm, config.staleness, config.learner
    low, high = algorithm.clip
    bounds = f"clip {low:g} below and {high:g} above 1"
    if algorithm.pg_clip_reference_length is not None:
        bounds += f", for {algorithm.pg_clip_reference_length} tokens"
    if algorithm.bounds_divergence:
        bounds = f"divergence {low:g} down and {high:g} up"
    ratio, loss = f"{algorithm.importance_sampling}, {bounds}, ", str(algorithm.objective)
    if algorithm.has_own_loss:
        ratio, loss = "", f"{algorithm.loss.entry} of {algorithm.loss.path}"
    held_out = config.evaluation.files.items()
    lora = learner.lora
    adapters = f"adapters (LoRA) of rank {lora.rank}, alpha {lora.alpha:g}, at {', '.join(lora.target_modules)}"
    spread = (f", {learner.ranks} ranks" if learner.ranks > 1 else "") + (
        f", ZeRO {learner.zero_stage}" if learner.zero_stage else ""
    )
    code = {key: part for source in config.sources for key, part in source.code()}
    rewards = "; ".join(f"{part.label} ({part.path}), weight {part.weight:g}" for part in code.values())
    return {
        "model": config.model.path,
        "prompts": ", ".join(
            f"{source.name}: {_named(source.prompts)}, weight {source.weight:g}"
            if source.name
            else _named(source.prompts)
            for source in config.sources
        ),
        "held-out prompts": ", ".join(f"{name}: {path}" if name else str(path) for name, path in held_out) or "none",
        "reward": rewards,
        "preset": algorithm.preset,
        "ratio": f"{ratio}old_logprobs {algorithm.old_logprobs}",
        "advantage": f"{algorithm.adv_estimator}, reward_norm {algorithm.reward_norm or 'null'}",
        "loss": f"{loss}, {algorithm.loss_agg_mode}",
        "length": ", ".join(
            f"{key} {value:g}"
            for key in ("total_steps", "total_epochs", "total_hours")
            if (value := getattr(config.run, key)) is not None
        ),
        "a step": f"{algorithm.rollout_batch_size} prompts x {algorithm.num_return_sequences_in_group} rollouts, "
        f"{algorithm.num_mini_batches} mini-batches, ppo_epochs {algorithm.ppo_epochs}",
        "tokens": f"prompt {algorithm.prompt_length} tokens, answer {algorithm.response_length} tokens at most",
        "staleness": f"max_lag {staleness.max_lag}, on_stale {staleness.on_stale}",
        "learner": f"learning rate {learner.learning_rate:g} ({learner.schedule}), {learner.dtype}{spread}",
        "trained": adapters if lora.rank else "all weights",
        "generation": f"{config.generation.replicas} engine(s), {config.generation.dtype}, "
        f"temperature {config.sampling.temperature:g}",
        "seed": config.seed,
    }


def _named(files: tuple[Path, ...]) -> str:
    return " + ".join(map(str, files))
