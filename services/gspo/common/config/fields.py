"""The parts that the sections of the configuration are made of: their base class, names, paths and free mappings."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, reduce
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    SerializerFunctionWrapHandler,
    StringConstraints,
    ValidationInfo,
    model_serializer,
    model_validator,
)
from pydantic.config import JsonDict

from gspo.common.errors import NO_VALUE, ConfigError

_NAME, _VERSION = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$", r"^[0-9a-f]{8,64}$"
HTTP_ADDRESS, HTTP_HOST = r"^https?://[^\s]+$", r"^https?://[^\s/]+(:\d+)?/?$"
_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|([A-Za-z_]\w*))")
_HOST_NAME = r"^(\*\.)?[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*$"
# The meaning of each pattern, for messages.
PATTERNS = {
    _HOST_NAME: "a host's name without a port, or *. and the end of one",
    _NAME: "1 to 64 of the letters a-z and A-Z, digits, and . _ -, beginning with a letter or a digit",
    _VERSION: "8 to 64 of the digits 0-9 and letters a-f",
    HTTP_ADDRESS: "an address that begins with http:// or https://",
    HTTP_HOST: "http:// or https:// with a host and a port, and no path",
}
ColumnType = Literal["text", "number", "boolean", "json", "base64", "omit"]
RunName = Annotated[str, StringConstraints(pattern=_NAME)]
VersionText = Annotated[str, StringConstraints(pattern=_VERSION)]
HostName = Annotated[str, StringConstraints(pattern=_HOST_NAME)]
HttpAddress = Annotated[str, StringConstraints(pattern=HTTP_ADDRESS)]


def _only_finite(value: Any) -> Any:
    """Refuse an infinite number, or none at all, at any depth of a mapping that has no fixed keys."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError("", value, "is in it, and every number must be finite", "Set a finite number")
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ():
        _only_finite(inner)
    return value


def _from_base(path: Path, info: ValidationInfo) -> Path:
    """A path of a file, taken from the file's folder, which the validation's context has as `base`."""
    if not info.context:
        return path
    base: Path = info.context["base"]
    return base / (path if (base / path).exists() else _expanded(str(path)))


def _folder_from_base(path: str, info: ValidationInfo) -> str:
    """A hub's name may look like a path: a folder that exists beside the configuration's file is meant."""
    folder = _from_base(Path(path), info) if info.context else None
    is_path = folder is not None and (folder.exists() or _expanded(path) != path)
    return str(folder) if is_path else path


def _expanded(path: str) -> str:
    """A path with its variables and its `~` replaced, as a shell does it.

    Raises:
        ConfigError: A variable is not set, or a user has no home.
    """

    def value_of(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        if name not in os.environ:
            rule = f"has the variable {name}, which is not set"
            raise ConfigError("", path, rule, f"Set {name}, or write the path without it")
        return os.environ[name]

    text = os.path.expanduser(_VARIABLE.sub(value_of, path))  # noqa: PTH111 - Path.expanduser raises other errors
    if text.startswith("~"):
        raise ConfigError("", path, "begins with the home of a user who has none", "Write the path without ~")
    return text


def _file_or_files(value: Any) -> Any:
    if isinstance(value, str | Path) or (isinstance(value, list | tuple) and value):
        return value
    fix = "Write one path, or a line `- path` for each file below the key"
    raise ConfigError("", value, "is neither a file nor a list of files", fix)


# A model's folder, or its name on a hub.
ModelPath = Annotated[str, AfterValidator(_folder_from_base)]
# A path in a configuration file is relative to that file, so that a folder can be moved as a whole.
FilePath = Annotated[Path, AfterValidator(_from_base)]
# One file, or several whose rows are read one after the other.
FilePaths = Annotated[FilePath | tuple[FilePath, ...], BeforeValidator(_file_or_files)]
# Mappings with keys of other programs: arguments of an engine or a function, a tool's description.
FreeMapping = Annotated[dict[str, Any], AfterValidator(_only_finite)]
# For a key that may change when a run is resumed, and for one that may not, unlike the others of its section.
ON_RESUME: JsonDict = {"on_resume": True}
FIXED: JsonDict = {"on_resume": False}
# Of a key whose default follows from the device: its value on GPUs. A field's own default is that of CPUs.
ON_GPUS = "on_gpus"


# Values that are off: they claim no effect, so they may stand anywhere.
_OFF: tuple[Any, ...] = (None, False, (), {}, "")


@dataclass(frozen=True)
class Owner:
    """The keys without which a key has no effect; in the annotation of that key, or of a whole section.

    Args:
        text: The keys as a user sets them, such as `algorithm.use_kl_loss: true`.
        is_there: Whether a section has them.
        makes: Keys of a section that make the owner, and so need none.
        switch: A key that may be written as off beside those that it owns.
        is_rival: Whether the key has no effect where something else is there; `text` says what.
    """

    text: str
    is_there: Callable[[Any], bool]
    makes: tuple[str, ...] = ()
    switch: str = ""
    is_rival: bool = False

    @property
    def rule(self) -> str:
        """The rule that a key breaks without its owner."""
        return f"has no effect {'beside' if self.is_rival else 'without'} {self.text}"

    @property
    def fix(self) -> str:
        return "Leave it out" if self.is_rival else f"Leave it out, or set {self.text}"


def of_kind(text: str, *kinds: str) -> Owner:
    """The owner of keys that only some kinds of a section have; arguments as `Owner.text`, `Section.KINDS`."""
    return Owner(text, lambda section: section.kind in kinds)


def no_password(place: str) -> AfterValidator:
    """Refuse an address with a password.

    Args:
        place: The environment variable or key for it.
    """

    def checked(address: str) -> str:
        if urlsplit(address).password is not None:
            rule = "holds a password, which the run directory and its logs would keep"
            raise ConfigError("", NO_VALUE, rule, f"Leave it out: it belongs into {place}")
        return address

    return AfterValidator(checked)


class Section(BaseModel):
    """A part of the configuration: frozen; unknown keys, infinite numbers and NaN are refused.

    Attributes:
        may_change: Whether its keys may change when a run is resumed.
        KINDS: Keys of which one at most is set; it says the section's kind.
        OWNER: The owner of all keys but those that make it; None: the section always has an effect.
        OWNED: More owners of its keys, and those of keys further within, by their paths.
        REMOVED: Keys that older runs have stored, with the value that then had no effect.
        BEFORE: Keys that older runs lack, with the value that they then had: a run keeps its arithmetic.
        RENAMED: Values of keys that older runs have stored, each with its present name, and rule and fix of its
            refusal elsewhere.
    """

    may_change: ClassVar[bool] = False
    KINDS: ClassVar[tuple[str, ...]] = ()
    OWNER: ClassVar[Owner | None] = None
    OWNED: ClassVar[Mapping[str, tuple[Owner, ...]]] = {}
    REMOVED: ClassVar[Mapping[str, Any]] = {}
    BEFORE: ClassVar[Mapping[str, Any]] = {}
    RENAMED: ClassVar[Mapping[str, tuple[str, str, str, str]]] = {}
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())

    @property
    def kind(self) -> str:
        """The key of KINDS that is set; empty without one."""
        return next((key for key in self.KINDS if not _is_off(getattr(self, key))), "")

    @property
    def used(self) -> bool:
        return bool(self.kind)

    def wrong(self, key: str, rule: str, fix: str) -> ConfigError:
        """The error of a key of this section, or of one within, whose value breaks a rule."""
        return ConfigError(key, attrgetter(key)(self), rule, fix)

    def default_of(self, key: str) -> Any:
        """The value of a key that is left out."""
        return type(self).model_fields[key].get_default(call_default_factory=True, validated_data={})

    def missing_owner(self, path: str, *, is_strict: bool = True) -> Owner | None:
        """The owner of a key that is absent; None where the key has an effect.

        Args:
            path: The key, or one further within.
            is_strict: Whether a key has no effect either whose switch is written as off.
        """
        section, key = self._place(path)
        for holder, name in ((self, path), (section, key)):
            for owner in owners_of(type(holder), name):
                is_switched_off = bool(owner.switch) and {owner.switch, key} <= section.model_fields_set
                if not owner.is_there(holder) and (is_strict or not is_switched_off):
                    return owner
        return None

    @model_validator(mode="before")
    @classmethod
    def _with_the_keys_of_now(cls, keys: Any, info: ValidationInfo) -> Any:
        if not isinstance(keys, dict):
            return keys
        if not is_stored(info):
            cls.refuse_old_names(keys)
            return keys
        kept = {key: value for key, value in keys.items() if key not in cls.REMOVED or value != cls.REMOVED[key]}
        renamed = {key: now for key, (before, now, *_) in cls.RENAMED.items() if keys.get(key) == before}
        return {**cls.BEFORE, **kept, **renamed}

    @classmethod
    def refuse_old_names(cls, keys: Mapping[str, Any]) -> None:
        """Refuse a value by a name that only stored runs have.

        Raises:
            ConfigError: Names the key and both names.
        """
        for key, (before, _, rule, fix) in cls.RENAMED.items():
            if keys.get(key) == before:
                raise ConfigError(key, before, rule, fix)

    @model_validator(mode="after")
    def _keys_have_their_owners(self, info: ValidationInfo) -> Self:
        """Refuse a second kind, and a key that is written where it has no effect, also with its default."""
        kinds = [key for key in self.KINDS if not _is_off(getattr(self, key))]
        if len(kinds) > 1:
            raise ConfigError(kinds[1], NO_VALUE, f"stands beside {kinds[0]}, and it is one of them", "Leave one out")
        for key in self._owned_keys():
            owner, value = self.missing_owner(key, is_strict=False), attrgetter(key)(self)
            if owner is None or not self._is_written(key) or _is_off(value):
                continue
            section, name = self._place(key)
            if not (is_stored(info) and value == section.default_of(name)):
                raise self.wrong(key, owner.rule, owner.fix)
        return self

    def problems(self) -> Iterator[ConfigError]:
        """The rules that its keys break together; the first one refuses the section."""
        yield from ()

    @model_validator(mode="after")
    def _has_no_problem(self) -> Self:
        if problem := next(self.problems(), None):
            raise problem
        return self

    @model_serializer(mode="wrap")
    def _of_its_kind(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """The keys that have an effect: a stored run has no others."""
        keys: dict[str, Any] = dump(self)
        for path in self._owned_keys():
            *parents, key = path.split(".")
            section = reduce(lambda section, part: section.get(part, {}), parents, keys)
            if key in section and self.missing_owner(path, is_strict=False) is not None:
                del section[key]
        return keys

    def _place(self, path: str) -> tuple[Section, str]:
        """The section within that has a key, and the key's name there."""
        parents, _, key = path.rpartition(".")
        return (attrgetter(parents)(self) if parents else self), key

    def _owned_keys(self) -> Iterator[str]:
        yield from type(self).model_fields
        yield from (key for key in self.OWNED if key not in type(self).model_fields)

    def _is_written(self, path: str) -> bool:
        section: Section = self
        for part in path.split("."):
            if part not in section.model_fields_set:
                return False
            section = getattr(section, part)
        return True


@cache
def owners_of(section: type[Section], key: str) -> tuple[Owner, ...]:
    """The owner of the section, and those of a key of it, or of one further within."""
    owned = section.OWNED.get(key, ())
    if key not in section.model_fields:
        return owned
    of_section = (section.OWNER,) if section.OWNER is not None and key not in section.OWNER.makes else ()
    return *of_section, *(part for part in section.model_fields[key].metadata if isinstance(part, Owner)), *owned


def _is_off(value: Any) -> bool:
    return value in _OFF or (isinstance(value, Section) and bool(value.KINDS) and not value.used)


def is_stored(info: ValidationInfo) -> bool:
    """Whether the file is of a run, which may be stored by a version whose keys had other owners."""
    return bool(info.context and info.context.get("is_stored"))
