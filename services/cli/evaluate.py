"""`gspo eval`: measures a model folder on a prompts file, with the services that training uses and no learner.

It makes a configuration and a run directory that are gone afterwards. Neighbours: session.py, run.py.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from services.cli.lineup import Job
from services.cli.outcome import InterruptedRunError, RunError
from services.cli.run import check_all, open_screen, until_interrupted
from services.cli.rundir import SERVICES_DIR, Plan, prepare
from services.cli.session import Interrupts, new_view, run_session
from services.cli.view import Phases, View
from services.common.config import Config
from services.common.configfile import parse_config, read_config
from services.common.errors import InputError
from services.common.runtime import CONFIG_NAME

_SERVICES = ("coordinator", "generation", "reward")


@dataclass(frozen=True)
class Question:
    """What to measure; None leaves the base configuration's value, or the default."""

    model: str
    prompts: Path
    base: Path | None = None
    reward: Path | None = None
    num_answers: int | None = None
    temperature: float | None = None
    prompt_length: int | None = None
    response_length: int | None = None
    limit: int | None = None
    seed: int | None = None


def evaluate(question: Question, out: Path | None, *, plain: bool, console: Console) -> int:
    """Measure, print, and write `out` as JSON; 0.

    Raises:
        InputError: The input cannot work.
        RunError: The evaluation could not be done.
    """
    with tempfile.TemporaryDirectory(prefix="gspo-eval-") as folder:
        config = eval_config(question, Path(folder))
        figures = asyncio.run(_evaluate(config, console, plain=plain))
    _print(figures, console)
    if out is not None:
        result = {"model": question.model, "prompts": str(question.prompts), **figures}
        out.write_text(json.dumps(result, indent=2) + "\n")
        console.print(f"written to {out}", highlight=False)
    return 0


def eval_config(question: Question, folder: Path) -> Config:
    """The configuration of an evaluation whose run directory is in `folder`.

    Raises:
        InputError: Neither a reward file nor a base configuration was given, or a value is out of bounds.
    """
    base = read_config(question.base) if question.base else None
    given: dict[str, Any] = base.model_dump(mode="json") if base else {}
    if not given and question.reward is None:
        raise InputError(
            "--reward", "is missing", "Give the reward file: --reward reward.py, or a --config that has one"
        )
    given["name"], given["run"] = "eval", {"directory": str(folder), "total_steps": 1}
    given.setdefault("learner", {})["schedule"] = "constant"
    given["model"] = {**given.get("model", {}), "path": question.model}
    prompts = str(question.prompts.resolve())
    given["data"] = {**given.get("data", {}), "prompts": prompts}
    given["evaluation"] = {**given.get("evaluation", {}), "prompts": prompts}
    if base is not None:  # the run directory is a temporary one, and holds no registered functions
        given["reward"]["registry"] = str(base.registry_dir)
    if question.reward is not None:
        given["reward"] = {**given.get("reward", {}), "functions": [{"path": str(question.reward.resolve())}]}
    for section, key, value in (
        ("evaluation", "num_answers", question.num_answers),
        ("evaluation", "limit", question.limit),
        ("sampling", "temperature", question.temperature),
        ("algorithm", "prompt_length", question.prompt_length),
        ("algorithm", "response_length", question.response_length),
    ):
        if value is not None:
            given.setdefault(section, {})[key] = value
    if question.seed is not None:
        given["seed"] = question.seed
    return parse_config(given, base=Path.cwd())


async def _evaluate(config: Config, console: Console, *, plain: bool) -> dict[str, float]:
    phases, interrupts = Phases(), Interrupts()
    interrupts.install()
    plan = Plan(config, config.run_dir, resume=False)
    (plan.run_dir / SERVICES_DIR).mkdir(parents=True)
    prepare(plan)
    await until_interrupted(check_all(config, _SERVICES, plan.run_dir / CONFIG_NAME), interrupts)
    job = Job(config, plan.run_dir, services=_SERVICES, coordinator_options=("--evaluate",))
    view = new_view(job, phases)
    screen = interrupts.screen = open_screen(console, plain=plain)
    try:
        await run_session(job, view, screen, interrupts)
    finally:
        screen.close()
    if interrupts.asked.is_set():
        raise InterruptedRunError("stopped; nothing was measured")
    return _figures(view)


def _figures(view: View) -> dict[str, float]:
    finished = view.finished
    if finished is not None and finished.failed:
        raise RunError(f"the evaluation failed: {finished.reason}")
    if "sampled_mean" not in view.evaluation:
        raise RunError("the evaluation ended without one scored answer")
    return view.evaluation


def _print(figures: dict[str, float], console: Console) -> None:
    table = Table.grid(padding=(0, 2))
    for label in ("sampled", "greedy"):
        if f"{label}_mean" in figures:
            error = figures.get(f"{label}_stderr")
            more = f" ± {error:.4f}" if error is not None else ""
            table.add_row(f"{label} mean reward", f"[bold]{figures[f'{label}_mean']:.4f}[/]{more}")
    for name in ("pass_at_k", "response_tokens_mean", "truncated_share", "num_prompts", "num_answers", "num_failed"):
        if name in figures:
            table.add_row(name.replace("_", " "), f"{figures[name]:g}")
    console.print(table)
