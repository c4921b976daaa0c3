"""The REST app: routes, who may call them, and bounds on what they are sent. The description is at /docs, whose page
needs no internet.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from fastapi_offline import FastAPIOffline

from gspo.common.network.http_guard import ASGIApp, BoundedBodies
from gspo.reward.http_api.access import MAX_BODY_BYTES, add_error_answers
from gspo.reward.http_api.routes import ApiDependencies, make_router
from gspo.reward.http_api.submission_body import submission_schemas

_MEANING = """Reward functions and environments of running trainings.

Submit a Python function, try it, activate it: seconds later it scores. It runs in a sandbox, under limits of its own.
Where the service has tokens, send one as `Authorization: Bearer TOKEN`; the role `read` looks, `submit` changes."""


def rest_app(desk: ApiDependencies) -> ASGIApp:
    """The app; it knows its callers itself, and asks before it reads a body."""
    app = FastAPIOffline(title="gspo reward", version=version("gspo"), description=_MEANING)
    describe = app.openapi

    def openapi() -> dict[str, Any]:
        """The description, with the parts of a submission, whose body is read by hand."""
        found = describe()
        found["components"]["schemas"] |= submission_schemas()
        return found

    app.openapi = openapi  # type: ignore[method-assign] # as FastAPI's own pages advise
    app.include_router(make_router(desk))
    add_error_answers(app)
    return desk.guard.before(BoundedBodies(app, MAX_BODY_BYTES))
