"""The content of summary.json, all from the log, and notes for readers of its numbers."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

from gspo.cli.monitor.text import largest_pass
from gspo.cli.monitor.unscored import unscored_so_far
from gspo.cli.report.history import SETTLEMENTS, SKIPS, TRAINED, RunHistory
from gspo.cli.rundir.plan import FAILED
from gspo.common.telemetry.bottleneck import verdict
from gspo.runlog.run_log import EvaluationRecord

TIMES = ("wait_s", "train_s", "publish_s", "hold_s", "log_s")


def summarise(log: RunHistory, wall_s: dict[str, float] | None, finished: dict[str, Any] | None) -> dict[str, Any]:
    """The content of summary.json.

    Args:
        wall_s: Wall-clock seconds of the last session by phase; None if unknown.
        finished: `end` (the word of a RunEnd) and `reason`; empty or None where the run has not come to an end.
    """
    end = finished or {"end": None, "reason": None}
    rewards = [figures["reward_mean"] for figures in log.figures if "reward_mean" in figures]
    tokens = math.fsum(figures.get("tokens", 0.0) for figures in log.figures)
    time_s = math.fsum(figures.get("step_s", 0.0) for figures in log.figures)
    return {
        "run": log.name,
        "gspo_version": log.environment.get("gspo"),
        "end": end["end"],
        "end_reason": end["reason"],
        "failed": None if end["end"] is None else end["end"] == FAILED,
        **_accuracies(log),
        "held_out": _held_out(log),
        "best": _best(log),
        "steps": log.step,
        "policy_version": log.version,
        "digest": log.versions[-1].digest if log.versions else None,
        "reward_first": rewards[0] if rewards else None,
        "reward_last": rewards[-1] if rewards else None,
        "groups": _groups(log),
        "rollouts": _rollouts(log),
        "tokens": int(tokens),
        "tokens_per_s": tokens / time_s if time_s else None,
        "wall_s": wall_s,
        "bound": _bound(log),
        "steps_s": {name: math.fsum(figures.get(name, 0.0) for figures in log.figures) for name in TIMES},
    }


def _bound(log: RunHistory) -> dict[str, Any] | None:
    """The stage that bounded the last steps, the numbers behind that, and advice; None without a configuration."""
    if log.config is None:
        return None
    bound = verdict(log.figures, log.config, log.config.generation.replicas)
    return None if bound is None else {"stage": bound.stage, "because": bound.because, "change": list(bound.change)}


def _accuracies(log: RunHistory) -> dict[str, Any]:
    """Means of the first and the last evaluation of the first held-out file; a single evaluation is the first."""
    first, last = first_and_last(log.headline)
    means: dict[str, Any] = {}
    for when, record in (("before", first), ("after", last)):
        figures = record.figures if record else {}
        for name, figure in (
            (f"accuracy_{when}", "sampled_mean"),
            (f"accuracy_{when}_stderr", "sampled_stderr"),
            (f"greedy_{when}", "greedy_mean"),
            (f"greedy_{when}_stderr", "greedy_stderr"),
            (f"pass_at_k_{when}", f"pass_at_{largest_pass(figures)}"),
        ):
            means[name] = figures.get(figure)
        means[f"accuracy_{when}_version"] = record.version if record else None
    return means


def first_and_last(records: list[EvaluationRecord]) -> tuple[EvaluationRecord | None, EvaluationRecord | None]:
    """The first and the last evaluation of a held-out file; a single evaluation is the first."""
    return (records[0] if records else None), (records[-1] if len(records) > 1 else None)


def _held_out(log: RunHistory) -> dict[str, Any]:
    """All figures of the first and the last evaluation of every held-out file."""
    by_file: dict[str, Any] = {}
    for name, records in log.by_file.items():
        first, last = first_and_last(records)
        by_file[name] = {
            when: {"version": record.version, **record.figures} if record else None
            for when, record in (("before", first), ("after", last))
        }
    return by_file


def _best(log: RunHistory) -> dict[str, Any] | None:
    """The version in `best/`, with the compared figure; None if none is kept."""
    if log.best is None:
        return None
    figure = log.config.evaluation.keep_best if log.config else None
    return {"version": log.best[0], "figure": figure, "score": log.best[1]}


def _groups(log: RunHistory) -> dict[str, int]:
    counts = {name: log.groups.counts[name] for name in SETTLEMENTS}
    return {"issued": log.groups.issued, **counts, "open": log.groups.open}


def _rollouts(log: RunHistory) -> dict[str, int]:
    """Trained and skipped rollouts, from the step files, or from the figures of steps whose files were removed."""
    total: Counter[str] = Counter()
    for counts in log.rollouts.values():
        total.update(counts)
    for record in log.metrics:
        if record.step not in log.rollouts:
            total[TRAINED] += int(record.figures.get("sequences", 0))
            total.update({reason: int(record.figures.get(f"skipped_{reason}", 0)) for reason in SKIPS})
    return {TRAINED: total[TRAINED], **{f"skipped_{reason}": total[reason] for reason in SKIPS}}


def notes(log: RunHistory, summary: dict[str, Any]) -> list[str]:
    """Sentences that limit the meaning of the numbers; unreadable files included."""
    unscored = unscored_so_far(log.run_dir, log.metrics)
    unscored_notes = [f"{unscored}."] if unscored else []
    sentences = [*_accuracy_notes(log, summary), *_group_notes(log, summary), *unscored_notes, *_log_notes(log)]
    return [*sentences, *log.problems]


def _accuracy_notes(log: RunHistory, summary: dict[str, Any]) -> list[str]:
    if not log.headline:
        return ["No held-out evaluation: the training reward is of other prompts at every step, and no measurement."]
    if len(log.headline) == 1:
        return [f"There is one evaluation, of version {summary['accuracy_before_version']}: no before and after."]
    sentences = []
    first, last = (record.figures for record in (log.headline[0], log.headline[-1]))
    if summary["accuracy_after_version"] != log.version:
        sentences.append(
            f"The last evaluation is of version {summary['accuracy_after_version']}; the newest policy is version "
            f"{log.version} and was not measured."
        )
    if first.get("num_prompts") != last.get("num_prompts"):
        sentences.append(
            f"The first evaluation asked {first.get('num_prompts', 0):g} prompts and the last "
            f"{last.get('num_prompts', 0):g}: they differ in more than the policy."
        )
    if failed := first.get("num_failed", 0) + last.get("num_failed", 0):
        sentences.append(f"{failed:g} answers of the first and last evaluation have no score and are in no mean.")
    if mixed := [record.version for record in log.evaluations if "newest_version" in record.figures]:
        shown = ", ".join(map(str, dict.fromkeys(mixed)))
        sentences.append(
            f"While version {shown} was measured newer weights came in: a part of the answers is of those."
        )
    change = difference(summary, "accuracy")
    if change is not None and change[1] is not None and abs(change[0]) < 2 * change[1]:
        sentences.append("The change of the held-out reward is less than two standard errors: it may be chance.")
    return sentences


def difference(summary: dict[str, Any], name: str) -> tuple[float, float | None] | None:
    """After minus before, and its standard error.

    The standard error is that of independent prompts, an upper bound for the same prompts.
    """
    before, after = summary[f"{name}_before"], summary[f"{name}_after"]
    if before is None or after is None:
        return None
    errors = [summary[f"{name}_{when}_stderr"] for when in ("before", "after")]
    return after - before, math.hypot(*errors) if None not in errors else None


def _group_notes(log: RunHistory, summary: dict[str, Any]) -> list[str]:
    groups, sentences = summary["groups"], []
    if log.groups.twice:
        shown = ", ".join(map(str, log.groups.twice[:5]))
        sentences.append(
            f"{len(log.groups.twice)} groups ended more than once ({shown}): the log breaks its own rule, so the five "
            "counts do not add up to the groups issued."
        )
    if groups["open"]:
        sentences.append(
            f"{groups['open']} groups were issued and have not ended; a resume continues them. More may have been "
            "issued after them: only Redis knows of those."
        )
    return sentences


def _log_notes(log: RunHistory) -> list[str]:
    sentences = []
    if waiting := [step for step in log.step_files if step > log.step]:
        sentences.append(f"Step {waiting[-1]} is logged and not trained yet: `gspo run --resume` trains it first.")
    if missing := log.step - len(log.metrics):
        sentences.append(
            f"{missing} of {log.step} trained steps have no figures: a kill came between step and figures."
        )
    return sentences
