"""The bodies of the REST API: its replies, and its requests; a submission is JSON, or a form with an uploaded file."""

from __future__ import annotations

import codecs
import io
import json
import tokenize
from typing import Annotated, Any, Literal

from fastapi import Request
from pydantic import BaseModel, ConfigDict, FailFast, Field, TypeAdapter, ValidationError, model_validator
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException

from gspo.common.network.http_server import FORM_TYPE, JSON_TYPE
from gspo.reward.functions.library import Function
from gspo.reward.http_api.access import MAX_BODY_BYTES, cut, problems_of
from gspo.reward.registry.records import (
    AuditLine,
    Content,
    Kind,
    PlainJson,
    RegisteredName,
    RequestBody,
    RequestedLimits,
    StoredSignature,
    Submission,
    Version,
    has_few_columns,
)
from gspo.reward.registry.sync import Change
from gspo.reward.registry.usage import VersionUsage
from gspo.reward.submissions.admission import InputRefusedError, Problem

MAX_ROWS, MAX_MESSAGES = 64, 1024
Messages = Annotated[list[dict[str, Any]], Field(max_length=MAX_MESSAGES)]
_PLAIN: TypeAdapter[Any] = TypeAdapter(PlainJson)
_REFERENCE = "#/components/schemas/{model}"
# As Python names them. Others are not text, or take long to decode.
_ENCODINGS = ("utf-8", "utf-8-sig", "ascii", "iso8859-1", "cp1252")
_JSON_FIELDS = ("limits", "tests", "activate", "modules")
SOURCE = """def reward(completions, answer, **columns):
    return [float(text.strip() == right) for text, right in zip(completions, answer)]
"""
ENVIRONMENT = """def reset(task):
    return {"left": task["tries"], "number": task["number"]}, "Guess a number."

def step(state, action):
    state["left"] -= 1
    right = action.strip() == str(state["number"])
    return state, "Right." if right else "No.", float(right), right or state["left"] == 0
"""
EXAMPLES: dict[str, Any] = {
    "a reward function with a test case": {
        "value": {
            "name": "exact",
            "source": SOURCE,
            "limits": {"timeout_s": 5.0},
            "tests": [{"input": {"prompt": "2+2=", "completion": "4", "answer": "4"}, "expected": 1.0}],
        }
    },
    "an environment": {
        "value": {
            "name": "guess",
            "kind": "environment",
            "source": ENVIRONMENT,
            "tests": [{"input": {"task": {"number": 7, "tries": 2}, "actions": ["3", "7"]}, "expected": 1.0}],
        }
    },
}
_SCHEMA = Submission.model_json_schema(ref_template=_REFERENCE)
# The parts of a submission by name, as its description refers to them.
SUBMISSION_SCHEMAS: dict[str, Any] = _SCHEMA.pop("$defs")


class RewardView(BaseModel):
    """One name."""

    name: str
    kind: Kind
    origin: Literal["registered", "configured"] = Field(
        description="Handed in over REST, or named in the run's configuration, whose functions stay as they are"
    )
    active: str | None = Field(description="Version that scores where none is asked for; null where it is retired")
    retired: bool = False
    revision: int = Field(0, description="Counts changes of the name")
    versions: int = Field(1, description="How many versions it has")
    entry: str = Field(description="The function in its source; empty for an environment")
    convention: str = Field(description="trl, verl, verl_batch, openrlhf or environment")
    source: str = Field("", description="File or address of a configured function")
    unreadable: str = Field("", description="Why it cannot be read, where that is so; it scores nothing then")

    @classmethod
    def registered(cls, name: RegisteredName, shown: Content | None, unreadable: str = "") -> RewardView:
        """A submitted function; `shown` is the content of its active version, else of its newest."""
        signature = shown.signature if shown else StoredSignature()
        return cls(
            name=name.name,
            kind=name.kind,
            origin="registered",
            active=name.active or None,
            retired=name.retired,
            revision=name.revision,
            versions=len(name.versions),
            entry=signature.entry,
            convention=signature.convention,
            unreadable=unreadable,
        )

    @classmethod
    def configured(cls, function: Function) -> RewardView:
        """A function of the run's configuration."""
        signature = function.callee.signature
        return cls(
            name=function.code.name,
            kind=function.code.kind,
            origin="configured",
            active=function.code.version,
            entry=signature.entry,
            convention=signature.convention,
            source=function.code.filename,
        )


class RewardList(BaseModel):
    """Every name, configured ones first."""

    rewards: list[RewardView]


class VersionView(BaseModel):
    """One version under a name."""

    name: str
    version: str = Field(description="SHA-256 of the source; with kind, entry, limits and modules behind it if set")
    kind: Kind
    active: bool
    entry: str
    convention: str
    limits: RequestedLimits
    tests: int = Field(description="Test cases that it passed")
    submitted_by: str
    submitted_unix_s: float
    unreadable: str = Field("", description="Why it cannot be read, where that is so; it can be removed")

    @classmethod
    def of(cls, name: RegisteredName, version: str, content: Content | None, unreadable: str = "") -> VersionView:
        """A version; `content` is None if it cannot be read, for the reason `unreadable`."""
        origin, signature = name.versions[version], content.signature if content else StoredSignature()
        return cls(
            name=name.name,
            version=version,
            kind=name.kind,
            active=name.active == version,
            entry=signature.entry,
            convention=signature.convention,
            limits=content.limits if content else RequestedLimits(),
            tests=len(content.tests) if content else 0,
            submitted_by=origin.by,
            submitted_unix_s=origin.unix_s,
            unreadable=unreadable,
        )


class VersionList(BaseModel):
    """Every version of a name, the oldest first."""

    versions: list[VersionView]


class SubmissionView(VersionView):
    """A registered version."""

    new: bool = Field(description="False if the name had this version already")


class SourceView(BaseModel):
    """The source of one version."""

    name: str
    version: str
    source: str
    modules: dict[str, str] = Field({}, description="The modules that it takes along, by their paths")


class UsageList(BaseModel):
    """Calls of a name's versions, the active one first."""

    usage: list[VersionUsage]


class AuditList(BaseModel):
    """Changes, the newest first."""

    lines: list[AuditLine]


class ActivateBody(RequestBody):
    """The version that shall score."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"version": "9f86d081884c7d65"}]})
    version: Version = Field(description="Whole, or its first 8 or more characters")
    if_active: Version | Literal[""] | None = Field(
        None, description="Only while this version is active (empty: while none is); else 409"
    )


class ActivationView(BaseModel):
    """The active version after a change, and the one before."""

    name: str
    active: str | None
    was: str | None
    revision: int

    @classmethod
    def of(cls, change: Change) -> ActivationView:
        """An activation or retirement."""
        name = change.name
        return cls(name=name.name, active=name.active or None, was=change.line.was or None, revision=name.revision)


class RemovalView(BaseModel):
    """A removed version."""

    name: str
    removed: str = Field(description="The version")


class TrialRow(BaseModel):
    """One answer to score; every further field is a column of the data set."""

    model_config = ConfigDict(extra="allow", strict=True)
    prompt: str | Messages = Field("", description="Text, or chat messages")
    completion: str = Field(description="The answer's text")

    _has_few_columns = model_validator(mode="before")(has_few_columns)

    @model_validator(mode="after")
    def _can_be_passed_on(self) -> TrialRow:
        _PLAIN.validate_python(self.model_dump())
        return self


class TryBody(RequestBody):
    """The input of a trial: rows for a reward, a task and actions for an environment."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"rows": [{"prompt": "12+30=", "completion": "42", "answer": "42"}]}],
        }
    )
    rows: Annotated[list[TrialRow], FailFast(), Field(max_length=MAX_ROWS)] = Field(
        [], description="For a reward function"
    )
    task: PlainJson = Field(None, description="For an environment: the argument of reset")
    actions: Annotated[list[str], Field(max_length=MAX_ROWS)] = Field([], description="For an environment: its steps")
    version: Version | None = Field(None, description="The active one by default")


async def read_submission(request: Request) -> Submission:
    """The submission of a request.

    Raises:
        HTTPException: It is neither JSON nor a form.
        InputRefusedError: A field is missing, unknown or wrong.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == JSON_TYPE:
        text = (await request.body()).removeprefix(codecs.BOM_UTF8)
    elif kind == FORM_TYPE:
        text = json.dumps(await _read_form(request)).encode()
    else:
        raise HTTPException(
            415, f"send {JSON_TYPE}, or {FORM_TYPE} with the source as `file`; this is {cut(kind) or 'neither'}"
        )
    try:
        return Submission.model_validate_json(text)
    except ValidationError as error:
        errors = error.errors(include_url=False, include_context=False, include_input=False)
        raise InputRefusedError(problems_of(errors)) from error


async def _read_form(request: Request) -> dict[str, Any]:
    """The fields of a form; limits and tests are JSON in it."""
    fields: dict[str, Any] = {}
    async with request.form(max_files=1, max_fields=16, max_part_size=MAX_BODY_BYTES) as form:
        for name, value in form.multi_items():
            if isinstance(value, str):
                try:
                    fields[name] = json.loads(value) if name in _JSON_FIELDS else value
                except (ValueError, RecursionError) as error:
                    raise _wrong(name, f"is not JSON ({error})") from error
            elif name == "file":
                fields["source"] = await _read_source(value)
            else:
                raise _wrong(name, "is a file; the source is uploaded as `file`")
    return fields


async def _read_source(file: UploadFile) -> str:
    data = await file.read()
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        if codecs.lookup(encoding).name not in _ENCODINGS:
            raise _wrong("file", f"is written in the encoding {encoding[:100]!r}; save it as UTF-8")
        return io.TextIOWrapper(io.BytesIO(data), encoding).read()
    except (SyntaxError, ValueError) as error:
        raise _wrong("file", f"is not Python text ({error})") from error


def _wrong(field: str, text: str) -> InputRefusedError:
    field = cut(field)
    return InputRefusedError([Problem("field", f"{field}: {text}", field=field)])


def request_body() -> dict[str, Any]:
    """The body of a submission as /docs describes it."""
    form = {
        "type": "object",
        "required": ["name", "file"],
        "additionalProperties": False,
        "properties": {
            "name": _SCHEMA["properties"]["name"],
            "file": {"type": "string", "format": "binary", "description": "The Python file"},
            "kind": _SCHEMA["properties"]["kind"],
            "entry": {"type": "string", "pattern": "^[A-Za-z_][A-Za-z0-9_]{0,99}$"},
            "modules": {"type": "string", "description": "As JSON", "examples": ['{"helpers.py": "..."}']},
            "limits": {"type": "string", "description": "As JSON", "examples": ['{"timeout_s": 5}']},
            "tests": {"type": "string", "description": "As JSON", "examples": ["[]"]},
            "activate": {"type": "string", "enum": ["true", "false"]},
        },
    }
    content = {JSON_TYPE: {"schema": _SCHEMA, "examples": EXAMPLES}, FORM_TYPE: {"schema": form}}
    return {"requestBody": {"required": True, "content": content}}
