"""A gateway with its clients over HTTP, and generators behind it that may be lost; one engine serves them all."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anthropic import AsyncAnthropic
from openai import AsyncOpenAI

from gspo.common.network.grpc_server import GrpcApi, GrpcServer
from gspo.common.network.http_server import HttpServer
from gspo.common.service.app import Service
from gspo.common.service.health import HealthProbes
from gspo.common.streams.instances import Instance, Registration
from gspo.environments.function_environment import FunctionEnvironment
from gspo.gateway.app import startup
from gspo.generation.engine.api import Completion, EngineSampling, Tokens
from gspo.generation.rollout.driver import RolloutDriver
from gspo.generation.rollout.episodes import Episodes
from gspo.generation.servicer import SERVICE_NAME, GenerationGrpcServicer
from gspo_proto import generation_pb2_grpc
from tests.integration.generation.conftest import SharedEngine
from tests.support.push_peers import IdleLoop, service_of
from tests.support.service_process import make_run
from tests.support.tiny_model import make_tokenizer

MESSAGES: Any = [{"role": "user", "content": "Say something long."}]
TOKENIZER = make_tokenizer()
PROMPT = TOKENIZER.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)
GREEDY: dict[str, Any] = {"model": "policy", "temperature": 0.0, "max_tokens": 40}


class SpeakingEngine:
    """An engine with one answer, so that a parser of tool calls has something to read."""

    version, is_asleep = 3, False

    def __init__(self, text: str) -> None:
        self._token_ids = [*TOKENIZER.encode(text, add_special_tokens=False), TOKENIZER.eos_token_id]

    async def generate(self, request_id: str, prompt_token_ids: list[int], sampling: EngineSampling) -> Completion:
        """All of it, after a while in which its half can be seen."""
        await asyncio.sleep(0.1)
        return Completion(**vars(self._tokens(self._token_ids)), finish="stop")

    def num_sampled(self, request_id: str) -> int:
        """Half of the answer."""
        return len(self._token_ids) // 2

    def partial_output(self, request_id: str, first: int = 0) -> Tokens:
        """Half of the answer."""
        return self._tokens(self._token_ids[first : self.num_sampled(request_id)])

    def _tokens(self, token_ids: list[int]) -> Tokens:
        return Tokens(token_ids, [-0.5] * len(token_ids), [self.version] * len(token_ids))


@dataclass
class Generator:
    """A generator's gRPC server and its heartbeat."""

    server: GrpcServer
    registration: Registration
    beating: asyncio.Task[None]

    async def lose(self) -> None:
        """End it as a kill does: its calls break."""
        await self.server.stop(0.0)
        self.beating.cancel()


@dataclass
class Gateway:
    """A gateway with its clients, and the generators behind it."""

    service: Service
    address: str
    redis_url: str
    generators: list[Generator]
    shared: SharedEngine
    openai: AsyncOpenAI
    anthropic: AsyncAnthropic

    async def greedy_answer(self, num_tokens: int = 40) -> str:
        """The engine's own answer at temperature 0."""
        sampling = EngineSampling(max_tokens=num_tokens, temperature=0.0)
        completion = await self.shared.engine.generate("alone", PROMPT, sampling)
        return str(TOKENIZER.decode(completion.token_ids, skip_special_tokens=True))

    @asynccontextmanager
    async def another(self, name: str) -> AsyncIterator[str]:
        """A second gateway of the run; its address."""
        service = service_of(name, self.service.config, self.redis_url)
        async with served(service) as address:
            yield address
        await service.close()


@asynccontextmanager
async def started_generator(service: Service, shared: SharedEngine, name: str) -> AsyncIterator[Generator]:
    driver = RolloutDriver(
        shared.engine,
        TOKENIZER,
        service.config.generation,
        Episodes(FunctionEnvironment(service), TOKENIZER),
    )
    servicer = GenerationGrpcServicer(service, shared.engine, shared.copies, driver, IdleLoop())  # type: ignore[arg-type]
    api = GrpcApi(SERVICE_NAME, lambda server: generation_pb2_grpc.add_GenerationServicer_to_server(servicer, server))
    server = GrpcServer(api, host="127.0.0.1", port=0, token=service.options.token)
    await server.start()
    instance = Instance("generation", name, grpc=server.address)
    registration = Registration(service.redis, service.keys, instance, service.activity, servicer.facts)
    beating = asyncio.create_task(registration.run())
    yield Generator(server, registration, beating)
    beating.cancel()
    await server.stop(0.0)


@asynccontextmanager
async def started_gateway(
    shared: SharedEngine,
    redis_url: str,
    folder: Path,
    num_generators: int = 2,
    request_timeout_s: float = 60.0,
    model: Path | None = None,
    **sections: Any,
) -> AsyncIterator[Gateway]:
    folder.mkdir(exist_ok=True)
    (folder / "token").write_text("a-token-of-thirty-two-characters\n")
    keys: dict[str, Any] = {
        "name": f"run-{uuid.uuid4().hex[:8]}",
        "gateway": {"replicas": 1, "request_timeout_s": request_timeout_s},
        "algorithm": {"prompt_length": 256, "response_length": 256},
        "services": {"token_file": str(folder / "token")},
    }
    for name, section in sections.items():
        keys[name] = keys.get(name, {}) | section
    config = make_run(folder, model or shared.folders[0], **keys)
    async with AsyncExitStack() as stack:
        service = service_of("gateway-0", config, redis_url)
        stack.push_async_callback(service.close)
        generators = [
            await stack.enter_async_context(started_generator(service, shared, f"generation-{number}"))
            for number in range(num_generators)
        ]
        address = await stack.enter_async_context(served(service))
        url, key = f"http://{address}", service.options.token
        clients: dict[str, Any] = {"api_key": key, "max_retries": 0}
        yield Gateway(
            service,
            address,
            redis_url,
            generators,
            shared,
            AsyncOpenAI(base_url=f"{url}/v1", **clients),
            AsyncAnthropic(base_url=url, **clients),
        )


@asynccontextmanager
async def served(service: Service) -> AsyncIterator[str]:
    """A gateway's work and its HTTP server; the address."""
    async with startup(service) as app:
        works = [asyncio.create_task(work()) for work in (app.main, *app.background.values())]
        http = HttpServer(HealthProbes(service, authorizes_itself=True), "127.0.0.1", 0, service.config.services)
        instance = Instance("gateway", service.options.name, http=http.address, uid=service.uid)
        heartbeat = Registration(service.redis, service.keys, instance, service.activity, dict)
        works += [asyncio.create_task(http.run()), asyncio.create_task(heartbeat.run())]
        service.problems.clear()
        yield http.address
        for work in works:
            work.cancel()
        await asyncio.gather(*works, return_exceptions=True)
