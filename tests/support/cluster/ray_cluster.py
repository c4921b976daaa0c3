"""A real Ray cluster of several nodes on this machine, each with resources and an address of its own on loopback.

A driver is on the first node, the head. Ray's dashboard is off, unless the head is asked for it.
"""

from __future__ import annotations

import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

PATIENCE_S = 120.0


class RayNodesHere:
    """The nodes; made by `ray_cluster`.

    Attributes:
        num_cpus: By node, the CPUs that Ray counts.
    """

    def __init__(self, variables: Mapping[str, str]) -> None:
        from ray.cluster_utils import Cluster

        self._cluster: Any = Cluster()
        self._nodes: dict[str, Any] = {}
        self.num_cpus: dict[str, int] = {}
        self._variables, self._num_started = variables, 0

    def add(self, name: str, variables: Mapping[str, str] | None = None, **resources: float) -> None:
        """Start a node, and wait until it is there.

        Args:
            variables: Of its environment alone.
        """
        address = f"127.0.0.{10 + self._num_started}"
        self._num_started += 1
        self.num_cpus[name] = int(resources["num_cpus"])
        self._nodes[name] = self._cluster.add_node(
            node_ip_address=address,
            node_name=name,
            env_vars=dict(variables or {}),
            **{"include_dashboard": False, **resources},
        )

    @property
    def names(self) -> list[str]:
        """The remaining nodes, the head first."""
        return list(self._nodes)

    @property
    def dashboard(self) -> str:
        """Its address, if the head was started with `include_dashboard`."""
        return f"http://{self._cluster.webui_url}"

    @property
    def environment(self) -> dict[str, str]:
        """The variables of a command on the head."""
        return {**self._variables, "RAY_ADDRESS": self._cluster.address}

    def lose(self, name: str) -> None:
        """Kill a node at once."""
        del self.num_cpus[name]
        self._cluster.remove_node(self._nodes.pop(name), allow_graceful=False)

    def drain(self, name: str, left_s: int) -> None:
        """Ask Ray to end a node, in so many seconds at the latest."""
        words = ["--address", self._cluster.address, "--node-id", self._nodes[name].node_id]
        reason = ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "asked for"]
        command = [str(Path(sys.executable).with_name("ray")), "drain-node", *words, *reason]
        subprocess.run([*command, "--deadline-remaining-seconds", str(left_s)], check=True)

    def has_ended(self, name: str) -> bool:
        """Whether a node has ended by itself."""
        return any(process == "raylet" for process, _ in self._nodes[name].dead_processes())

    def lose_head(self) -> None:
        """Kill the process that knows the cluster (Ray's GCS). The nodes, that of the driver too, still run."""
        self._cluster.head_node.kill_gcs_server()

    def find_head(self) -> None:
        """Start it again, with the state that it kept, and wait until it answers."""
        self._cluster.head_node.start_gcs_server()
        host, _, port = self._cluster.address.rpartition(":")
        until(lambda: _answers(host, int(port)), "an answer of the head")

    def close(self) -> None:
        """End every node."""
        self._cluster.shutdown()


@contextmanager
def ray_cluster(*, head_s: int = 30, **nodes: Mapping[str, float]) -> Iterator[RayNodesHere]:
    """A cluster with a token; by name, the resources of each node, the head's first.

    Args:
        head_s: All ends so long after the head; by default after a minute.
    """
    # Ray's sockets have names in this folder, whose length Linux limits.
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
    Path(folder, "gcs").mkdir()
    variables = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(16),
        "RAY_TMPDIR": folder,
        "RAY_USAGE_STATS_ENABLED": "0",
        # A node is lost after three seconds of silence; by default after fifteen.
        "RAY_health_check_failure_threshold": "3",
        "RAY_health_check_period_ms": "1000",
        # The head keeps its state here over its own death.
        "RAY_gcs_storage": "rocksdb",
        "RAY_gcs_storage_path": f"{folder}/gcs",
        "RAY_gcs_rpc_server_reconnect_timeout_s": str(head_s),
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        _reread_variables()
        cluster = RayNodesHere(variables)
        try:
            for name, resources in nodes.items():
                cluster.add(name, None, **resources)
            yield cluster
        finally:
            cluster.close()
            shutil.rmtree(folder, ignore_errors=True)
    _reread_variables()


def _answers(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), 1.0).close()
    except OSError:
        return False
    return True


def _reread_variables() -> None:
    """A process reads Ray's variables once, perhaps in an earlier test."""
    from ray._private.authentication_test_utils import reset_auth_token_state

    reset_auth_token_state()


def processes_with(words: str, folder: Path) -> list[psutil.Process]:
    """Running processes whose command line has these words and this folder."""
    matches = []
    for process in psutil.process_iter():
        try:
            line = " ".join(process.cmdline())
            if words in line and str(folder) in line and process.status() != psutil.STATUS_ZOMBIE:
                matches.append(process)
        except psutil.Error:
            continue
    return matches


def actor_of(process: psutil.Process) -> psutil.Process:
    """The actor that has started a process."""
    return next(parent for parent in process.parents() if "ProcessActor" in " ".join(parent.cmdline()))


def until(condition: Callable[[], object], what: str, timeout_s: float = PATIENCE_S) -> None:
    """Wait for a condition."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"still waiting for {what} after {timeout_s:g} s"
        time.sleep(0.1)
