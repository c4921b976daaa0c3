"""A submission: a function's source with its kind, entry point, limits and test cases; and its version."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    StringConstraints,
    model_validator,
)

Kind = Literal["reward", "environment"]
FunctionName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
Version = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{8,64}$")]

MAX_SOURCE_CHARS = 256 * 1024
MAX_TESTS = 64
MAX_UNKNOWN_FIELDS, MAX_PARTS, MAX_COLUMNS = 20, 64, 1000
MAX_TIMEOUT_S, MAX_MEMORY_MB = 600, 65_536


def _is_plain_json(value: Any) -> Any:
    """Refuse a value that JSON cannot carry: NaN, infinity, half a surrogate pair, endless numbers."""
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError) as error:
        raise ValueError(f"cannot be written as JSON: {error}") from error
    return value


def _few(most: int, members: str, rule: str) -> Callable[[Any], Any]:
    """A check that refuses a mapping of more than `most`: each member costs time in the event loop."""

    def check(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > most:
            raise ValueError(f"has {len(value)} {members}, and {rule}")
        return value

    return check


_has_few_parts = _few(MAX_PARTS, "parts", f"a function returns at most {MAX_PARTS}")
has_few_columns = _few(MAX_COLUMNS, "columns", f"at most {MAX_COLUMNS} are taken")
Columns = Annotated[dict[str, Any], BeforeValidator(has_few_columns), AfterValidator(_is_plain_json)]
PlainJson = Annotated[Any, AfterValidator(_is_plain_json)]
Finite = Annotated[float, Field(allow_inf_nan=False)]


class RequestBody(BaseModel):
    """A part of a request: unknown fields are refused, text is not read as a number."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _has_few_unknown_fields(cls, value: Any) -> Any:
        """Each unknown field would be a problem of its own; so many are one."""
        if isinstance(value, dict) and len(value) > len(cls.model_fields) + MAX_UNKNOWN_FIELDS:
            raise ValueError(f"has {len(value)} fields, and at most {len(cls.model_fields)} are known")
        return value


class RequestedLimits(RequestBody):
    """The limits of one call; by default those of the service."""

    timeout_s: Annotated[float, Field(gt=0, le=MAX_TIMEOUT_S, allow_inf_nan=False)] | None = Field(
        None, description="Longest a call may take before its process is killed"
    )
    memory_mb: Annotated[int, Field(ge=64, le=MAX_MEMORY_MB)] | None = Field(
        None, description="Address space of the process, in MiB"
    )
    cpu_s: Annotated[float, Field(gt=0, le=MAX_TIMEOUT_S, allow_inf_nan=False)] | None = Field(
        None, description="Processor time that a call may use"
    )


class TestCase(RequestBody):
    """An input with the value that the function must give."""

    __test__ = False  # pytest: not a test class
    input: Columns = Field(
        description="Of a reward: prompt, completion and columns of the data set. Of an environment: task and actions"
    )
    expected: Finite | Annotated[dict[str, Finite], BeforeValidator(_has_few_parts)] = Field(
        description="The number, or the named parts; of an environment the summed reward of all actions"
    )
    tolerance: Annotated[float, Field(ge=0, allow_inf_nan=False)] = Field(
        1e-6, description="Largest difference that passes"
    )


class Submission(RequestBody):
    """A reward function or an environment, as it is handed in."""

    name: FunctionName = Field(description="Its name in runs; versions of one function share it")
    source: Annotated[str, StringConstraints(min_length=1, max_length=MAX_SOURCE_CHARS)] = Field(
        description="Python: one file, importing the standard library and reward.allowed_packages"
    )
    kind: Kind = "reward"
    entry: Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,99}$")] | None = Field(
        None, description="Name of the function, where the source holds more than one. Of a reward only"
    )
    limits: RequestedLimits = RequestedLimits()
    # A million elements of a wrong kind are one problem, not a million.
    tests: Annotated[tuple[TestCase, ...], FailFast(), Field(max_length=MAX_TESTS, strict=False)] = Field(
        (), description="Run before it is accepted; each must give what it expects"
    )
    activate: bool = Field(
        False, description="Make it the name's active version at once; the first version always becomes it"
    )

    @property
    def version(self) -> str:
        """The content's hash: see `version_of`."""
        return version_of(self.source.encode(), self.kind, self.entry, self.limits)


def version_of(
    source: bytes,
    kind: Kind = "reward",
    entry: str | None = None,
    limits: RequestedLimits | None = None,
    args: dict[str, Any] | None = None,
) -> str:
    """SHA-256 of the source, extended by kind (unless reward), entry, limits and args if they are set.

    So the version of a source alone is what `sha256sum` prints, and the same function under other limits is another
    version: it may fail where the first does not.
    """
    further: dict[str, Any] = {"entry": entry, "args": args or None, **(limits.model_dump() if limits else {})}
    further = {key: value for key, value in further.items() if value is not None}
    if kind != "reward":
        further["kind"] = kind
    digest = hashlib.sha256(source)
    if further:
        digest.update(b"\0" + json.dumps(further, sort_keys=True).encode())
    return digest.hexdigest()
