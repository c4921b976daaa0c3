"""Two servers of one model side by side: vLLM's own, and gspo's gateway before its generator; and a client of both.

Both stay up while rounds alternate between them, so a change of the machine's speed meets both. The one that is not
asked is idle.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks import CACHE
from benchmarks.harness.child_process import MeasurementError, started, tail
from benchmarks.harness.section import Record
from benchmarks.harness.services import running_services
from gspo.cli.processes.redis_server import free_port
from gspo.common.config.schema import Config
from gspo.common.streams.instances import list_instances, wait_for_instance
from gspo.generation.engine.process import CPU_ENVIRONMENT, generation_threads

START_S = 900.0
_ROUND_S = 300.0
_DONE = "data: [DONE]"
_DATA = "data: "


@dataclass(frozen=True)
class Server:
    """A server of the API of OpenAI, by its address and its name of the model."""

    url: str
    model: str


@dataclass(frozen=True)
class Load:
    """The requests of a round.

    Attributes:
        clients: Requests at a time.
        requests: Those of each client, one after the other.
        tokens: Those of each answer; the model ends none earlier.
    """

    clients: int
    requests: int
    tokens: int


@asynccontextmanager
async def both_servers(config: Config) -> AsyncIterator[dict[str, Server]]:
    """vLLM's server with the engine arguments of a run's generator, and that run's gateway with its generator.

    Raises:
        MeasurementError: One does not start.
        RunError: A service died.
    """
    with _vllm_server(config) as (vllm, log):
        async with running_services(config, "generation", "gateway") as services:
            await wait_for_instance(services.redis, services.keys, "generation", START_S)
            (instance,) = await list_instances(services.redis, services.keys, "gateway")
            gateway = Server(f"http://{instance.http}/v1", config.gateway.model_name)
            await _wait_until_up(gateway, config.run_dir / "services" / "gateway-0.log")
            await _wait_until_up(vllm, log)
            yield {"vllm": vllm, "gspo": gateway}


@contextmanager
def _vllm_server(config: Config) -> Iterator[tuple[Server, Path]]:
    """`vllm serve`, which may take a minute to answer; and its log."""
    from gspo.generation.engine.vllm_engine import IN_PROCESS_EXECUTOR  # here: importing vLLM takes seconds

    port, log = free_port(), CACHE / "vllm-serve.log"
    arguments = {
        "model": config.model.path,
        "dtype": config.generation.dtype,
        "seed": str(config.seed),
        "max-model-len": str(config.algorithm.longest_branch),
        "max-num-seqs": str(config.generation.max_rollouts),
        "kv-cache-memory-bytes": str(int(config.generation.kv_cache_gb * 2**30)),
        "distributed-executor-backend": IN_PROCESS_EXECUTOR,
        "logprobs-mode": "processed_logprobs",
        "load-format": "safetensors",
        "generation-config": "vllm",
        "host": "127.0.0.1",
        "port": str(port),
    }
    words = [word for name, value in arguments.items() for word in (f"--{name}", value)]
    flags = ["--enable-prefix-caching", "--disable-log-stats", "--disable-uvicorn-access-log"]
    flags += ["--enforce-eager"] * bool(config.generation.engine.get("enforce_eager", True))
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *words, *flags]
    environment = {**CPU_ENVIRONMENT, "OMP_NUM_THREADS": str(generation_threads(config.generation.threads))}
    with started(command, log, environment, patience_s=10.0):
        yield Server(f"http://127.0.0.1:{port}/v1", config.model.path), log


async def _wait_until_up(server: Server, log: Path) -> None:
    deadline = time.monotonic() + START_S
    async with httpx.AsyncClient() as http:
        while time.monotonic() < deadline:
            try:
                if (await http.get(f"{server.url}/models")).is_success:
                    return
            except httpx.HTTPError:
                pass
            await asyncio.sleep(0.5)
    raise MeasurementError(f"{server.url} does not answer within {START_S:g} s.\n{tail(log)}")


async def measured_round(server: Server, load: Load, number: int) -> Record:
    """Ask for streamed chats; tokens a second of all clients, and seconds to each answer's first text.

    Args:
        number: That of the round: no prompt comes twice, so no cache of prefixes has the whole of one.

    Raises:
        MeasurementError: An answer has another length than it was asked for.
    """
    # A connection for each request: a server closes one that was idle for long.
    limits = httpx.Limits(max_connections=load.clients, max_keepalive_connections=0)
    async with httpx.AsyncClient(timeout=_ROUND_S, limits=limits) as http:

        async def client(place: int) -> list[float]:
            first_s = []
            for request in range(load.requests):
                question = f"{number}.{place}.{request}"
                first_s.append(await _first_text_s(http, server, question, load.tokens))
            return first_s

        began = time.monotonic()
        first_s = await asyncio.gather(*map(client, range(load.clients)))
        seconds = time.monotonic() - began
    num_tokens = load.clients * load.requests * load.tokens
    return {"tokens_per_s": num_tokens / seconds, "first_s": [value for own in first_s for value in own]}


async def _first_text_s(http: httpx.AsyncClient, server: Server, question: str, num_tokens: int) -> float:
    """Read one answer to its end; the seconds to its first text."""
    body = {
        "model": server.model,
        "messages": [{"role": "user", "content": question}],
        "max_tokens": num_tokens,
        "temperature": 1.0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    headers = {"authorization": f"Bearer {os.environ.get('GSPO_TOKEN', 'none')}"}
    began, first_s, last = time.monotonic(), 0.0, ""
    async with http.stream("POST", f"{server.url}/chat/completions", json=body, headers=headers) as reply:
        if not reply.is_success:
            raise MeasurementError(f"{server.url}: {reply.status_code} {(await reply.aread()).decode()[:1000]}")
        async for line in reply.aiter_lines():
            if not first_s and _has_text(line):
                first_s = time.monotonic() - began
            if line and line != _DONE:
                last = line
    usage = json.loads(last.removeprefix(_DATA)).get("usage") or {}
    if not first_s or usage.get("completion_tokens") != num_tokens:
        raise MeasurementError(f"{server.url} gave {usage} in place of {num_tokens} tokens")
    return first_s


def _has_text(line: str) -> bool:
    """Whether an event of the stream has text; the first one names the role alone."""
    if not line.startswith(_DATA) or line == _DONE:
        return False
    choices: list[dict[str, Any]] = json.loads(line.removeprefix(_DATA))["choices"]
    return bool(choices and choices[0]["delta"].get("content"))
