"""The configuration of `gspo eval`, from its options, the model and an optional base configuration."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gspo.cli.rundir.plan import config_file_of
from gspo.common.config.algorithm import AlgorithmConfig
from gspo.common.config.loading import parse_config, read_config
from gspo.common.config.schema import Config
from gspo.common.errors import InputError
from gspo.common.model.files import max_positions


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


def eval_config(spec: EvaluationSpec, folder: Path) -> Config:
    """The configuration of an evaluation whose run directory is in `folder`.

    Raises:
        InputError: There is neither a reward file nor a base configuration, or a value is out of bounds.
    """
    base = read_config(config_file_of(spec.base)) if spec.base else None
    config: dict[str, Any] = base.model_dump(mode="json") if base else {}
    if not config and spec.reward is None:
        raise InputError(
            "--reward", "is missing", "Give the reward file: --reward reward.py, or a --config that has one"
        )
    config["name"], config["run"] = "eval", {"directory": str(folder), "total_steps": 1}
    config.setdefault("learner", {})["schedule"] = "constant"
    config["model"] = {**config.get("model", {}), "path": spec.model}
    files = {name: str(path.resolve()) for name, path in named_files(spec.prompts).items()}
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
    if spec.seed is not None:
        config["seed"] = spec.seed
    if base is None:
        _fit_lengths(config, spec)
    return parse_config(config, base=Path.cwd())


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
