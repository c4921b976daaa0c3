"""What Redis alone reaches for the payload of a rollout: a bare client, as redis-benchmark is one.

Entries of the size of a rollout go in and out of a stream in pipelines; nothing is made of them. Twice of it is what a
rollout costs at least, which passes two streams. Neighbour: pipeline_run.py has the services between them.
"""

from __future__ import annotations

import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from redis import Redis
from redis.exceptions import ConnectionError as NotUpYet

from gspo.cli.processes.redis_server import LOOPBACK, free_port, redis_command
from gspo.common.streams.entries import SCHEMA
from gspo_proto.rollout_pb2 import OUTCOME_EOS, Prompt, Rollout

_AT_A_TIME = 64
_START_S = 15.0


def measure(tokens: int, num_entries: int) -> dict[str, Any]:
    """Entries a second through one stream: added, read by a group, acknowledged and removed."""
    payload = _payload(tokens)
    with tempfile.TemporaryDirectory() as folder:
        port = free_port()
        server = subprocess.Popen(redis_command(LOOPBACK, port, Path(folder)), stdout=subprocess.DEVNULL)
        try:
            redis = Redis(LOOPBACK, port, protocol=2)
            _wait(redis)
            redis.xgroup_create("s", "g", mkstream=True)
            _pass(redis, payload, 4 * _AT_A_TIME)
            began = time.perf_counter()
            _pass(redis, payload, num_entries)
            seconds = time.perf_counter() - began
        finally:
            server.terminate()
            server.wait(10)
    return {"what": "redis", "tokens": tokens, "bytes": len(payload), "per_s": num_entries / seconds}


def _payload(tokens: int) -> bytes:
    """A rollout of so many tokens, as generation writes it."""
    return Rollout(
        schema=SCHEMA,
        num_rollouts=8,
        prompt=Prompt(token_ids=range(3, 11), text="12+34="),
        token_ids=[3 + n % 90 for n in range(tokens)],
        logp=[-0.5] * tokens,
        version=[1] * tokens,
        mask=b"\1" * tokens,
        text="7" * tokens,
        outcome=OUTCOME_EOS,
    ).SerializeToString()


def _pass(redis: Redis, payload: bytes, num_entries: int) -> None:
    for _ in range(0, num_entries, _AT_A_TIME):
        with redis.pipeline(transaction=False) as pipe:
            for _ in range(_AT_A_TIME):
                pipe.xadd("s", {b"d": payload})
            pipe.xreadgroup("g", "c", {"s": ">"}, count=_AT_A_TIME)
            *entries, _ = pipe.execute()
            pipe.xack("s", "g", *entries)
            pipe.xdel("s", *entries)
            pipe.execute()


def _wait(redis: Redis) -> None:
    deadline = time.monotonic() + _START_S
    while True:
        try:
            redis.ping()
        except NotUpYet:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
        else:
            return
