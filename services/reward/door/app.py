"""The REST app: routes, who may call them, and bounds on what they are sent. The description is at /docs.

Neighbours: routes.py and guard.py; services/reward/__main__.py serves it.
"""

from __future__ import annotations

from importlib.metadata import version

from fastapi import FastAPI

from services.reward.door.guard import App, BoundedBodies, add_error_answers
from services.reward.door.routes import Desk, make_router

_MEANING = """Reward functions and environments of running trainings.

Submit a Python function, try it, activate it: seconds later it scores. It runs in a sandbox, under limits of its own.
Where the service has tokens, send one as `Authorization: Bearer TOKEN`; the role `read` looks, `submit` changes."""


def rest_app(desk: Desk) -> App:
    """The app; it checks tokens itself."""
    app = FastAPI(title="gspo reward", version=version("gspo"), description=_MEANING)
    app.include_router(make_router(desk))
    add_error_answers(app)
    return BoundedBodies(app)
