"""The REST app: its endpoints, the callers that it admits, and the bounds on their bodies.

Endpoints translate between HTTP and the registry, admission and trials. The description is at /docs, whose page needs
no internet.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path, Query, Request
from fastapi_offline import FastAPIOffline
from starlette.exceptions import HTTPException

from gspo.common.errors import nearest
from gspo.common.network.http_server import ASGIApp, BoundedBodies
from gspo.reward.functions.library import Function, Library
from gspo.reward.http_api.access import BEARER, MAX_BODY_BYTES, AccessControl, Refusal, add_error_answers
from gspo.reward.http_api.bodies import (
    SUBMISSION_SCHEMAS,
    ActivateBody,
    ActivationView,
    AuditList,
    RemovalView,
    RewardList,
    RewardView,
    SourceView,
    SubmissionView,
    TryBody,
    UsageList,
    VersionList,
    VersionView,
    read_submission,
    request_body,
)
from gspo.reward.registry.records import (
    Content,
    FunctionName,
    NotRegisteredError,
    RegisteredName,
    UnreadableError,
    Version,
)
from gspo.reward.registry.store import Registry
from gspo.reward.registry.usage import UsageCounter
from gspo.reward.sandbox.calls import CallError
from gspo.reward.submissions.admission import Admission, InputRefusedError, Problem
from gspo.reward.submissions.callers import Callers
from gspo.reward.submissions.trials import TrialView, try_actions, try_rows

NamePath = Annotated[FunctionName, Path(description="Name of the function, as runs use it", examples=["exact"])]
VersionPath = Annotated[Version, Path(description="Whole, or its first 8 or more characters")]
VersionQuery = Annotated[Version | None, Query(description="The active one by default")]
_MEANINGS = {
    400: "The request cannot be read",
    401: "The token is missing or wrong",
    403: "The token's role is `read`",
    404: "There is no such name or version",
    409: "The present state of the registry does not allow it",
    413: "The body is too large",
    415: "The body is neither JSON nor a form",
    422: "Refused: each problem with its rule, and its line and column in the source if it has them",
    429: "Too many calls; Retry-After has the seconds to wait",
    503: "Too many large bodies at a time; try again in a moment",
}
_DESCRIPTION = """Reward functions and environments of running trainings.

Submit a Python function, try it, activate it: seconds later it scores. It runs in a sandbox, under limits of its own.
If the service has tokens, send one as `Authorization: Bearer TOKEN`. The role `read` may read, `submit` may change."""
_SUBMIT = """Submit a reward function or an environment. It is compiled, its imports are compared with
`reward.allowed_packages`, it is loaded in the sandbox, its signature is recognised, and its test cases are run.
If all of this passes, it is registered. The version is the content's hash: equal content has an equal version.

With a file: `curl -F name=exact -F file=@reward.py http://127.0.0.1:PORT/v1/rewards`"""


@dataclass(frozen=True)
class RewardApi:
    """The endpoints, on the parts of the service that they use."""

    library: Library
    registry: Registry
    admission: Admission
    usage: UsageCounter

    async def submit_reward(self, request: Request) -> SubmissionView:
        submission = await read_submission(request)
        if submission.name in self.library.configured:
            raise HTTPException(
                409, f"the run's configuration has a function '{submission.name}'. Give it another name"
            )
        if beyond := self.library.beyond_limits(submission.kind, submission.limits):
            raise InputRefusedError([Problem("field", text, field=field) for field, text in beyond])
        await self.registry.check_quotas(submission)
        known, _ = await self.registry.readable(submission.version)
        # Without new test cases, a known version need not be checked again.
        content = (None if submission.tests else known) or await self.admission.admit(submission, _who(request))
        name, new = await self.registry.submit(submission, content, who=_who(request))
        return SubmissionView(**dict(VersionView.of(name, content.version, content)), new=new)

    async def list_rewards(self) -> RewardList:
        """Every name: those of the run's configuration, and those that were submitted."""
        configured = [RewardView.configured(function) for function in self.library.configured.values()]
        names = [name for name in await self.registry.names() if name.name not in self.library.configured]
        unreadable = [
            RewardView.registered(RegisteredName.empty(name, "reward"), None, reason)
            for name, reason in self.registry.copy.unreadable.items()
        ]
        return RewardList(rewards=[*configured, *[await self._view(name) for name in names], *unreadable])

    async def get_reward(self, name: NamePath) -> RewardView:
        """One name."""
        if function := self.library.configured.get(name):
            return RewardView.configured(function)
        return await self._view(await self._registered_name(name))

    async def _view(self, name: RegisteredName) -> RewardView:
        return RewardView.registered(name, *await self.registry.readable(_shown(name)))

    async def list_versions(self, name: NamePath) -> VersionList:
        """Every version of a submitted function, the oldest first."""
        registered = await self._registered_name(name)
        return VersionList(versions=[await self._version_view(registered, version) for version in registered.versions])

    async def get_version(self, name: NamePath, version: VersionPath) -> VersionView:
        """One version of a submitted function."""
        registered = await self._registered_name(name)
        return await self._version_view(registered, registered.find(version))

    async def _version_view(self, name: RegisteredName, version: str) -> VersionView:
        return VersionView.of(name, version, *await self.registry.readable(version))

    async def remove_version(self, request: Request, name: NamePath, version: VersionPath) -> RemovalView:
        """Remove a version for good, which counts under reward.quotas; the active one is refused (409)."""
        await self._registered_name(name)
        return RemovalView(name=name, removed=await self.registry.remove(name, version, who=_who(request)))

    async def get_source(self, name: NamePath, version: VersionQuery = None) -> SourceView:
        """The source of a version."""
        if function := self.library.configured.get(name):
            code = function.code
            return SourceView(name=name, version=code.version, source=code.text, modules=dict(code.modules))
        content = await self._content(name, version)
        return SourceView(name=name, version=content.version, source=content.source, modules=content.modules)

    async def _content(self, name: str, version: str | None) -> Content:
        registered = await self._registered_name(name)
        return await self.registry.content(registered.find(version) if version else _shown(registered))

    async def get_usage(self, name: NamePath, version: VersionQuery = None) -> UsageList:
        """Calls, failures by kind, times and the last failure, over all replicas; of every version by default."""
        if function := self.library.configured.get(name):
            versions: Sequence[str] = [function.code.version]
        else:
            registered = await self._registered_name(name)
            newest_first = list(registered.versions)[::-1]
            active_first = sorted(newest_first, key=lambda known: known != registered.active)
            versions = [registered.find(version)] if version else active_first
        return UsageList(usage=[await self.usage.read(name, known) for known in versions])

    async def get_log(self, name: NamePath, limit: Annotated[int, Query(ge=1, le=1000)] = 100) -> AuditList:
        """The changes of a name, each with its caller and time; the newest first."""
        await self._registered_name(name)
        return AuditList(lines=await self.registry.audit(name, limit))

    async def try_reward(self, name: NamePath, body: TryBody) -> TrialView:
        """Score rows, or play an environment's turns: scores, time and printed output. Nothing of it is counted."""
        function = await self._function(name, body.version)
        wrong = "rows" if function.code.kind == "environment" else "actions"
        if getattr(body, wrong) or (wrong == "rows" and body.task is None):
            fields = "`task` and `actions`" if wrong == "rows" else "`rows`"
            text = f"{name} is of kind {function.code.kind}: send {fields}"
            raise InputRefusedError([Problem("field", text, field=wrong)])
        if function.code.kind == "environment":
            return await try_actions(function, body.task, body.actions)
        return await try_rows(function, [row.model_dump() for row in body.rows])

    async def _function(self, name: str, version: str | None) -> Function:
        if function := self.library.configured.get(name):
            return function
        content = await self._content(name, version)
        try:
            return await self.library.load(name, content)
        except CallError as error:
            text = f"version {content.version[:12]} cannot be loaded: {error}"
            problem = Problem("load", text, traceback=error.traceback, output=error.output)
            raise InputRefusedError([problem]) from error

    async def activate(self, request: Request, name: NamePath, body: ActivateBody) -> ActivationView:
        """Make a version the active one, a newer or an older; current calls finish on theirs."""
        await self._registered_name(name)
        change = await self.registry.activate(name, body.version, who=_who(request), if_active=body.if_active)
        return ActivationView.of(change)

    async def retire(self, request: Request, name: NamePath) -> ActivationView:
        """Leave the name without an active version. A run that pins a version still gets it."""
        await self._registered_name(name)
        return ActivationView.of(await self.registry.retire(name, who=_who(request)))

    async def _registered_name(self, name: str) -> RegisteredName:
        """A submitted name.

        Raises:
            HTTPException: There is none; it names the nearest one.
        """
        configured = self.library.configured
        if name in configured:
            raise HTTPException(404, f"'{name}' is of the run's configuration: it has one version, which stays")
        try:
            return await self.registry.name(name)
        except UnreadableError:
            raise
        except NotRegisteredError:
            known = [*configured, *(known.name for known in await self.registry.names())]
            raise HTTPException(404, f"there is no reward function '{name}'. {nearest(name, known)}") from None


def _shown(name: RegisteredName) -> str:
    """Its active version, else its newest."""
    return name.active or list(name.versions)[-1]


def _who(request: Request) -> str:
    return str(request.state.caller.name)


def rest_app(api: RewardApi, callers: Callers, calls_per_minute: int) -> ASGIApp:
    """The app behind its access control, which asks for a token before a body is read.

    Args:
        calls_per_minute: Limit of each kind that changes something, by each caller.
    """
    app = FastAPIOffline(title="gspo reward", version=version("gspo"), description=_DESCRIPTION)
    describe = app.openapi

    def openapi() -> dict[str, Any]:
        """The description, with the parts of a submission: its body is read by hand."""
        description = describe()
        description["components"]["schemas"] |= SUBMISSION_SCHEMAS
        return description

    app.openapi = openapi  # type: ignore[method-assign] # as FastAPI's own pages advise
    app.include_router(_make_router(api))
    add_error_answers(app)
    return AccessControl(BoundedBodies(app, MAX_BODY_BYTES), callers, calls_per_minute)


def _make_router(api: RewardApi) -> APIRouter:
    """Every endpoint, each with its possible refusals besides that of the token."""
    router = APIRouter(prefix="/v1/rewards", tags=["reward functions"], dependencies=[Depends(BEARER)])

    def add(method: str, path: str, endpoint: Callable[..., Any], *statuses: int, **more: Any) -> None:
        responses: dict[int | str, dict[str, Any]] = {
            status: {"model": Refusal, "description": _MEANINGS[status]} for status in sorted({401, *statuses})
        }
        router.add_api_route(path, endpoint, methods=[method], responses=responses, **more)

    known, body, change = (404, 422), (400, 413, 415, 503), (403, 429)
    submit = {"status_code": 201, "description": _SUBMIT, "openapi_extra": request_body()}
    add("GET", "", api.list_rewards)
    add("POST", "", api.submit_reward, 409, 422, *body, *change, **submit)
    add("GET", "/{name}", api.get_reward, *known)
    add("DELETE", "/{name}", api.retire, *known, *change)
    add("GET", "/{name}/versions", api.list_versions, *known)
    add("GET", "/{name}/versions/{version}", api.get_version, *known)
    add("DELETE", "/{name}/versions/{version}", api.remove_version, 409, *known, *change)
    add("GET", "/{name}/source", api.get_source, *known)
    add("GET", "/{name}/usage", api.get_usage, *known)
    add("GET", "/{name}/log", api.get_log, *known)
    add("POST", "/{name}/try", api.try_reward, *known, *body, *change)
    add("POST", "/{name}/activate", api.activate, 409, *known, *body, *change)
    return router
