"""Reading a configuration file, writing it, and comparing it with a run's own on resume.

It validates form only; whether files, models and ports are there is each service's own check.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from gspo.common.config.reference import Key, explain
from gspo.common.config.schema import Config
from gspo.common.config.validation import as_input_error
from gspo.common.errors import InputError, in_yaml

# A run directory's configuration.
CONFIG_NAME = "config.yaml"
# Paths in a file are relative to that file, so that a folder can be moved as a whole.
PATH_KEYS = (
    "data.prompts",
    "environment.path",
    "evaluation.prompts",
    "learner.deepspeed",
    "reward.registry",
    "reward.tokens",
    "run.directory",
    "services.redis_password_file",
    "services.tls",
    "services.token_file",
)


class _Loader(yaml.SafeLoader):
    """YAML without tags, and without a key that is there twice: YAML's own rule, which PyYAML does not hold."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"'{key.value}' is there twice", key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def read_config(path: Path) -> Config:
    """Read and validate a YAML file.

    Raises:
        InputError: The file is missing or not YAML, or a key is unknown, missing, of a wrong type or contradictory.
    """
    return parse_config(read_mapping(path), base=path.parent, source=str(path))


def read_mapping(path: Path) -> dict[str, Any]:
    """The keys of a YAML file, before anything is known of them.

    Raises:
        InputError: The file is missing, not YAML, or no mapping.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError(str(path), f"is not UTF-8 ({error})", "Save it as UTF-8") from error
    except OSError as error:
        raise InputError(
            str(path),
            f"cannot be read ({error.strerror})",
            "Give the path of a YAML file; `gspo init DIR` writes one",
        ) from error
    try:
        given = yaml.load(text, Loader=_Loader)  # noqa: S506 - a safe loader
    except yaml.YAMLError as error:
        raise _not_yaml(path, error) from error
    if not isinstance(given, dict):
        raise InputError(str(path), "is not a mapping of keys", "Start from the file that `gspo init DIR` writes")
    return given


def _not_yaml(path: Path, error: yaml.YAMLError) -> InputError:
    """The file's name, line and column, where PyYAML has them, and what it found there."""
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        text = str(error).replace('in "<unicode string>", ', "at ").replace("\n", " ")
        return InputError(str(path), f"is not YAML: {text}", "Mend it")
    mark, context = error.problem_mark, f"{error.context}: " if error.context else ""
    place = f"line {mark.line + 1}, column {mark.column + 1}"
    return InputError(str(path), f"is not YAML: {place}: {context}{error.problem}", "Mend that line")


def parse_config(given: dict[str, Any], base: Path, *, source: str = "configuration") -> Config:
    """Validate a mapping; relative paths in it are taken from `base`.

    Args:
        source: Where the mapping comes from, for messages.

    Raises:
        InputError: As for `read_config`, with every wrong key named.
    """
    try:
        config = Config.model_validate(given)
    except ValidationError as error:
        raise as_input_error(error, source) from error
    return _resolve_paths(config, base.resolve())


def write_config(config: Config, path: Path) -> None:
    """Write every key with its value, so that a later default cannot change a run."""
    path.write_text(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False))


def changed_keys(old: Config, new: Config) -> list[tuple[Key, Any, Any]]:
    """Keys whose values differ, with both values, in the order of `explain`."""
    return [
        (key, before, after)
        for key in explain()
        if (before := _value(old, key.name)) != (after := _value(new, key.name))
    ]


def describe_change(name: str, before: Any, after: Any) -> str:
    """'seed was 0 and is now 7', with the values as YAML."""
    return f"{name} was {in_yaml(before)} and is now {in_yaml(after)}"


def check_resume(old: Config, new: Config) -> None:
    """Refuse a change of a key that is fixed for a run's life.

    Raises:
        InputError: Names every such key with both values; learner.ranks where a checkpoint could not be read.
    """
    refused = [(key.name, before, after) for key, before, after in changed_keys(old, new) if not key.on_resume]
    if refused:
        changes = "; ".join(describe_change(*change) for change in refused)
        raise InputError(
            refused[0][0],
            f"cannot change on resume ({changes})",
            "Set it back, or start a new run under another name; `gspo config` marks the keys that may change",
        )
    before, after = old.learner.ranks, new.learner.ranks
    if new.learner.zero_stage and before != after:
        raise InputError(
            "learner.ranks",
            f"was {before} and is now {after}: under ZeRO {new.learner.zero_stage} (learner.zero_stage) each rank "
            "wrote its own part of the checkpoints",
            "Set it back: only a run with zero_stage 0 can change it",
        )


def _value(config: Config, key: str) -> Any:
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part)
    return value


def _resolve_paths(config: Config, base: Path) -> Config:
    update = config.model_dump()
    for key in PATH_KEYS:
        section, name = key.split(".")
        update[section][name] = _from_base(base, update[section][name])
    for function in update["reward"]["functions"]:
        if function["path"] is not None:
            function["path"] = base / function["path"]
        function["reads"] = [base / place for place in function["reads"]]
    update["environment"]["reads"] = [base / place for place in update["environment"]["reads"]]
    if (base / update["model"]["path"]).exists():
        update["model"]["path"] = str(base / update["model"]["path"])
    return Config.model_validate(update)


def _from_base(base: Path, value: Any) -> Any:
    """A path of the file, or each of its named paths, taken from `base`; anything else as it is."""
    if isinstance(value, dict):
        return {name: _from_base(base, one) for name, one in value.items()}
    return base / value if isinstance(value, Path) else value
