"""A run directory and real service processes for tests.

What it is not: the supervisor; a test starts exactly the processes it is about and ends them.
"""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from redis.asyncio import Redis

from gspo.common.config.loading import CONFIG_NAME, parse_config, write_config
from gspo.common.config.schema import Config
from gspo.common.streams.instances import Instance, list_instances
from gspo.common.streams.keys import Keys

# vLLM on a busy machine with two cores.
START_S = 180
REWARD = "def reward(prompts, completions, **columns):\n    return [float(len(text)) for text in completions]\n"


def make_run(folder: Path, model: Path, **sections: Any) -> Config:
    """A run directory with its config.yaml, eight prompts and a reward function; sections override the defaults."""
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"{n}+{n}=", "answer": str(2 * n)}) + "\n" for n in range(8)))
    (folder / "reward.py").write_text(REWARD)
    given: dict[str, Any] = {
        "name": "test",
        "model": {"path": str(model)},
        "data": {"prompts": str(prompts)},
        "reward": {"functions": [{"path": str(folder / "reward.py")}]},
        "algorithm": {
            "rollout_batch_size": 4,
            "num_return_sequences_in_group": 4,
            "prompt_length": 64,
            "response_length": 64,
            "num_mini_batches": 2,
        },
        "generation": {"max_rollouts": 64, "kv_cache_gb": 0.25},
        "run": {"directory": str(folder), "total_steps": 3},
    }
    for name, section in sections.items():
        given[name] = {**given[name], **section} if isinstance(given.get(name), dict) else section
    config = parse_config(given, folder)
    config.run_dir.mkdir(parents=True, exist_ok=True)
    write_config(config, config.run_dir / CONFIG_NAME)
    return config


@contextmanager
def service_process(
    service: str, config: Config, redis_url: str, *options: str, log: Path | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """A service as its own process, ended by SIGTERM and, after ten seconds, by SIGKILL."""
    command = [sys.executable, "-m", f"gspo.{service}", "--run-dir", str(config.run_dir), "--redis-url", redis_url]
    out = (log or config.run_dir / f"{service}.log").open("ab")
    process = subprocess.Popen([*command, *options], stdout=out, stderr=out, start_new_session=True)
    try:
        yield process
    finally:
        end(process)
        out.close()


def end(process: subprocess.Popen[bytes], timeout_s: float = 20.0) -> None:
    """Ask a process to end, and make it."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(timeout_s)


def assert_on_loopback_alone(pid: int, *addresses: str) -> None:
    """A process and all below it listen on loopback alone: on the addresses given, and wherever else.

    What listens on every address of a machine answers on 127.0.0.2 too. Where else a process listens is asked of the
    kernel; some (gVisor's) do not say.
    """
    for address in addresses:
        port = int(address.rpartition(":")[2])
        assert answers("127.0.0.1", port), f"nothing listens on {address}"
        assert not answers("127.0.0.2", port), f"{address} is open beyond loopback"
    parent = psutil.Process(pid)
    found = {
        connection.laddr.ip
        for process in (parent, *parent.children(recursive=True))
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }
    # gRPC listens on a socket for both versions of IP.
    assert {address.removeprefix("::ffff:") for address in found} <= {"127.0.0.1", "::1"}


def answers(host: str, port: int) -> bool:
    """Whether something listens there."""
    with socket.socket() as tried:
        tried.settimeout(5)
        return tried.connect_ex((host, port)) == 0


def log_events(path: Path) -> list[dict[str, Any]]:
    """The JSON lines of a service's log."""
    return [json.loads(line) for line in path.read_text().splitlines() if line.startswith("{")]


def wait_exit(process: subprocess.Popen[bytes], timeout_s: float) -> int:
    """Exit code of a process that ends by itself."""
    deadline = time.monotonic() + timeout_s
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)
    assert process.returncode is not None, f"still running after {timeout_s} s"
    return process.returncode


async def registered(process: subprocess.Popen[bytes], redis: Redis, keys: Keys, service: str) -> Instance:
    """The service's instance once it is there; fails at once when the process dies instead."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        assert process.poll() is None, f"{service} ended with exit code {process.returncode} before it registered"
        found = await list_instances(redis, keys, service)
        if found and (found[0].grpc or service == "coordinator"):
            return found[0]
        await asyncio.sleep(0.1)
    raise AssertionError(f"{service} did not register within {START_S} s")
