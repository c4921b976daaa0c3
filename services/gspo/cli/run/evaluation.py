"""`gspo eval`: measures a model on prompts with the services of training, without a learner.

Its run directory is temporary.
"""

import asyncio
import json
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from gspo.cli.monitor.view import View
from gspo.cli.processes.exit_codes import InterruptedRunError, RunError, ServiceRefusedError
from gspo.cli.run.training import run_services
from gspo.cli.rundir.start import SERVICES_DIR, RunStart, config_file_of
from gspo.cli.rundir.user_config import read_user_config, user_config
from gspo.common.config.algorithm import AlgorithmConfig
from gspo.common.config.schema import Config
from gspo.common.errors import InputError, nearest
from gspo.common.model.files import max_positions
from gspo.common.streams.keys import AGENTS, COORDINATOR, GATEWAY, GENERATION, REWARD
from gspo_proto.rollout_pb2 import RUN_END_FAILED, RUN_END_STOPPED

_SERVICES = (COORDINATOR, GENERATION, REWARD)
# Beginnings of the names of figures, in the order of the table; all other names go before the last two.
_ORDER = (
    *("sampled_mean", "sampled_stderr", "greedy_mean", "greedy_stderr"),
    *("pass_at_", "best_at_", "part_", "greedy_", "num_"),
)
_OTHERS = len(_ORDER) - 2.5
Measured = dict[str, dict[str, float]]
# Keys of a configuration -> the options of this command in their place.
_OPTIONS = (
    ("algorithm.prompt_length", "--prompt-length"),
    ("algorithm.response_length", "--response-length"),
    ("prompt_length", "--prompt-length"),
    ("response_length", "--response-length"),
    ("sampling.temperature", "--temperature"),
    ("evaluation.num_answers", "--answers"),
    ("evaluation.limit", "--limit"),
    ("evaluation.prompts", "PROMPTS"),
    ("data.prompts", "PROMPTS"),
    ("model.path", "MODEL"),
)


@dataclass(frozen=True)
class EvaluationSpec:
    """The options of `gspo eval`; None keeps the value of the base configuration, or the default."""

    model: str
    prompts: tuple[Path, ...]
    base: Path | None = None
    reward: Path | None = None
    num_answers: int | None = None
    temperature: float | None = None
    prompt_length: int | None = None
    response_length: int | None = None
    limit: int | None = None
    seed: int | None = None
    source: str | None = None


def evaluate(spec: EvaluationSpec, out: Path | None, *, plain: bool, console: Console) -> int:
    """Measure, print, and write `out` as JSON; returns the exit code 0.

    Raises:
        InputError: The input cannot work.
        RunError: The evaluation could not be done.
    """
    if out is not None:  # try before the evaluation whether the file can be written
        is_new = not out.exists()
        out.open("a").close()
        if is_new:
            out.unlink()
    measured = measure(spec, plain=plain, console=console)
    _print(spec, measured, console)
    if out is not None:
        out.write_text(json.dumps(_result(spec, measured), indent=2) + "\n")
        console.print(f"written to {out}", highlight=False)
    return 0


def measure(spec: EvaluationSpec, *, plain: bool, console: Console) -> Measured:
    """The figures of a model by held-out file, from services that run until they are there.

    Raises:
        InputError: The input cannot work.
        RunError: The evaluation could not be done.
    """
    with tempfile.TemporaryDirectory(prefix="gspo-eval-") as folder, naming_options():
        config = eval_config(spec, Path(folder))
        start = RunStart(config, config.run_dir, resume=False)
        (start.run_dir / SERVICES_DIR).mkdir(parents=True)
        services = (*_SERVICES, GATEWAY, AGENTS) if config.agent.is_started else _SERVICES
        session = run_services(start, console, plain=plain, services=services, coordinator_options=("--evaluate",))
        view, is_interrupted = asyncio.run(session)
        if is_interrupted:
            raise InterruptedRunError("stopped; nothing was measured")
        return _figures(view)


def _result(spec: EvaluationSpec, measured: Measured) -> dict[str, Any]:
    """The content of `--out`: the figures of a single file, or of each file by its name."""
    if len(spec.prompts) == 1:
        return {"model": spec.model, "prompts": str(spec.prompts[0]), **measured[""]}
    files = {name: {"prompts": str(path), **measured[name]} for name, path in named_files(spec.prompts).items()}
    return {"model": spec.model, "files": files}


@contextmanager
def naming_options() -> Iterator[None]:
    """Name the options of `gspo eval` in errors that name keys: the user may have no configuration."""
    try:
        yield
    except InputError as error:
        raise InputError(*(_with_options(text) for text in (error.where, error.rule, error.fix))) from error
    except ServiceRefusedError as error:
        raise ServiceRefusedError(_with_options(str(error))) from error


def _with_options(text: str) -> str:
    for key, option in _OPTIONS:
        text = re.sub(rf"\b{re.escape(key)}(?![\w-])", option, text)
    return text


def _figures(view: View) -> Measured:
    finished = view.finished
    if finished is not None and finished.end in (RUN_END_FAILED, RUN_END_STOPPED):
        raise RunError(f"the evaluation failed: {finished.reason}")
    measured = {file: in_order(records[-1].figures) for file, records in view.by_file.items()}
    for file in view.config.evaluation.files:
        if "sampled_mean" not in measured.get(file, {}):
            raise RunError(f"the evaluation ended without one scored answer{f' to {file}' if file else ''}")
    return measured


def in_order(figures: dict[str, float]) -> dict[str, float]:
    """Sort figures: rewards, pass@k and best@k by k, parts of the reward, lengths and shares, counts."""

    def place(name: str) -> tuple[float, list[str | int]]:
        rank = next((rank for rank, head in enumerate(_ORDER) if name.startswith(head)), _OTHERS)
        return rank, [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]

    return {name: figures[name] for name in sorted(figures, key=place)}


def _print(spec: EvaluationSpec, measured: Measured, console: Console) -> None:
    """Print a column for each file, below its name, with standard errors over prompts."""
    table = Table.grid(padding=(0, 2))
    table.add_row("", *(Text(name or spec.prompts[0].name, "bold") for name in measured))
    names = dict.fromkeys(name for figures in measured.values() for name in figures if not name.endswith("_stderr"))
    for name in names:
        label = re.sub("^(pass|best)_at_", r"\1@", name).replace("_", " ")
        label += " reward" if name in ("sampled_mean", "greedy_mean") else ""
        table.add_row(label, *(_value(figures, name) for figures in measured.values()))
    console.print(table)


def _value(figures: dict[str, float], name: str) -> str:
    if name not in figures:
        return ""
    error = figures.get(f"{name.removesuffix('_mean')}_stderr")
    if error is None:
        return f"{figures[name]:.4g}"
    return f"[bold]{figures[name]:.4f}[/] ± {error:.4f}"


def eval_config(spec: EvaluationSpec, folder: Path) -> Config:
    """The configuration of an evaluation whose run directory is in `folder`.

    Raises:
        InputError: There is neither a reward file nor a base configuration, or a value is out of bounds.
    """
    user = read_user_config(config_file_of(spec.base)) if spec.base else None
    base = user.for_cpus if user else None
    if base is not None and base.agent.external:
        raise InputError(
            "--config",
            f"{spec.base} has agents that you start (agent.external), and an evaluation waits for none",
            "Name the agent's file in agent.path, or read the run's own evaluations (evaluation.prompts)",
        )
    config: dict[str, Any] = base.model_dump(mode="json") if base else {}
    for name in user.left_out if user else ():
        section, _, key = name.partition(".")
        del config[section][key]
    if not config and spec.reward is None:
        raise InputError(
            "--reward", "is missing", "Give the reward file: --reward reward.py, or a --config that has one"
        )
    config["name"], config["run"] = "eval", {"directory": str(folder), "total_steps": 1}
    config.setdefault("learner", {})["schedule"] = "constant"
    config["placement"] = "split"  # there is no learner to share GPUs with
    config["model"] = {**config.get("model", {}), "path": spec.model}
    files = {name: str(path.resolve()) for name, path in named_files(spec.prompts).items()}
    if base is not None:
        _choose_source(config, base, spec.source)
    config["data"] = {**config.get("data", {}), "prompts": next(iter(files.values()))}
    # A single version has no best.
    evaluation = {"prompts": files.get("", files), "keep_best": None}
    config["evaluation"] = {**config.get("evaluation", {}), **evaluation}
    if base is not None:  # the run directory is a temporary one, and holds no registered functions
        config["reward"]["registry"] = str(base.registry_dir)
    if spec.reward is not None:
        config["reward"] = {**config.get("reward", {}), "functions": [{"path": str(spec.reward.resolve())}]}
    for section, key, value in (
        ("evaluation", "num_answers", spec.num_answers),
        ("evaluation", "limit", spec.limit),
        ("sampling", "temperature", spec.temperature),
        ("algorithm", "prompt_length", spec.prompt_length),
        ("algorithm", "response_length", spec.response_length),
    ):
        if value is not None:
            config.setdefault(section, {})[key] = value
    if spec.temperature is not None:
        config["evaluation"]["temperature"] = None
    if spec.seed is not None:
        config["seed"] = spec.seed
    if base is None:
        _fit_lengths(config, spec)
    return user_config(config, base=Path.cwd()).for_device(_SERVICES)


def _choose_source(config: dict[str, Any], base: Config, name: str | None) -> None:
    """Make the reward and the environment of one of several sources those of the evaluation.

    Raises:
        InputError: There are several and none is named, or none has that name.
    """
    by_name = {source.name: source for source in base.sources}
    if name is None and len(by_name) > 1:
        fix = f"Name the one that scores the answers: {', '.join(by_name)}"
        raise InputError("--source", "is missing, and the configuration has several sources of prompts", fix)
    if name is not None and name not in by_name:
        raise InputError(
            "--source", f"'{name}' names no source of the configuration", nearest(name, filter(None, by_name))
        )
    chosen = base.sources[0] if name is None else by_name[name]
    columns = {"prompt_column": chosen.prompt_column, "answer_column": chosen.answer_column}
    config["data"] |= {"sources": [], **columns, "types": dict(chosen.types)}
    config["reward"]["functions"] = [function.model_dump(mode="json") for function in chosen.functions]
    config["environment"] = chosen.environment.model_dump(mode="json")
    config["sampling"] |= {"stop": list(chosen.stop), "temperature": chosen.temperature}


def _fit_lengths(config: dict[str, Any], spec: EvaluationSpec) -> None:
    """Fit lengths without an option to the model, if it has fewer positions than the defaults need."""
    places = max_positions(Path(spec.model))
    if places is None:
        return
    fields = AlgorithmConfig.model_fields
    prompt, response = spec.prompt_length, spec.response_length
    if prompt is None:
        prompt = min(fields["prompt_length"].default, places // 2 if response is None else places - response)
    if response is None:
        response = min(fields["response_length"].default, places - prompt)
    if prompt > 0 and response > 0:
        config.setdefault("algorithm", {}).update(prompt_length=prompt, response_length=response)


def named_files(paths: tuple[Path, ...]) -> dict[str, Path]:
    """Several files by their names without suffix; a single file has an empty name.

    Raises:
        InputError: Two of them have the same name.
    """
    if len(paths) == 1:
        return {"": paths[0]}
    named: dict[str, Path] = {}
    for path in paths:
        if path.stem in named:
            fix = "Rename one; the figures are listed by file name"
            raise InputError(str(path), f"has the name of {named[path.stem]}", fix)
        named[path.stem] = path
    return named
