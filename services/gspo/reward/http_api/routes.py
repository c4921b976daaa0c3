"""The calls of REST: submit, look, try, activate, retire.

Each is a few lines: what they mean is in registry.py, admission.py and trials.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path, Query, Request

from gspo.common.errors import nearest
from gspo.reward.functions.library import Function, Library
from gspo.reward.http_api.access import BEARER, AccessControl, RestRefusalError
from gspo.reward.http_api.submission_body import read_submission, request_body
from gspo.reward.http_api.views import (
    ActivateBody,
    ActivationView,
    AuditList,
    ProblemView,
    Refusal,
    RemovalView,
    RewardList,
    RewardView,
    SourceView,
    SubmissionView,
    TrialView,
    TryBody,
    UsageList,
    VersionList,
    VersionView,
    configured_view,
    registered_view,
    tried,
    unreadable_view,
    version_view,
)
from gspo.reward.registry.records import Content, NotRegisteredError, RegisteredName, UnreadableError
from gspo.reward.registry.store import Registry
from gspo.reward.registry.submission import FunctionName, Version
from gspo.reward.registry.usage import UsageCounter
from gspo.reward.sandbox.calls import CallError
from gspo.reward.submissions.admission import Admission
from gspo.reward.submissions.callers import Caller
from gspo.reward.submissions.trials import try_actions, try_rows

NamePath = Annotated[FunctionName, Path(description="What runs call it by", examples=["exact"])]
VersionPath = Annotated[Version, Path(description="Whole, or its first 8 or more characters")]
VersionQuery = Annotated[Version | None, Query(description="The active one where left out")]
_MEANINGS = {
    400: "The request cannot be read",
    401: "The token is missing or wrong",
    403: "The token is one to read",
    404: "There is no such name or version",
    409: "What is registered does not allow it",
    413: "The body is too large",
    415: "The body is neither JSON nor a form",
    422: "Refused: each problem with its rule, and line and column of the source where it has them",
    429: "Too many calls; Retry-After says when to come back",
    503: "Too many large bodies at a time; come back in a moment",
}


@dataclass(frozen=True)
class ApiDependencies:
    """What the routes work with."""

    library: Library
    registry: Registry
    admission: Admission
    usage: UsageCounter
    guard: AccessControl


def make_router(desk: ApiDependencies) -> APIRouter:
    """Every call, each with what it may answer."""
    calls, router = _Endpoints(desk), APIRouter(prefix="/v1/rewards", tags=["reward functions"])

    def add(path: str, endpoint: Callable[..., Any], method: str, **more: Any) -> None:
        router.add_api_route(path, endpoint, methods=[method], dependencies=[Depends(BEARER)], **more)

    one, body, change = (401, 404, 422), (400, 413, 415, 503), (403, 429)
    add("", calls.list_rewards, "GET", responses=_refusals(401))
    add(
        "", calls.submit_reward, "POST", status_code=201, description=_SUBMIT, openapi_extra=request_body(),
        responses=_refusals(401, 409, 422, *body, *change),
    )  # fmt: skip
    add("/{name}", calls.get_reward, "GET", responses=_refusals(*one))
    add("/{name}", calls.retire, "DELETE", responses=_refusals(*one, *change))
    add("/{name}/versions", calls.list_versions, "GET", responses=_refusals(*one))
    add("/{name}/versions/{version}", calls.get_version, "GET", responses=_refusals(*one))
    add(
        "/{name}/versions/{version}", calls.remove_version, "DELETE",
        responses=_refusals(409, *one, *change),
    )  # fmt: skip
    add("/{name}/source", calls.get_source, "GET", responses=_refusals(*one))
    add("/{name}/usage", calls.get_usage, "GET", responses=_refusals(*one))
    add("/{name}/log", calls.get_log, "GET", responses=_refusals(*one))
    add("/{name}/try", calls.try_reward, "POST", responses=_refusals(*one, *body, *change))
    add("/{name}/activate", calls.activate, "POST", responses=_refusals(409, *one, *body, *change))
    return router


_SUBMIT = """Hand in a reward function or an environment. It is compiled, its imports are compared with
`reward.allowed_packages`, it is loaded in the sandbox, its signature is recognised, and its test cases are run;
only then is it kept. The version is the content's hash: the same content again is the same version.

With a file: `curl -F name=exact -F file=@reward.py http://127.0.0.1:PORT/v1/rewards`"""


def _refusals(*statuses: int) -> dict[int | str, dict[str, Any]]:
    return {status: {"model": Refusal, "description": _MEANINGS[status]} for status in sorted(set(statuses))}


class _Endpoints:
    def __init__(self, desk: ApiDependencies) -> None:
        self._desk, self._registry = desk, desk.registry

    async def submit_reward(self, request: Request) -> SubmissionView:
        submission = await read_submission(request)
        if submission.name in self._desk.library.configured:
            raise RestRefusalError(
                409, f"the run's configuration has a function '{submission.name}'. Give it another name"
            )
        if beyond := self._desk.library.beyond_limits(submission.kind, submission.limits):
            problems = [ProblemView(rule="field", text=text, field=field) for field, text in beyond]
            raise RestRefusalError(422, problems[0].text, problems)
        await self._registry.check_quotas(submission)
        content = await self._known(submission.version) if not submission.tests else None
        content = content or await self._desk.admission.admit(submission, _who(request))
        name, new = await self._registry.submit(submission, content, who=_who(request))
        view = version_view(name, content.version, content)
        return SubmissionView(**view.model_dump(), new=new)

    async def _known(self, version: str) -> Content | None:
        """What was admitted before need not be checked again."""
        try:
            return await self._registry.content(version)
        except NotRegisteredError:
            return None

    async def list_rewards(self) -> RewardList:
        """Every name: those of the run's configuration, and those that were submitted."""
        configured = [configured_view(function) for function in self._desk.library.configured.values()]
        names = [one for one in await self._registry.names() if one.name not in self._desk.library.configured]
        unreadable = [unreadable_view(name, reason) for name, reason in self._registry.copy.unreadable.items()]
        return RewardList(rewards=[*configured, *[await self._view(one) for one in names], *unreadable])

    async def get_reward(self, name: NamePath) -> RewardView:
        """One name."""
        if function := self._configured(name):
            return configured_view(function)
        return await self._view(await self._found(name))

    async def _view(self, name: RegisteredName) -> RewardView:
        try:
            return registered_view(name, await self._shown(name))
        except NotRegisteredError as error:
            return registered_view(name, None, unreadable=str(error))

    async def _shown(self, name: RegisteredName) -> Content:
        """Its active version, else its newest."""
        return await self._registry.content(name.active or list(name.versions)[-1])

    async def list_versions(self, name: NamePath) -> VersionList:
        """Every version of a submitted function, the oldest first."""
        found = await self._found(name)
        return VersionList(versions=[await self._version_view(found, version) for version in found.versions])

    async def get_version(self, name: NamePath, version: VersionPath) -> VersionView:
        """One version of a submitted function."""
        found = await self._found(name)
        return await self._version_view(found, found.find(version))

    async def _version_view(self, name: RegisteredName, version: str) -> VersionView:
        try:
            return version_view(name, version, await self._registry.content(version))
        except NotRegisteredError as error:
            return version_view(name, version, None, unreadable=str(error))

    async def remove_version(self, request: Request, name: NamePath, version: VersionPath) -> RemovalView:
        """Remove a version for good; the active one is refused (409). It makes room under reward.quotas."""
        await self._found(name)
        return RemovalView(name=name, removed=await self._registry.remove(name, version, who=_who(request)))

    async def get_source(self, name: NamePath, version: VersionQuery = None) -> SourceView:
        """The source of a version."""
        if function := self._configured(name):
            return SourceView(name=name, version=function.code.version, source=function.code.text)
        content = await self._content(name, version)
        return SourceView(name=name, version=content.version, source=content.source)

    async def _content(self, name: str, version: str | None) -> Content:
        found = await self._found(name)
        return await self._registry.content(found.find(version)) if version else await self._shown(found)

    async def get_usage(self, name: NamePath, version: VersionQuery = None) -> UsageList:
        """Calls, failures by kind, times and the last failure, over all replicas; of every version by default."""
        if function := self._configured(name):
            versions: Sequence[str] = [function.code.version]
        else:
            found = await self._found(name)
            newest_first = list(found.versions)[::-1]
            versions = [found.find(version)] if version else sorted(newest_first, key=lambda one: one != found.active)
        return UsageList(usage=[await self._desk.usage.read(name, one) for one in versions])

    async def get_log(self, name: NamePath, limit: Annotated[int, Query(ge=1, le=1000)] = 100) -> AuditList:
        """Who submitted, activated and retired what, and when; the newest first."""
        await self._found(name)
        return AuditList(lines=await self._registry.audit(name, limit))

    async def try_reward(self, name: NamePath, body: TryBody) -> TrialView:
        """Score rows, or play an environment's turns: scores, time and what it printed. Nothing of it is kept."""
        function = await self._function(name, body.version)
        wrong = "rows" if function.code.kind == "environment" else "actions"
        if getattr(body, wrong) or (wrong == "rows" and body.task is None):
            text = f"{name} is of kind {function.code.kind}: send {_TRY_FIELDS[function.code.kind]}"
            raise RestRefusalError(422, text, [ProblemView(rule="field", text=text, field=wrong)])
        if function.code.kind == "environment":
            trial = await try_actions(function, body.task, body.actions)
        else:
            trial = await try_rows(function, [row.model_dump() for row in body.rows])
        return tried(name, function.code.version, trial)

    async def _function(self, name: str, version: str | None) -> Function:
        if function := self._configured(name):
            return function
        content = await self._content(name, version)
        try:
            return await self._desk.library.load(name, content)
        except CallError as error:
            text = f"version {content.version[:12]} cannot be loaded: {error}"
            problem = ProblemView(rule="load", text=text, traceback=error.traceback, output=error.output)
            raise RestRefusalError(422, text, [problem]) from error

    async def activate(self, request: Request, name: NamePath, body: ActivateBody) -> ActivationView:
        """Make a version the active one, a newer or an older; calls under way finish on theirs."""
        await self._found(name)
        who = _who(request)
        found, was = await self._registry.activate(name, body.version, who=who, if_active=body.if_active)
        return ActivationView(name=name, active=found.active or None, was=was or None, revision=found.revision)

    async def retire(self, request: Request, name: NamePath) -> ActivationView:
        """Leave the name without an active version. A run that pins a version still gets it."""
        await self._found(name)
        found, was = await self._registry.retire(name, who=_who(request))
        return ActivationView(name=name, active=found.active or None, was=was or None, revision=found.revision)

    async def _found(self, name: str) -> RegisteredName:
        """A submitted name.

        Raises:
            RestRefusalError: There is none; with the nearest one that there is.
        """
        configured = self._desk.library.configured
        if name in configured:
            raise RestRefusalError(404, f"'{name}' is of the run's configuration: it has one version, which stays")
        try:
            return await self._registry.name(name)
        except UnreadableError:
            raise
        except NotRegisteredError:
            known = [*configured, *(one.name for one in await self._registry.names())]
            raise RestRefusalError(404, f"there is no reward function '{name}'. {nearest(name, known)}") from None

    def _configured(self, name: str) -> Function | None:
        return self._desk.library.configured.get(name)


def _who(request: Request) -> str:
    caller: Caller = request.state.caller
    return caller.name


_TRY_FIELDS = {"reward": "`rows`", "environment": "`task` and `actions`"}
