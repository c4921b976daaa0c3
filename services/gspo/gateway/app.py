"""The gateway: programs of others talk to the policy while it trains, by the APIs of OpenAI and Anthropic.

With an agent it also offers the run's tasks to workers, and records what they ask of the policy.

waits for: requests, workers. It ends with the run.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

from gspo.common.model.files import model_folder
from gspo.common.service.app import App, Service, run_app
from gspo.gateway.chat_api import chat_api
from gspo.gateway.generators import Generators
from gspo.gateway.sessions.board import Board
from gspo.gateway.sessions.session_store import BYTES_A_TOKEN, LEAST_ROLLOUT_BYTES, SessionStore


async def run_gateway(service: Service) -> None:
    """Answer requests until the run ends or a signal comes."""
    await run_app(service, startup, authorizes_itself=True, ends_with_run=True)


@asynccontextmanager
async def startup(service: Service) -> AsyncIterator[App]:
    """Read tokenizer and chat template, and open the HTTP API."""
    generators = Generators(service)
    store = SessionStore(
        service.redis,
        service.keys,
        service.config.agent.lease_s,
        service.uid,
        most_bytes=max(LEAST_ROLLOUT_BYTES, BYTES_A_TOKEN * service.config.algorithm.longest_rollout),
    )
    service.activity.set("busy", "reading the tokenizer")
    service.http_api = await chat_api(service, model_folder(service.config.model), generators, store)
    service.activity.set("waiting", "requests", f"as {service.config.gateway.model_name}")
    main = Board(service, store).run if service.config.agent.used else partial(_until_stopping, service)
    yield App(main, background={"generators": generators.run})


async def _until_stopping(service: Service) -> None:
    await service.stopping.wait()
