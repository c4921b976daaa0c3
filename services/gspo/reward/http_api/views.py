"""The bodies of the REST API: its replies, and its requests besides a submission.

Types alone.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, FailFast, Field, TypeAdapter, model_validator

from gspo.reward.functions.environment_steps import Turn
from gspo.reward.functions.library import Function
from gspo.reward.registry.records import AuditLine, Content, RegisteredName
from gspo.reward.registry.submission import Kind, PlainJson, RequestBody, RequestedLimits, Version, has_few_columns
from gspo.reward.registry.sync import Change
from gspo.reward.registry.usage import VersionUsage
from gspo.reward.sandbox.values import Failure, Value
from gspo.reward.submissions.trials import Trial

MAX_ROWS, MAX_MESSAGES = 64, 1024
Messages = Annotated[list[dict[str, Any]], Field(max_length=MAX_MESSAGES)]
_PLAIN: TypeAdapter[Any] = TypeAdapter(PlainJson)


class ProblemView(BaseModel):
    """One reason for a refusal."""

    rule: str = Field(description="field, syntax, import, signature, load or test")
    text: str
    field: str | None = Field(None, description="The field of the request, where one is at fault")
    line: int | None = Field(None, description="Line of the source, from 1, where one is at fault")
    column: int | None = Field(None, description="Column of that line, from 1")
    traceback: str = ""
    output: str = Field("", description="What the function printed")


class Refusal(BaseModel):
    """Why a call was refused."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "detail": "line 3, column 1: imports 'requests', which is neither in the standard library nor "
                    "among reward.allowed_packages (numpy, sympy). Do without it, or have it added there",
                    "problems": [{"rule": "import", "text": "imports 'requests'", "line": 3, "column": 1}],
                }
            ]
        }
    )
    detail: str
    problems: list[ProblemView] = []


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
    convention: str = Field(description="trl, verl, openrlhf or environment")
    source: str = Field("", description="File or address of a configured function")
    unreadable: str = Field("", description="Why it cannot be read, where that is so; it scores nothing then")


class RewardList(BaseModel):
    """Every name, configured ones first."""

    rewards: list[RewardView]


class VersionView(BaseModel):
    """One version under a name."""

    name: str
    version: str = Field(description="SHA-256 of the source; with kind, entry and limits behind it where given")
    kind: Kind
    active: bool
    entry: str
    convention: str
    limits: RequestedLimits
    tests: int = Field(description="Test cases that it passed")
    submitted_by: str
    submitted_unix_s: float
    unreadable: str = Field("", description="Why it cannot be read, where that is so; it can be removed")


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


class FailureView(BaseModel):
    """Why there is no number."""

    kind: str = Field(description="timeout, memory, crash, forbidden, output_too_large, invalid_return or exception")
    text: str
    traceback: str = Field("", description="Of the function's own code")


class TryResult(BaseModel):
    """One row's score, or one turn of an environment. A failure has no reward."""

    reward: float | None = None
    parts: dict[str, float] = {}
    extras: dict[str, float] = Field({}, description="Reported beside the reward and not counted")
    failure: FailureView | None = None
    observation: Any = Field(None, description="Of an environment's turn: text or chat messages")
    done: bool | None = Field(None, description="Of an environment's turn")


class TrialView(BaseModel):
    """The result of a trial; no run sees it."""

    name: str
    version: str
    results: list[TryResult]
    seconds: float
    output: str = Field(description="The end of the function's output")


def version_view(name: RegisteredName, version: str, content: Content | None, unreadable: str = "") -> VersionView:
    """A version; `content` is None if it cannot be read."""
    origin = name.versions[version]
    return VersionView(
        name=name.name,
        version=version,
        kind=name.kind,
        active=name.active == version,
        entry=content.signature.entry or content.entry if content else "",
        convention=content.signature.convention or content.kind if content else "",
        limits=content.limits if content else RequestedLimits(),
        tests=len(content.tests) if content else 0,
        submitted_by=origin.by,
        submitted_unix_s=origin.unix_s,
        unreadable=unreadable,
    )


def registered_view(name: RegisteredName, shown: Content | None, unreadable: str = "") -> RewardView:
    """A submitted function; `shown` is its active version, else its newest."""
    return RewardView(
        name=name.name,
        kind=name.kind,
        origin="registered",
        active=name.active or None,
        retired=name.retired,
        revision=name.revision,
        versions=len(name.versions),
        entry=shown.signature.entry or shown.entry if shown else "",
        convention=shown.signature.convention or shown.kind if shown else "",
        unreadable=unreadable,
    )


def unreadable_view(name: str, reason: str) -> RewardView:
    """A name that cannot be read."""
    return RewardView(
        name=name,
        kind="reward",
        origin="registered",
        active=None,
        versions=0,
        entry="",
        convention="",
        unreadable=reason,
    )


def configured_view(function: Function) -> RewardView:
    """A function of the run's configuration."""
    signature = function.callee.signature
    return RewardView(
        name=function.code.name,
        kind=function.code.kind,
        origin="configured",
        active=function.code.version,
        entry=signature.entry,
        convention=signature.convention,
        source=function.code.filename,
    )


def activation_view(change: Change) -> ActivationView:
    """An activation or retirement."""
    name = change.name
    return ActivationView(
        name=name.name, active=name.active or None, was=change.line.was or None, revision=name.revision
    )


def trial_view(name: str, version: str, trial: Trial) -> TrialView:
    """A trial of a function."""
    results = [_row_view(result) for result in trial.results] + [_turn_view(turn) for turn in trial.turns]
    return TrialView(name=name, version=version, results=results, seconds=trial.seconds, output=trial.output)


def _row_view(result: Value | Failure) -> TryResult:
    if isinstance(result, Failure):
        return TryResult(failure=_failure_view(result))
    return TryResult(reward=result.reward, parts=result.parts, extras=result.extras)


def _turn_view(turn: Turn | Failure) -> TryResult:
    if isinstance(turn, Failure):
        return TryResult(failure=_failure_view(turn))
    return TryResult(reward=turn.reward, observation=json.loads(turn.observation_json), done=turn.done)


def _failure_view(failure: Failure) -> FailureView:
    return FailureView(kind=failure.kind, text=failure.reason, traceback=failure.traceback)
