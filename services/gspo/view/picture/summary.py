"""The content of summary.json, all from the log, and notes for readers of its numbers."""

import json
import math
from collections import Counter
from dataclasses import asdict
from typing import Any

from gspo.common.streams.entries import FAILED, STOPPED
from gspo.common.telemetry.advice import all_findings, verdict
from gspo.common.telemetry.clip_causes import clip_causes
from gspo.common.telemetry.findings import Finding, RecentSteps
from gspo.common.telemetry.gpu_use import mean_gpu_use
from gspo.runlog.left_out import left_out_line
from gspo.runlog.memory_shortages import shortage_line
from gspo.runlog.run_history import SETTLEMENTS, SKIPS, TRAINED, RunHistory
from gspo.runlog.run_log import SUMMARY_NAME, RunLog
from gspo.runlog.sentences.unscored import unscored_so_far

TIMES = ("wait_s", "shift_s", "train_s", "probe_s", "clip_split_s", "publish_s", "hold_s", "log_s")


def summarise(
    history: RunHistory, wall_s: dict[str, float] | None = None, finished: dict[str, Any] | None = None
) -> dict[str, Any]:
    """The content of summary.json.

    The log holds neither of the arguments: where one is None, that of an earlier summary stands, if no step was trained
    since.

    Args:
        wall_s: Wall-clock seconds of the last session by phase.
        finished: `end` (the word of a RunEnd) and `reason`; empty where the run has not come to an end.
    """
    earlier = _earlier(history)
    if wall_s is None:
        wall_s = earlier.get("wall_s")
    if finished is None:
        finished = {"end": earlier.get("end"), "reason": earlier.get("end_reason")}
    config, best, bound, causes = history.config, None, None, clip_causes(history.figures)
    if (choice := history.choice) is not None:  # the version in `best/`
        best = {**asdict(choice), "rivals": list(choice.rivals), "line": choice.line}
    if config is not None:
        bound = verdict(history.figures, config, config.generation.replicas)
    held_out, groups = _held_out(history), history.groups
    end = finished or {"end": None, "reason": None}
    rewards = [figures["reward_mean"] for figures in history.figures if "reward_mean" in figures]
    tokens = math.fsum(figures.get("tokens", 0.0) for figures in history.figures)
    time_s = math.fsum(figures.get("step_s", 0.0) for figures in history.figures)
    return {
        "run": config.name if config else history.run_dir.name,
        "gspo_version": history.environment.get("gspo"),
        "end": end["end"],
        "end_reason": end["reason"],
        "failed": None if end["end"] is None else end["end"] == FAILED,
        **_accuracies(history),
        "held_out": held_out,
        "best": best,
        "steps": history.step,
        "left_out": history.left_out,
        "policy_version": history.version,
        "digest": history.versions[-1].digest if history.versions else None,
        "reward_first": rewards[0] if rewards else None,
        "reward_last": rewards[-1] if rewards else None,
        "groups": {
            "issued": groups.issued,
            **{name: groups.counts[name] for name in SETTLEMENTS},
            "open": groups.open,
        },
        "rollouts": _rollouts(history),
        "tokens": int(tokens),
        "token_ledger": history.ledger
        and {**history.ledger.tokens, "evaluation": history.ledger.evaluation, "difference": history.ledger.difference},
        "tokens_per_s": tokens / time_s if time_s else None,
        "card_use": mean_gpu_use(history.figures),
        "outside_clip": causes and asdict(causes),
        "wall_s": wall_s,
        "bound": bound and {"stage": bound.stage, "because": bound.because, "change": list(bound.change)},
        "steps_s": {name: math.fsum(figures.get(name, 0.0) for figures in history.figures) for name in TIMES},
    }


def _earlier(history: RunHistory) -> dict[str, Any]:
    """The summary of an earlier report of the same policy; empty where there is none."""
    try:
        summary = json.loads((history.run_dir / SUMMARY_NAME).read_text())
    except (OSError, ValueError):
        return {}
    same = isinstance(summary, dict) and summary.get("policy_version") == history.version
    return dict(summary) if same else {}


def _held_out(history: RunHistory) -> dict[str, dict[str, Any]]:
    """All figures of the first and the last evaluation of every held-out file; a single evaluation is the first.

    A single file, which has no name in the configuration, has that of the file here.
    """
    by_file = {}
    for name, records in history.by_file.items():
        first, last = records[0], records[-1]
        figures = {
            "before": {"version": first.version, **first.figures},
            "after": {"version": last.version, **last.figures},
        }
        by_file[name or history.headline_name] = figures if len(records) > 1 else {**figures, "after": None}
    return by_file


def _accuracies(history: RunHistory) -> dict[str, Any]:
    """Means of the first and the last evaluation of the first held-out file; of a single one, it is the first."""
    records = history.headline
    means = {}
    for when, record in (("before", records[0] if records else None), ("after", records[-1] if records[1:] else None)):
        figures = record.figures if record else {}
        for name, figure in (
            (f"accuracy_{when}", "sampled_mean"),
            (f"accuracy_{when}_stderr", "sampled_stderr"),
            (f"greedy_{when}", "greedy_mean"),
            (f"greedy_{when}_stderr", "greedy_stderr"),
            (f"pass_at_k_{when}", f"pass_at_{record.largest_pass if record else 0}"),
        ):
            means[name] = figures.get(figure)
        means[f"accuracy_{when}_version"] = record.version if record else None
    return means | {"accuracy_file": history.headline_name if records else None}


def _rollouts(history: RunHistory) -> dict[str, int]:
    """Trained and skipped rollouts, from the step files, or from the figures of steps whose files were removed."""
    total: Counter[str] = Counter()
    for counts in history.rollouts.values():
        total.update(counts)
    for record in history.metrics:
        if record.step not in history.rollouts:
            total[TRAINED] += int(record.figures.get("sequences", 0))
            total.update({reason: int(record.figures.get(f"skipped_{reason}", 0)) for reason in SKIPS})
    return {TRAINED: total[TRAINED], **{f"skipped_{reason}": total[reason] for reason in SKIPS}}


def notes(history: RunHistory, summary: dict[str, Any]) -> list[str]:
    """Sentences that limit the meaning of the numbers; unreadable files included."""
    unscored = unscored_so_far(history.run_dir, history.metrics)
    return [
        *_accuracy_notes(history, summary),
        *_group_notes(history, summary),
        *([f"{unscored}."] if unscored else []),
        *([f"Tokens: {history.ledger.warning}."] if history.ledger and history.ledger.warning else []),
        *([f"Memory: {shortage}."] if (shortage := shortage_line(history.shortages)) else []),
        *(f"After step {start.step}: {text}." for start in history.data_files for text in start.changes),
        *_log_notes(history),
        *history.problems,
    ]


def end_in_words(summary: dict[str, Any]) -> tuple[str, str]:
    """(class, text): how the run ended."""
    reason = summary["end_reason"]
    if reason is None:
        return "open", "no end is recorded: the run is still running, or was killed"
    if summary["end"] == FAILED:
        return "failed", f"failed: {reason}"
    return ("open", reason) if summary["end"] == STOPPED else ("done", f"finished: {reason}")


def run_findings(history: RunHistory) -> list[tuple[Finding, list[int]]]:
    """The findings of the start, and of the steps: each as of its last step, with all steps that had it."""
    if history.config is None:
        return []
    recent = RecentSteps(history.config.evaluation.headline, kept=None)
    for step in history.metrics:
        recent.add(step.step, step.figures)
    for record in history.evaluations:
        recent.add_evaluation(record.file, record.version, record.figures)
    checks = [(check, [0]) for check in RunLog(history.run_dir).checks()]
    return checks + all_findings(recent.judged(), history.config)


def _accuracy_notes(history: RunHistory, summary: dict[str, Any]) -> list[str]:
    if not history.headline:
        return ["No held-out evaluation: the training reward is of other prompts at every step, and no measurement."]
    if len(history.headline) == 1:
        return [f"There is one evaluation, of version {summary['accuracy_before_version']}: no before and after."]
    sentences = []
    first, last = (record.figures for record in (history.headline[0], history.headline[-1]))
    if summary["accuracy_after_version"] != history.version:
        sentences.append(
            f"The last evaluation is of version {summary['accuracy_after_version']}; the newest policy is version "
            f"{history.version} and was not measured."
        )
    if first.get("num_prompts") != last.get("num_prompts"):
        sentences.append(
            f"The first evaluation asked {first.get('num_prompts', 0):g} prompts and the last "
            f"{last.get('num_prompts', 0):g}: they differ in more than the policy."
        )
    if failed := first.get("num_failed", 0) + last.get("num_failed", 0):
        sentences.append(f"{failed:g} answers of the first and last evaluation have no score and are in no mean.")
    if mixed := [record.version for record in history.evaluations if "newest_version" in record.figures]:
        shown = ", ".join(map(str, dict.fromkeys(mixed)))
        sentences.append(
            f"While version {shown} was measured newer weights came in: a part of the answers is of those."
        )
    return sentences


def _group_notes(history: RunHistory, summary: dict[str, Any]) -> list[str]:
    groups, sentences = summary["groups"], []
    if history.groups.twice:
        shown = ", ".join(map(str, history.groups.twice[:5]))
        sentences.append(
            f"{len(history.groups.twice)} groups ended more than once ({shown}): the log breaks its own rule, so the "
            "five counts do not add up to the groups issued."
        )
    if groups["open"]:
        sentences.append(
            f"{groups['open']} groups were issued and have not ended; a resume continues them. More may have been "
            "issued after them: only Redis knows of those."
        )
    return sentences


def _log_notes(history: RunHistory) -> list[str]:
    sentences = []
    if waiting := [step for step in history.step_files if step > history.step]:
        sentences.append(f"Step {waiting[-1]} is logged and not trained yet: `gspo run --resume` trains it first.")
    if line := left_out_line(history.left_out):
        sentences.append(f"Here {line}: its version has the weights of the one before.")
    if missing := history.step - len(history.metrics) - len(history.left_out):
        sentences.append(
            f"{missing} of {history.step} trained steps have no figures: a kill came between step and figures."
        )
    return sentences
