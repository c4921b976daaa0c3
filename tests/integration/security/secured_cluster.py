"""A whole cluster on this machine, with every protection: a Redis with a password behind TLS, a token, certificates.

Engine and training step are simulated, everything else is real.
"""

from __future__ import annotations

import asyncio
import json
import os
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import httpx
from redis import Redis
from redis.exceptions import ConnectionError as RedisConnectionError

from benchmarks.simulated.settings import Settings
from gspo.cli.certs import CA, CERT, KEY, SERVER_NAME, make_secrets
from gspo.cli.processes.redis_server import redis_command, write_password
from gspo.common.config.loading import CONFIG_NAME, write_config
from gspo.common.config.schema import Config
from gspo.common.network.credentials import client_context, redis_password, shared_token
from gspo.common.streams.keys import Keys
from tests.conftest import free_port
from tests.support.service_process import end, make_run
from tests.support.tiny_model import make_tiny_model

START_S = 120.0
MODULES = {
    "coordinator": "gspo.coordinator",
    "reward": "gspo.reward",
    "generation": "benchmarks.simulated.generation",
    "learner": "benchmarks.simulated.learner",
}
SETTINGS = Settings(decode_s=1e-3, decode_s_per_request=0.0, length_median=8, load_s=0.0, train_s=0.05)


@dataclass
class SecuredCluster:
    """The processes by service, and how to reach them."""

    config: Config
    secrets: dict[str, Path]
    redis: Redis
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def keys(self) -> Keys:
        return Keys(self.config.name)

    def log(self, service: str) -> list[dict[str, Any]]:
        """The JSON lines of its log."""
        path = self.config.run_dir / f"{service}.log"
        return [json.loads(line) for line in path.read_text().splitlines() if line.startswith("{")]

    def said(self, service: str, event: str) -> list[dict[str, Any]]:
        return [line for line in self.log(service) if line["event"] == event]

    def start(self, service: str, config: Config | None = None) -> subprocess.Popen[bytes]:
        """Start a service, with another configuration if given."""
        run_dir = (config or self.config).run_dir
        command = [sys.executable, "-m", MODULES[service], "--run-dir", str(run_dir), "--name", f"{service}-0"]
        with (self.config.run_dir / f"{service}.log").open("ab") as out:
            environment = {**os.environ, **SETTINGS.to_environment()}
            self.processes[service] = subprocess.Popen(command, stdout=out, stderr=out, env=environment)
        return self.processes[service]

    def instance(self, service: str) -> dict[str, Any]:
        """Its heartbeat, once it is there."""

        def found() -> dict[str, Any] | None:
            assert self.processes[service].poll() is None, self.log(service)[-3:]
            members: Any = self.redis.smembers(self.keys.instances)
            uids = [entry.decode().partition(":")[2] for entry in members]
            texts = [self.redis.get(self.keys.instance(service, uid)) for uid in uids]
            alive = [json.loads(text) for text in texts if text]
            return next((one for one in alive if one["pid"] == self.processes[service].pid), None)

        instance: dict[str, Any] = until(found, f"{service} to register", START_S)
        return instance

    def get(self, service: str, path: str) -> httpx.Response:
        """An answer of its HTTP server, without a token."""
        with httpx.Client(verify=client_context(self.config.services.tls), trust_env=False, timeout=10) as client:
            extensions = {"sni_hostname": SERVER_NAME}
            return client.get(f"https://{self.instance(service)['http']}{path}", extensions=extensions)

    def channel(self, service: str) -> grpc.Channel:
        credentials = grpc.ssl_channel_credentials(self.secrets[CA].read_bytes())
        options = [("grpc.ssl_target_name_override", SERVER_NAME), ("grpc.max_send_message_length", -1)]
        return grpc.secure_channel(self.instance(service)["grpc"], credentials, options)

    @property
    def token(self) -> tuple[tuple[str, str], ...]:
        return (("authorization", f"Bearer {shared_token(self.config)}"),)


def until(condition: Callable[[], Any], what: str, timeout_s: float = START_S) -> Any:
    """The first true value of a condition."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if found := condition():
            return found
        time.sleep(0.05)
    raise AssertionError(f"waited {timeout_s:g} s for {what}")


@contextmanager
def secured_cluster(folder: Path, **sections: Any) -> Iterator[SecuredCluster]:
    """Redis and a run directory; the test starts the services."""
    secrets = make_secrets(folder / "secrets", (), days=1)
    tls = {"cert": str(secrets[CERT]), "key": str(secrets[KEY]), "ca": str(secrets[CA]), "server_name": SERVER_NAME}
    with ExitStack() as opened:
        password = secrets["redis-password"].read_text().strip()
        port = free_port()
        data = folder / "redis"
        data.mkdir()
        command = redis_command("127.0.0.1", port, data, write_password(data, password))
        server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        opened.callback(end, server)
        tls_port = opened.enter_context(_tls_in_front(port, secrets))
        services = {
            "token_file": str(secrets["token"]),
            "redis_password_file": str(secrets["redis-password"]),
            "redis_url": f"rediss://localhost:{tls_port}/0",
            "tls": tls,
        }
        config = make_run(folder, make_tiny_model(folder / "model"), services=services, **sections)
        redis = Redis(port=port, password=redis_password(config))
        until(lambda: _answers(redis), "Redis")
        cluster = SecuredCluster(config, secrets, redis)
        opened.callback(lambda: [*map(end, cluster.processes.values())])
        yield cluster


def other_run_dir(cluster: SecuredCluster, folder: Path, **services: Any) -> Config:
    """The same run with other secrets."""
    changed = cluster.config.services.model_copy(update=services)
    run = cluster.config.run.model_copy(update={"directory": folder})
    config = cluster.config.model_copy(update={"services": changed, "run": run})
    config.run_dir.mkdir(parents=True)
    write_config(config, config.run_dir / CONFIG_NAME)
    return config


def _answers(redis: Redis) -> bool:
    try:
        return bool(redis.ping())
    except RedisConnectionError:
        return False


@contextmanager
def _tls_in_front(port: int, secrets: dict[str, Path]) -> Iterator[int]:
    """TLS in front of a Redis that has none, as stunnel does it; yields its port."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(secrets[CERT], secrets[KEY])
    # Redis asks clients for a certificate too, by default.
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(secrets[CA])
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(2**20):
                writer.write(data)
                await writer.drain()
        except (ConnectionError, ssl.SSLError):
            pass
        finally:
            writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(pass_on(reader, inner[1]), pass_on(inner[0], writer), return_exceptions=True)

    server = asyncio.run_coroutine_threadsafe(asyncio.start_server(serve, "127.0.0.1", 0, ssl=context), loop).result()
    yield server.sockets[0].getsockname()[1]
    loop.call_soon_threadsafe(server.close)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(5)
