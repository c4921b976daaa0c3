"""Reading a configuration file, comparing it with a run's own on resume, and explaining every key.

It validates form only; whether files, models and ports are there is each service's own check. Neighbour: config.py.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from services.common.config import Config
from services.common.errors import InputError, nearest

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


@dataclass(frozen=True)
class Key:
    """One key of the configuration, as `gspo config` prints it."""

    name: str
    type: str
    default: str
    bounds: str
    meaning: str
    on_resume: bool


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
    return parse_config(read_mapping(path), base=path.parent)


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
        raise InputError(str(path), f"is not YAML: {error}".replace("\n", " "), "Mend that line") from error
    if not isinstance(given, dict):
        raise InputError(str(path), "is not a mapping of keys", "Start from the file that `gspo init DIR` writes")
    return given


def parse_config(given: dict[str, Any], base: Path) -> Config:
    """Validate a mapping; relative paths in it are taken from `base`.

    Raises:
        InputError: As for `read_config`, with the key named.
    """
    try:
        config = Config.model_validate(given)
    except ValidationError as error:
        raise _explain(error) from error
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


def check_resume(old: Config, new: Config) -> None:
    """Refuse a change of a key that is fixed for a run's life.

    Raises:
        InputError: Names every such key with both values; learner.ranks where a checkpoint could not be read.
    """
    refused = [(key.name, before, after) for key, before, after in changed_keys(old, new) if not key.on_resume]
    if refused:
        changes = "; ".join(f"{name} was {before!r} and is now {after!r}" for name, before, after in refused)
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


def explain() -> list[Key]:
    """Every key with type, default, bounds and meaning."""
    return list(_walk(Config, ""))


def explain_item(key: Key) -> list[Key]:
    """The keys of one item, where a key's value is a list of sections: `reward.functions.N.weight`."""
    annotation: Any = Config
    for part in key.name.split("."):
        annotation = annotation.model_fields[part].annotation
    model = get_args(annotation)[0] if get_origin(annotation) is tuple else None
    if not (isinstance(model, type) and issubclass(model, BaseModel)):
        return []
    return list(_walk(model, f"{key.name}.N."))


def _walk(model: type[BaseModel], prefix: str) -> Iterator[Key]:
    for name, field in model.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            yield from _walk(inner, f"{prefix}{name}.")
        else:
            yield _key(f"{prefix}{name}", field)


def _key(name: str, field: FieldInfo) -> Key:
    extra = field.json_schema_extra
    return Key(
        name=name,
        type=_type_name(field.annotation),
        default="required" if field.is_required() else _default(field),
        bounds=_bounds(field),
        meaning=field.description or "",
        on_resume=isinstance(extra, dict) and bool(extra.get("on_resume")),
    )


def _default(field: FieldInfo) -> str:
    default = field.get_default(call_default_factory=True, validated_data={})
    return "null" if default is None else str(default).lower() if isinstance(default, bool) else str(default)


def _type_name(annotation: Any) -> str:
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is types.UnionType or str(origin) == "typing.Union":
        return " | ".join("null" if part is type(None) else _type_name(part) for part in inner)
    if str(origin) == "typing.Literal":
        return " | ".join(str(part) for part in inner)
    if origin is Annotated:
        return _type_name(inner[0])
    if origin in (tuple, list):
        return f"list of {_type_name(inner[0])}"
    if origin is dict:
        return "mapping"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "{" + ", ".join(annotation.model_fields) + "}"
    return {"str": "text", "int": "integer", "float": "number", "bool": "true | false", "Path": "path"}.get(
        annotation.__name__, str(annotation)
    )


def _bounds(field: FieldInfo) -> str:
    signs = {"gt": ">", "ge": ">=", "lt": "<", "le": "<=", "min_length": "at least", "pattern": "matches"}
    found = list(field.metadata)
    for part in get_args(field.annotation):
        found += getattr(part, "__metadata__", ())
    shown = [
        f"{sign} {value}"
        for item in found
        for name, sign in signs.items()
        if (value := getattr(item, name, None)) is not None
    ]
    return ", ".join(dict.fromkeys(shown))


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


def _explain(error: ValidationError) -> InputError:
    problems = _without_consequences(error.errors())
    first = problems[0]
    where = ".".join(str(part) for part in first["loc"])
    more = f" ({len(problems) - 1} more problem(s) after this one.)" if len(problems) > 1 else ""
    if first["type"] == "extra_forbidden":
        parent = ".".join(str(part) for part in first["loc"][:-1])
        return InputError(
            where,
            f"is not a key (value {first['input']!r})",
            nearest(str(first["loc"][-1]), _names_at(parent)) + more,
        )
    if first["type"] == "missing":
        return InputError(where, "is missing", f"Set it: {_meaning(where)}." + more)
    if first["type"] == "value_error":
        key, _, rule = str(first["ctx"]["error"]).partition(": ")
        rule, _, fix = rule.rpartition(". ")
        if where and not key.startswith(where.split(".")[0]):  # said from within a list, which knows no place
            key = f"{where}.{key}"
        return InputError(key, rule, fix + more)
    return InputError(where, f"{first['input']!r} is not allowed: {first['msg']}", f"It is: {_meaning(where)}." + more)


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


def _names_at(prefix: str) -> list[str]:
    model: Any = Config
    for part in prefix.split("."):
        if part.isdigit() or not part:
            continue
        annotation = model.model_fields[part].annotation
        model = next((a for a in get_args(annotation) if isinstance(a, type) and issubclass(a, BaseModel)), annotation)
    return list(model.model_fields)


def _meaning(where: str) -> str:
    for key in explain():
        if key.name == where or where.startswith(key.name + "."):
            return f"{key.meaning} ({key.type})"
    section = Config.model_fields.get(where)
    inner = section.annotation if section else None
    return (inner.__doc__ or "").strip(". ") if isinstance(inner, type) else "see `gspo config`"
