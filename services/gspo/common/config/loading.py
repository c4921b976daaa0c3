"""Reading a configuration file, writing it, and comparing it with a run's own on resume.

Only the form is validated here. Each service checks that its files, models and ports exist.
"""

import re
from operator import attrgetter
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from gspo.common.bounded_yaml import load_yaml
from gspo.common.config.fields import PATTERNS
from gspo.common.config.reference import Key, explain, meaning, names_at, section_at
from gspo.common.config.schema import Config
from gspo.common.errors import ConfigError, InputError, in_yaml, nearest

# A run directory's configuration, and the facts that stand beside it.
CONFIG_NAME, ENVIRONMENT_NAME = "config.yaml", "environment.json"
# Of stored configurations. Those without a number have the keys of all kinds, at their defaults.
FORMAT = 2
# A word that only the configuration, or the script, of another trainer has -> the trainer.
_OTHER_TRAINERS = {
    "actor_rollout_ref": "verl",
    "openrlhf": "OpenRLHF",
    "actor_infer": "ROLL",
    "gconfig": "AReaL",
    "rollout-batch-size": "slime",
    "orchestrator": "prime-rl",
    "num_generations": "TRL",
    "per_device_train_batch_size": "TRL",
}
# Names that TRL, verl, ROLL or OpenRLHF have for a key -> the key.
_OTHER_NAMES = {
    "num_generations": "algorithm.num_return_sequences_in_group",
    "train_batch_size": "algorithm.rollout_batch_size",
    "max_prompt_length": "algorithm.prompt_length",
    "max_completion_length": "algorithm.response_length",
    "max_response_length": "algorithm.response_length",
    "max_new_tokens": "algorithm.response_length",
    "epsilon": "algorithm.pg_clip_low",
    "epsilon_high": "algorithm.pg_clip_high",
    "clip_ratio_low": "algorithm.pg_clip_low",
    "clip_ratio_high": "algorithm.pg_clip_high",
    "loss_type": "algorithm.loss_agg_mode",
    "beta": "algorithm.kl_loss_coef",
    "lr": "learner.learning_rate",
    "lr_scheduler_type": "learner.schedule",
    "per_device_train_batch_size": "learner.micro_batch_tokens",
    "train_files": "data.prompts",
    "val_files": "evaluation.prompts",
    "max_steps": "run.total_steps",
    "num_train_epochs": "run.total_epochs",
    "save_steps": "run.checkpoint_every",
}


def read_config(path: Path) -> Config:
    """Read and validate a YAML file.

    Raises:
        InputError: The file is missing or not YAML, or a key is unknown, missing, of a wrong type or contradictory.
    """
    return parse_config(read_mapping(path), base=path.parent, source=str(path))


def read_mapping(path: Path) -> dict[str, Any]:
    """The keys of a YAML file, not validated.

    A run may be stored by a version whose keys had other owners. Those without an effect are left out.

    Raises:
        InputError: The file is missing, not YAML, no mapping, or of another format.
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
        content = load_yaml(text)
    except yaml.YAMLError as error:
        raise _of_trainer(path, text) or _not_yaml(path, error) from error
    except ValueError as error:
        raise InputError(str(path), f"has a number or a date that cannot be read ({error})", "Correct it") from error
    if not isinstance(content, dict):
        raise _of_trainer(path, text) or InputError(
            str(path), "is not a mapping of keys", "Start from the file that `gspo init DIR` writes"
        )
    if "model" not in content and (foreign := _of_trainer(path, "\n".join(map(str, content)))):
        raise foreign
    form = content.pop("format", None)
    if form not in (None, FORMAT):
        fix = f"Read it with the version of gspo that wrote it; this one writes and reads {FORMAT}"
        raise InputError(str(path), f"has the format {in_yaml(form):.40}", fix)
    if (path.parent / ENVIRONMENT_NAME).exists():
        return parse_config(content, path.parent, source=str(path), is_stored=True).model_dump(mode="json")
    return content


def _of_trainer(path: Path, text: str) -> InputError | None:
    """The error about another trainer's file, if the text has one of its words outside comments."""
    for word, trainer in _OTHER_TRAINERS.items():
        if re.search(rf"^[^#\n]*\b{word}\b", text, re.MULTILINE):
            fix = f"Start from the file that `gspo init DIR` writes; docs/migration.md has the keys of {trainer}"
            return InputError(str(path), f"is a file of {trainer}, by its word '{word}'", fix)
    return None


def _not_yaml(path: Path, error: yaml.YAMLError) -> InputError:
    """The file's name, line and column, if PyYAML has them, and its problem."""
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        text = str(error).replace('in "<unicode string>", ', "at ").replace("\n", " ")
        return InputError(str(path), f"is not YAML: {text}", "Correct it")
    context = f"{error.context}: " if error.context else ""
    place = f"line {error.problem_mark.line + 1}, column {error.problem_mark.column + 1}"
    return InputError(str(path), f"is not YAML: {place}: {context}{error.problem}", "Correct that line")


def parse_config(keys: dict[str, Any], base: Path, *, source: str = "configuration", is_stored: bool = False) -> Config:
    """Validate a mapping; relative paths in it are taken from `base`.

    Args:
        source: Where the mapping comes from, for messages.
        is_stored: Whether it is a run's, which has keys at their defaults where they have no effect.

    Raises:
        InputError: As for `read_config`, with every wrong key named.
    """
    try:
        return Config.model_validate(keys, context={"base": base.resolve(), "is_stored": is_stored})
    except ValidationError as error:
        raise _as_input_error(error, source) from error


def write_config(config: Config, path: Path) -> None:
    """Write every key that has an effect with its value, so that a later default cannot change a run."""
    keys = {"format": FORMAT, **config.model_dump(mode="json")}
    path.write_text(yaml.safe_dump(keys, sort_keys=False))


def key_value(config: Config, name: str) -> Any:
    """The value of a key, such as "learner.dtype"."""
    return attrgetter(name)(config)


def changed_keys(old: Config, new: Config) -> list[tuple[Key, Any, Any]]:
    """Keys whose values differ, with both values, in the order of `explain`."""
    return [
        (key, before, after)
        for key in explain()
        if (before := key_value(old, key.name)) != (after := key_value(new, key.name))
    ]


def describe_change(name: str, before: Any, after: Any) -> str:
    """'seed was 0 and is now 7', with the values as YAML."""
    return f"{name} was {in_yaml(before)} and is now {in_yaml(after)}"


def check_ranks(config: Config) -> None:
    """Refuse to start a learner without ranks.

    Raises:
        InputError: It is of a run whose ranks the user started; such a run can be viewed and replayed.
    """
    if not config.learner.ranks:
        raise InputError(
            "learner.ranks",
            "0 left the start of the ranks to you, which gspo no longer does",
            "Set it to the ranks of all machines in your configuration; a run that has it continues by `gspo run "
            "CONFIG.yaml --resume`. For several machines, use `gspo run … --cluster ray` (docs/cluster.md)",
        )


def check_resume(old: Config, new: Config) -> None:
    """Refuse a change of a key that is fixed within a run.

    Raises:
        InputError: Names every such key with both values.
    """
    refused = [(key.name, before, after) for key, before, after in changed_keys(old, new) if not key.on_resume]
    if refused:
        changes = "; ".join(describe_change(*change) for change in refused)
        raise InputError(
            refused[0][0],
            f"cannot change on resume ({changes})",
            "Set it back, or start a new run under another name; `gspo config` shows the keys that may change",
        )
    if old.data.curriculum != "none" and old.num_slots != new.num_slots:
        key = "staleness.max_lag"
        raise InputError(
            key,
            f"cannot change on resume under data.curriculum: {old.data.curriculum}, whose order of prompts follows "
            f"from it ({describe_change(key, old.staleness.max_lag, new.staleness.max_lag)})",
            "Set it back, or start a new run under another name",
        )


def _as_input_error(error: ValidationError, source: str) -> InputError:
    """One error for everything that is wrong.

    Args:
        source: Name of the file, for the head of a list.
    """
    problems: dict[str, InputError] = {}
    for problem in _without_consequences(error.errors()):
        explained = _explain(problem)
        problems.setdefault(explained.where, explained)
    if len(problems) == 1:
        return next(iter(problems.values()))
    listed = "".join(f"\n  {problem}" for problem in problems.values())
    return InputError(source, f"{len(problems)} keys are wrong", f"Correct each of them:{listed}")


def _explain(problem: ErrorDetails) -> InputError:
    where, value = _place(problem["loc"]), in_yaml(problem["input"])
    if problem["type"] == "extra_forbidden":
        return InputError(where, f"is not a key (value {value})", _proposal(where))
    if problem["type"] == "missing":
        return InputError(where, "is missing", f"Set it: {meaning(where)}")
    if problem["type"] == "value_error":
        error: ConfigError = problem["ctx"]["error"]
        return error.as_input_error(where)
    if problem["type"] == "string_pattern_mismatch":
        return InputError(where, f"{value} is not allowed", f"Write {PATTERNS[problem['ctx']['pattern']]}")
    return InputError(where, f"{value} is not allowed: {problem['msg']}", f"It is: {meaning(where)}")


def _place(loc: tuple[int | str, ...]) -> str:
    """The key that a problem is about: pydantic adds the name of each form that a value of several may have."""
    parts = [str(part) for part in loc]
    for number in range(1, len(parts)):
        if not section_at(".".join(parts[:number])):
            # Behind a value stand its items and keys, and the forms, which no key is named like.
            inner = [part for part in parts[number:] if part.isdigit()]
            return ".".join([*parts[:number], *inner])
    return ".".join(parts)


def _proposal(where: str) -> str:
    """The nearest key of that section, or the key of that very name elsewhere or in another trainer."""
    section, _, name = where.rpartition(".")
    if name in _OTHER_NAMES:
        return f"The key for it is {_OTHER_NAMES[name]} (docs/migration.md)"
    elsewhere = [key.name for key in explain() if key.name.rpartition(".")[2] == name]
    if elsewhere:
        return f"Did you mean {' or '.join(elsewhere)}?"
    return nearest(name, names_at(section))


def _without_consequences(problems: list[ErrorDetails]) -> list[ErrorDetails]:
    """Without a list that is too short only because one of its items has a problem of its own."""
    places = [problem["loc"] for problem in problems]
    return [
        problem
        for problem in problems
        if problem["type"] != "too_short"
        or not any(
            len(place) > len(problem["loc"]) and place[: len(problem["loc"])] == problem["loc"] for place in places
        )
    ]
