"""Every key of the configuration, with the description that `gspo config` prints."""

import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, get_args, get_origin

from pydantic.fields import FieldInfo

from gspo.common.config.fields import ON_GPUS, PATTERNS, Owner, Section
from gspo.common.config.schema import Config
from gspo.common.errors import in_yaml


@dataclass(frozen=True)
class Key:
    """One key of the configuration, as `gspo config` prints it.

    Attributes:
        on_gpus: Its default on a machine with GPUs; None if the default is the same on every machine.
        owner: Keys without which it has no effect; empty without any.
        is_kept: Whether runs that began before it go on with another value than the default.
    """

    name: str
    type: str
    default: str
    bounds: str
    meaning: str
    on_resume: bool
    on_gpus: Any = None
    owner: str = ""
    is_kept: bool = False


def explain() -> list[Key]:
    """Every key with type, default, bounds and meaning."""
    return list(_walk(Config, ""))


def item_keys(key: Key) -> list[Key]:
    """The keys of one item, where a key's value is a list of sections: `reward.functions.N.weight`."""
    model = section_at(key.name)
    return list(_walk(model, f"{key.name}.N.")) if model else []


def _walk(model: type[Section], prefix: str) -> Iterator[Key]:
    for name, field in model.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, Section):
            yield from _walk(inner, f"{prefix}{name}.")
        else:
            owners = [part for part in field.metadata if isinstance(part, Owner)]
            owners += (*model.OWNED.get(name, ()), *Config.OWNED.get(f"{prefix}{name}", ()))
            yield _key(f"{prefix}{name}", field, owners, may_change=model.may_change, is_kept=name in model.BEFORE)


def _key(name: str, field: FieldInfo, owners: list[Owner], *, may_change: bool, is_kept: bool) -> Key:
    extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
    on_gpus = extra.get(ON_GPUS)
    return Key(
        name=name,
        type=_type_name(field.annotation),
        default=_default(field, on_gpus),
        bounds=_bounds(field),
        meaning=field.description or "",
        on_resume=bool(extra.get("on_resume", may_change)),
        on_gpus=on_gpus,
        owner=", ".join(owner.text for owner in owners if not owner.is_rival),
        is_kept=is_kept,
    )


def _default(field: FieldInfo, on_gpus: Any) -> str:
    if field.is_required():
        return "required"
    default = in_yaml(field.get_default(call_default_factory=True, validated_data={}))
    return default if on_gpus is None else f"{default} on CPUs, {in_yaml(on_gpus)} on GPUs"


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
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return "{" + ", ".join(annotation.model_fields) + "}"
    return {"str": "text", "int": "integer", "float": "number", "bool": "true | false", "Path": "path"}.get(
        annotation.__name__, str(annotation)
    )


def _bounds(field: FieldInfo) -> str:
    signs = {"gt": ">", "ge": ">=", "lt": "<", "le": "<=", "min_length": "at least"}
    metadata = list(field.metadata)
    for part in get_args(field.annotation):
        metadata += getattr(part, "__metadata__", ())
    shown = [
        f"{sign} {value}"
        for item in metadata
        for name, sign in signs.items()
        if (value := getattr(item, name, None)) is not None
    ]
    shown += [PATTERNS[pattern] for item in metadata if (pattern := getattr(item, "pattern", None)) is not None]
    return ", ".join(dict.fromkeys(shown))


def names_at(prefix: str) -> list[str]:
    """The keys that a section has, by its name; of one item where it is a list of sections."""
    model = section_at(prefix)
    return list(model.model_fields) if model else []


def section_at(prefix: str) -> type[Section] | None:
    """The section of that name, an item of a list by its number included; None where a value stands there."""
    model: type[Section] = Config
    for part in prefix.split(".") if prefix else ():
        if part.isdigit():
            continue
        field = model.model_fields.get(part)
        if field is None:
            return None
        parts = (field.annotation, *get_args(field.annotation))
        inner = next((a for a in parts if isinstance(a, type) and issubclass(a, Section)), None)
        if inner is None:
            return None
        model = inner
    return model


def meaning(where: str) -> str:
    """The description of a key or section, for the fix of a message."""
    for key in explain():
        if key.name == where or where.startswith(key.name + "."):
            return f"{key.meaning} ({key.type})"
    section = section_at(where)
    return (section.__doc__ or "").strip(". ") if section else "see `gspo config`"
