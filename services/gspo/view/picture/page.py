"""Writes the report of a run: summary.json, plots/*.png and report.html, from its run directory alone.

A report can be written again at any time, for a run in any state. The page needs no other files; its text is in
templates/report.html. Rollouts are untrusted text of a model, so everything is escaped, and the page may neither run
scripts nor load files.
"""

from __future__ import annotations

import json
import shlex
from base64 import b64encode
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from gspo.common.config.schema import Config
from gspo.common.host.durable_write import replace_file
from gspo.common.telemetry.clip_causes import clip_causes_line, mismatch_line
from gspo.common.telemetry.step_time import duration, shares
from gspo.runlog.run_history import SETTLEMENTS, RunHistory
from gspo.runlog.run_log import PAGE_NAME, SUMMARY_NAME
from gspo.view.picture.plots import Plot, write_plots
from gspo.view.picture.summary import advised, difference, end_in_words, notes, summarise
from gspo.view.picture.tables import evaluation_table, read_samples, stale_by_length

PLOTS_NAME = "plots"
_TEMPLATES = Path(__file__).parents[1] / "templates"
_REASONS_SHOWN = 3
_MEANINGS = {
    "trained": "in a step file",
    "filtered": "left out by the learner before training",
    "stale": "too old to be trained",
    "failed": "no rollout of it has a score",
    "unused": "open when the run ended",
}


def write_report(
    run_dir: Path, *, wall_s: dict[str, float] | None = None, finished: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Write the report and return the summary.

    Args:
        wall_s: Wall-clock seconds of this session by phase.
        finished: `end` and `reason` of the run's end; empty where it came to none. The log holds neither of the
            two: where None is given, those of an earlier report stand, if no step was trained since.
    """
    history = RunHistory(run_dir)
    earlier = earlier_summary(run_dir / SUMMARY_NAME, history)
    if wall_s is None:
        wall_s = earlier.get("wall_s")
    if finished is None and earlier.get("end") is not None:
        finished = {"end": earlier["end"], "reason": earlier.get("end_reason")}
    summary = summarise(history, wall_s, finished)
    replace_file(run_dir / SUMMARY_NAME, (json.dumps(summary, indent=2, allow_nan=False) + "\n").encode())
    plots = write_plots(history, run_dir / PLOTS_NAME)
    replace_file(run_dir / PAGE_NAME, render(history, summary, plots).encode(errors="replace"))
    return summary


def earlier_summary(path: Path, history: RunHistory) -> dict[str, Any]:
    """The summary of an earlier report of the same policy; empty where there is none."""
    try:
        summary = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    same = isinstance(summary, dict) and summary.get("policy_version") == history.version
    return dict(summary) if same else {}


def render(history: RunHistory, summary: dict[str, Any], plots: list[Plot]) -> str:
    """The page; the files of the plots are there."""
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        duration=lambda seconds: f"{seconds:.1f} s" if seconds < 10 else duration(seconds),
        number=lambda value: "none" if value is None else f"{value:.3f}",
    )
    config, run_dir, phases = history.config, history.run_dir.resolve(), summary["wall_s"] or {}
    best = history.best[0] if history.best else None
    return environment.get_template("report.html").render(
        summary=summary,
        status=end_in_words(summary),
        change=difference(summary, "accuracy"),
        notes=notes(history, summary),
        advice=advised(history),
        plots=[(plot, b64encode((run_dir / PLOTS_NAME / f"{plot.name}.png").read_bytes()).decode()) for plot in plots],
        measured={"clip_causes": _clip_sentences(history)},
        ran=_what_ran(config) if config else {},
        algorithm=_algorithm(config) if config else {},
        phases=[(name.replace("_", " "), s, s / sum(phases.values())) for name, s in phases.items() if s > 0],
        times=[(share.in_words, share.seconds, share.share) for share in shares(*history.figures)],
        endings=[(name, _MEANINGS[name], summary["groups"][name], _reasons(history, name)) for name in SETTLEMENTS],
        lost=stale_by_length(history),
        ledger=history.ledger,
        samples=read_samples(history),
        environment=history.environment,
        run_dir=run_dir,
        quoted=shlex.quote(str(run_dir)),
        held_out={file: evaluation_table(records, best) for file, records in history.by_file.items()},
        exported=(run_dir / "export" / "config.json").is_file(),
        kept_best=(run_dir / "best" / "config.json").is_file(),
        evaluation=" ".join(shlex.quote(str(path)) for path in config.evaluation.files.values())
        if config and history.evaluations
        else "PROMPTS.jsonl",
    )


def _clip_sentences(history: RunHistory) -> str:
    """The measured causes of the clip, for the caption of their plot."""
    if history.config is None:
        return ""
    lines = (clip_causes_line(history.figures, history.config), mismatch_line(history.figures, history.config))
    return " ".join(f"{line}." for line in lines if line)


def _what_ran(config: Config) -> dict[str, Any]:
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


def _algorithm(config: Config) -> dict[str, Any]:
    """Every key of the sections algorithm, sampling and staleness; none of them can hold a secret."""
    sections = {"algorithm": config.algorithm, "sampling": config.sampling, "staleness": config.staleness}
    return {
        f"{section}.{key}": "null" if value is None else str(value).lower() if isinstance(value, bool) else value
        for section, keys in sections.items()
        for key, value in keys.model_dump(mode="json").items()
    }


def _reasons(history: RunHistory, settlement: str) -> str:
    reasons = history.groups.reasons[settlement]
    shown = [f"{reason} ({count})" for reason, count in reasons.most_common(_REASONS_SHOWN)]
    more = len(reasons) - len(shown)
    return "; ".join([*shown, f"and {more} other reason(s)"] if more > 0 else shown)
