"""What `gspo eval` measures, and the configuration that follows from it.

It reads files and starts nothing. Neighbour: evaluate.py, which runs the services with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gspo.cli.rundir.plan import config_file_of
from gspo.common.config.algorithm import AlgorithmConfig
from gspo.common.config.loading import parse_config, read_config
from gspo.common.config.schema import Config
from gspo.common.errors import InputError
from gspo.common.model.folder import max_positions


@dataclass(frozen=True)
class EvaluationSpec:
    """What to measure; None leaves the base configuration's value, or the default."""

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


def eval_config(question: EvaluationSpec, folder: Path) -> Config:
    """The configuration of an evaluation whose run directory is in `folder`.

    Raises:
        InputError: Neither a reward file nor a base configuration was given, or a value is out of bounds.
    """
    base = read_config(config_file_of(question.base)) if question.base else None
    given: dict[str, Any] = base.model_dump(mode="json") if base else {}
    if not given and question.reward is None:
        raise InputError(
            "--reward", "is missing", "Give the reward file: --reward reward.py, or a --config that has one"
        )
    given["name"], given["run"] = "eval", {"directory": str(folder), "total_steps": 1}
    given.setdefault("learner", {})["schedule"] = "constant"
    given["model"] = {**given.get("model", {}), "path": question.model}
    files = {name: str(path.resolve()) for name, path in named_files(question.prompts).items()}
    given["data"] = {**given.get("data", {}), "prompts": next(iter(files.values()))}
    # Of a single version there is no best.
    asked = {"prompts": files.get("", files), "keep_best": None}
    given["evaluation"] = {**given.get("evaluation", {}), **asked}
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
    if base is None:
        _fit_lengths(given, question)
    return parse_config(given, base=Path.cwd())


def _fit_lengths(given: dict[str, Any], question: EvaluationSpec) -> None:
    """Take what the options leave open from the model, where it reads fewer tokens than the defaults ask for."""
    places = max_positions(Path(question.model))
    if places is None:
        return
    fields = AlgorithmConfig.model_fields
    prompt, response = question.prompt_length, question.response_length
    if prompt is None:
        prompt = min(fields["prompt_length"].default, places // 2 if response is None else places - response)
    if response is None:
        response = min(fields["response_length"].default, places - prompt)
    if prompt > 0 and response > 0:
        given.setdefault("algorithm", {}).update(prompt_length=prompt, response_length=response)


def named_files(paths: tuple[Path, ...]) -> dict[str, Path]:
    """Several files by their names without ending; a single one has an empty name.

    Raises:
        InputError: Two of them have the same name.
    """
    if len(paths) == 1:
        return {"": paths[0]}
    named: dict[str, Path] = {}
    for path in paths:
        if path.stem in named:
            fix = "Rename one; the figures are told apart by the files' names"
            raise InputError(str(path), f"has the name of {named[path.stem]}", fix)
        named[path.stem] = path
    return named
