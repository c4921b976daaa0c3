"""report.html: the run on one page without other files; templates/report.html has its text.

Rollouts are untrusted text of a model, so everything is escaped, and the page may neither run scripts nor load files.
"""

from __future__ import annotations

import base64
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from gspo.cli.monitor.text import duration
from gspo.cli.report.history import SETTLEMENTS, RunHistory
from gspo.cli.report.page_tables import evaluation_tables, stale_by_length
from gspo.cli.report.plots import Plot
from gspo.cli.report.samples import read_samples
from gspo.cli.report.summary import difference, notes
from gspo.cli.rundir.plan import FAILED, STOPPED
from gspo.common.config.learner import LearnerConfig, LoraConfig
from gspo.common.config.schema import Config
from gspo.common.telemetry.advice import NEVER_CLIPPED_STEPS, advice
from gspo.common.telemetry.step_time import shares

_TEMPLATES = Path(__file__).parent / "templates"
_REASONS_SHOWN = 3
_MEANINGS = {
    "trained": "in a step file",
    "filtered": "left out by the learner before training",
    "stale": "too old to be trained",
    "failed": "no rollout of it has a score",
    "unused": "open when the run ended",
}


@dataclass(frozen=True)
class Advice:
    """A sentence of advice, and the steps whose figures caused it."""

    text: str
    first: int
    last: int
    num_steps: int


def render(log: RunHistory, summary: dict[str, Any], plots: list[Plot], folder: Path) -> str:
    """The page; `folder` holds the plots' files."""
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(duration=_duration, number=_number)
    return environment.get_template("report.html").render(
        summary=summary,
        status=_status(summary),
        change=difference(summary, "accuracy"),
        notes=notes(log, summary),
        advice=_advice(log),
        plots=[(plot, _data_uri(folder / f"{plot.name}.png")) for plot in plots],
        ran=_what_ran(log.config) if log.config else {},
        algorithm=_algorithm(log.config) if log.config else {},
        phases=_shares(summary["wall_s"] or {}),
        times=[(share.in_words, share.seconds, share.share) for share in shares(*log.figures)],
        endings=[(name, _MEANINGS[name], summary["groups"][name], _reasons(log, name)) for name in SETTLEMENTS],
        lost=stale_by_length(log),
        samples=read_samples(log),
        environment=log.environment,
        run_dir=log.run_dir.resolve(),
        quoted=shlex.quote(str(log.run_dir.resolve())),
        held_out=evaluation_tables(log),
        exported=(log.run_dir / "export" / "config.json").is_file(),
        kept_best=(log.run_dir / "best" / "config.json").is_file(),
        evaluation=" ".join(shlex.quote(str(path)) for path in log.config.evaluation.files.values())
        if log.config and log.evaluations
        else "PROMPTS.jsonl",
    )


def _status(summary: dict[str, Any]) -> tuple[str, str]:
    """(class, text): how the run ended."""
    reason = summary["end_reason"]
    if reason is None:
        return "open", "no end is recorded: the run is still running, or was killed"
    if summary["end"] == FAILED:
        return "failed", f"failed: {reason}"
    return ("open", reason) if summary["end"] == STOPPED else ("done", f"finished: {reason}")


def _advice(log: RunHistory) -> list[Advice]:
    """The advice of the run, each sentence in its newest form."""
    if log.config is None:
        return []
    by_name: dict[str, Advice] = {}
    for place, step in enumerate(int(step) for step in log.steps):
        recent = log.figures[max(0, place + 1 - NEVER_CLIPPED_STEPS) : place + 1]
        for name, text in advice(recent, log.config).items():
            before = by_name.get(name, Advice(text, step, step, 0))
            by_name[name] = Advice(text, before.first, step, before.num_steps + 1)
    return list(by_name.values())


def _what_ran(config: Config) -> dict[str, Any]:
    algorithm, staleness, learner = config.algorithm, config.staleness, config.learner
    low, high = algorithm.clip
    held_out = config.evaluation.files.items()
    rewards = "; ".join(f"{f.label} ({f.path}), weight {f.weight:g}" for f in config.reward.functions)
    return {
        "model": config.model.path,
        "prompts": config.data.prompts,
        "held-out prompts": ", ".join(f"{name}: {path}" if name else str(path) for name, path in held_out) or "none",
        "reward": rewards,
        "preset": algorithm.preset,
        "ratio": f"{algorithm.importance_sampling}, clip {low:g} below and {high:g} above 1, "
        f"old_logprobs {algorithm.old_logprobs}",
        "advantage": f"{algorithm.adv_estimator}, reward_norm {algorithm.reward_norm or 'null'}",
        "loss": algorithm.loss_agg_mode,
        "length": ", ".join(
            f"{key} {value:g}"
            for key in ("total_steps", "total_epochs", "total_hours")
            if (value := getattr(config.run, key)) is not None
        ),
        "a step": f"{algorithm.rollout_batch_size} prompts x {algorithm.num_return_sequences_in_group} rollouts, "
        f"{algorithm.num_mini_batches} mini-batches, ppo_epochs {algorithm.ppo_epochs}",
        "tokens": f"prompt {algorithm.prompt_length} tokens, answer {algorithm.response_length} tokens at most",
        "staleness": f"max_lag {staleness.max_lag}, on_stale {staleness.on_stale}",
        "learner": f"learning rate {learner.learning_rate:g} ({learner.schedule}), {learner.dtype}{_spread(learner)}",
        "trained": _trained(learner.lora),
        "generation": f"{config.generation.replicas} engine(s), {config.generation.dtype}, "
        f"temperature {config.sampling.temperature:g}",
        "seed": config.seed,
    }


def _spread(learner: LearnerConfig) -> str:
    shared = f", {learner.ranks} ranks" if learner.ranks > 1 else ""
    return f"{shared}, ZeRO {learner.zero_stage}" if learner.zero_stage else shared


def _trained(lora: LoraConfig) -> str:
    if not lora.rank:
        return "all weights"
    return f"adapters (LoRA) of rank {lora.rank}, alpha {lora.alpha:g}, at {', '.join(lora.target_modules)}"


def _algorithm(config: Config) -> dict[str, Any]:
    """Every key of the sections algorithm, sampling and staleness; none of them can hold a secret."""
    sections = {"algorithm": config.algorithm, "sampling": config.sampling, "staleness": config.staleness}
    return {
        f"{section}.{key}": "null" if value is None else str(value).lower() if isinstance(value, bool) else value
        for section, keys in sections.items()
        for key, value in keys.model_dump(mode="json").items()
    }


def _shares(seconds: dict[str, float]) -> list[tuple[str, float, float]]:
    """(name, seconds, share) of each phase that took any time."""
    total = sum(seconds.values())
    return [(name.replace("_", " "), s, s / total) for name, s in seconds.items() if s > 0]


def _reasons(log: RunHistory, settlement: str) -> str:
    reasons = log.groups.reasons[settlement]
    shown = [f"{reason} ({count})" for reason, count in reasons.most_common(_REASONS_SHOWN)]
    more = len(reasons) - len(shown)
    return "; ".join([*shown, f"and {more} other reason(s)"] if more > 0 else shown)


def _number(value: float | None, digits: int = 3) -> str:
    return "none" if value is None else f"{value:.{digits}f}"


def _duration(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 10 else duration(seconds)


def _data_uri(path: Path) -> str:
    return "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode()
