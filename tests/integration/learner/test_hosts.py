"""The learner on two hosts: two network namespaces, one shared run directory, started on each as by a cluster.

host A (rank 0) has a second cable to where Redis is; host B (rank 1) reaches nothing but host A.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import pytest_asyncio
from redis.asyncio import Redis

from gspo.cli.processes.redis_server import redis_command, write_password
from gspo.common.config.schema import Config
from gspo.common.streams.events import Events
from gspo.common.streams.inbox import create_consumer_groups
from gspo.common.streams.keys import Keys
from gspo.common.streams.redis_client import connect_redis
from gspo_proto.rollout_pb2 import Event, Finished
from tests.conftest import free_port
from tests.support.service_process import end, registered, wait_exit
from tests.support.training.learner_feed import LearnerFeed, lines, run_of

pytestmark = [
    pytest.mark.long,
    pytest.mark.asyncio(loop_scope="function"),
    pytest.mark.timeout(400),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can make network namespaces"),
]
# Namespaces and cables are the machine's: a second test run beside this one has others.
_OWN = os.getpid() % 250
_A, _B = f"gspo-a-{_OWN}", f"gspo-b-{_OWN}"
_CABLE_A, _CABLE_B, _REDIS_A, _REDIS_END = (f"g{name}{_OWN}" for name in ("ab", "ba", "ar", "ra"))
_ADDRESS_A, _ADDRESS_B = f"10.213.{_OWN}.1", f"10.213.{_OWN}.2"
_ADDRESS_REDIS, _ADDRESS_TO_REDIS = f"10.214.{_OWN}.1", f"10.214.{_OWN}.2"
_MASTER_PORT, _RANK_TIMEOUT_S = 29555, 10
PASSWORD = "a-password-of-tests"


def ip(words: str) -> None:
    """Call iproute2's `ip`."""
    done = subprocess.run(["ip", *words.split()], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"ip {words}: {done.stderr}"


@pytest.fixture(scope="module")
def hosts() -> Iterator[None]:
    """Two namespaces with a cable between them, and one from A to here."""
    assert shutil.which("ip"), "iproute2 is missing: make setup installs it"
    with ExitStack() as network:
        for host in (_A, _B):
            ip(f"netns add {host}")
            network.callback(ip, f"netns del {host}")
            ip(f"-n {host} link set lo up")
        ip(f"link add {_CABLE_A} netns {_A} type veth peer name {_CABLE_B} netns {_B}")
        ip(f"link add {_REDIS_END} type veth peer name {_REDIS_A} netns {_A}")
        for host, cable, address in (
            (_A, _CABLE_A, _ADDRESS_A),
            (_B, _CABLE_B, _ADDRESS_B),
            (_A, _REDIS_A, _ADDRESS_TO_REDIS),
        ):
            ip(f"-n {host} addr add {address}/24 dev {cable}")
            ip(f"-n {host} link set {cable} up")
        ip(f"addr add {_ADDRESS_REDIS}/24 dev {_REDIS_END}")
        ip(f"link set {_REDIS_END} up")
        yield


@pytest.fixture
def redis_url(hosts: None, tmp_path: Path) -> Iterator[str]:
    """A Redis that host A reaches and host B does not."""
    port = free_port()
    folder = tmp_path / "redis"
    folder.mkdir()
    command = redis_command(_ADDRESS_REDIS, port, folder, write_password(folder, PASSWORD))
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    yield f"redis://{_ADDRESS_REDIS}:{port}/0"
    end(process)


@pytest_asyncio.fixture(loop_scope="function")
async def redis(redis_url: str) -> AsyncIterator[Redis]:
    """A client, once the server answers."""
    client = connect_redis(redis_url.replace("//", f"//:{PASSWORD}@"))
    await client.ping()
    yield client
    await client.aclose()


@contextmanager
def learner_on_both_hosts(config: Config, redis_url: str) -> Iterator[list[subprocess.Popen[bytes]]]:
    """The learner on each host, with the variables of an actor of cli/cluster."""
    processes = []
    hosts = {"PET_NNODES": "2", "PET_MASTER_ADDR": _ADDRESS_A, "PET_MASTER_PORT": str(_MASTER_PORT)}
    for node_rank, (host, cable) in enumerate(((_A, _CABLE_A), (_B, _CABLE_B))):
        words = ["ip", "netns", "exec", host, sys.executable, "-m", "gspo.learner"]
        words += ["--run-dir", str(config.run_dir), "--redis-url", redis_url]
        with (config.run_dir / f"host-{node_rank}.log").open("ab") as log:
            environment = {**os.environ, **hosts, "PET_NODE_RANK": str(node_rank), "GLOO_SOCKET_IFNAME": cable}
            processes.append(subprocess.Popen(words, stdout=log, stderr=log, env=environment, start_new_session=True))
    try:
        yield processes
    finally:
        for process in processes:
            end(process)


async def test_two_hosts_train_a_run_and_a_cut_cable_ends_both_with_a_message(
    redis: Redis, redis_url: str, tmp_path: Path
) -> None:
    keys = Keys("test")
    await create_consumer_groups(redis, keys)
    learner = {"ranks": 2, "threads": 1, "zero_stage": 3, "rank_timeout_s": _RANK_TIMEOUT_S}
    (tmp_path / "password").write_text(PASSWORD)
    services = {"redis_password_file": str(tmp_path / "password")}
    config = run_of(tmp_path, learner=learner, run={"total_steps": 2}, services=services)
    feeder = LearnerFeed(redis, keys)
    with learner_on_both_hosts(config, redis_url) as processes:
        await registered(processes[0], redis, keys, "learner")
        await feeder.feed(range(4), 0)
        await feeder.event("step_done")
        # Nothing is closed and nothing refused: silence is all there is.
        ip(f"-n {_B} link set {_CABLE_B} down")
        ends = [await asyncio.to_thread(wait_exit, process, 60) for process in processes]
    assert 0 not in ends
    for number in (0, 1):
        log = (config.run_dir / f"host-{number}.log").read_text()
        assert f"silent for more than learner.rank_timeout_s ({_RANK_TIMEOUT_S} s)" in log, number
    recorded = lines(config, "policy.jsonl")

    ip(f"-n {_B} link set {_CABLE_B} up")
    with learner_on_both_hosts(config, redis_url) as processes:
        await feeder.feed(range(4, 8), 1)
        assert (await feeder.event("training_done", timeout_s=120)).training_done.step == 2
        await Events(redis, keys, "coordinator").send(Event(finished=Finished(reason="done")))
        assert [await asyncio.to_thread(wait_exit, process, 60) for process in processes] == [0, 0]
    assert lines(config, "policy.jsonl")[:2] == recorded
    assert [line["step"] for line in lines(config, "metrics.jsonl")] == [1, 2]
