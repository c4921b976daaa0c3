"""The Ray cluster of a run: the connection, its nodes, and who has its GPUs. Every refusal is one message.

It starts and ends no process; reservations.py asks for places, ray_child.py has the processes.
"""

from __future__ import annotations

import atexit
import os
import socket
import sys
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import wait
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gspo.cli.cluster import node_survey
from gspo.cli.cluster.layout import Node
from gspo.cli.cluster.ray_calls import T, in_thread
from gspo.cli.processes.exit_codes import NodeLostError
from gspo.common.errors import EXIT_FAILED, InputError
from gspo.common.host.machine import Gpu

_ADDRESS, _AUTH_MODE = "RAY_ADDRESS", "RAY_AUTH_MODE"
# Until a port answers, and until the nodes do: a node starts a Python process for its answer.
_CONNECT_S, _SURVEY_S = 10.0, 120.0
# Until the head answers, at each look for drained nodes.
_ASK_S = 5.0
# Between two looks at the head.
_LOOK_S = 1.0
# Ray tries a token for 20 s, and writes a line about each try.
_TRY_S = ("RAY_gcs_rpc_server_connect_timeout_s", "5")
# A call in a thread would connect again after the end.
_NO_OTHER_CONNECTION = ("RAY_ENABLE_AUTO_CONNECT", "0")
# Ray ends all that has not reached the head for so long, at once. The run ends in order a little before its nodes do;
# so its own process gets more time.
_RECONNECT, _EARLIER_S, _END_S = "RAY_gcs_rpc_server_reconnect_timeout_s", 10.0, 60.0
_PATIENCE_S = float(os.environ.get(_RECONNECT, "60"))
# NFS keeps what it knows of a folder for up to a minute, 3 s by default.
_SEEN_S = 20.0
_NONCE_NAME = "nonce"


@dataclass(frozen=True)
class ClusterNode:
    """A node that Ray calls alive.

    Attributes:
        name: Unique among the nodes.
        num_cpus: As Ray counts them.
        facts: Those of `node_survey.look`; empty before the survey.
    """

    id: str
    name: str
    address: str
    num_cpus: float
    num_gpus: int
    facts: Mapping[str, Any] = field(default_factory=dict)

    def as_planned(self) -> Node:
        """The node with all its GPUs, also those in use, for a layout."""
        known = [Gpu(**gpu) for gpu in self.facts.get("gpus", ())]
        unknown = [Gpu(str(at)) for at in range(len(known), self.num_gpus)]
        return Node(self.name, tuple(known[: self.num_gpus] + unknown))


class RayCluster:
    """A connection to a cluster; use it as a context.

    Args:
        namespace: That of the run's actors.

    Attributes:
        head: Address of the head (Ray's GCS).
        holders: By node, the actors that keep the policies of its generators.
    """

    def __init__(self, namespace: str) -> None:
        self.ray = _connected(namespace)
        self.own_id = str(self.ray.get_runtime_context().get_node_id())
        self.holders: defaultdict[str, list[Any]] = defaultdict(list)
        self._surveyed: dict[str, ClusterNode] = {}
        self._survey = threading.Lock()
        self._folder = Path()
        self.head = str(self.ray.get_runtime_context().gcs_address)
        self._answered = time.monotonic()
        self._client = self.ray._raylet.GcsClient(address=self.head)  # as Ray Serve has it

    def answers(self) -> bool:
        """Whether the head answers now. Without it, most calls of Ray wait."""
        host, _, port = self.head.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S / 2).close()
        except OSError:
            return False
        self._answered = time.monotonic()
        return True

    def check_head(self) -> None:
        """Look whether the head answers.

        Raises:
            NodeLostError: It has not for almost as long as the nodes wait for it.
        """
        if not self.answers() and (silent_s := time.monotonic() - self._answered) > _PATIENCE_S - _EARLIER_S:
            raise NodeLostError(
                f"the head of the Ray cluster ({self.head}) has not answered for {silent_s:.0f} s: it or its network "
                f"is lost, or the cluster has ended. Start the cluster again, on any nodes that see the run directory"
            )

    def watched(self, work: Callable[[], T]) -> T:
        """The result of `work`, whose calls of Ray would wait for the head.

        Raises:
            NodeLostError: As for `check_head`; the thread still waits.
        """
        result = in_thread(work)
        while not wait([result], timeout=_LOOK_S).done:
            self.check_head()
        return result.result()

    @property
    def errors(self) -> Any:
        """Ray's module of exceptions."""
        return self.ray.exceptions

    def __enter__(self) -> RayCluster:
        return self

    def __exit__(self, _kind: object, error: object, _trace: object) -> None:
        if isinstance(error, NodeLostError):
            # A call may still wait for the head; Ray's own end would crash in it.
            atexit.register(_end_at_once)
        else:
            self.ray.shutdown()

    def nodes(self) -> list[ClusterNode]:
        """The nodes that Ray calls alive, that of this process first."""
        living = [row for row in self.ray.nodes() if row["Alive"]]
        names = [row.get("NodeName") or row["NodeManagerAddress"] for row in living]
        nodes = [
            ClusterNode(
                id=row["NodeID"],
                name=name if names.count(name) == 1 else f"{name}/{row['NodeID'][:6]}",
                address=row["NodeManagerAddress"],
                num_cpus=row["Resources"].get("CPU", 0.0),
                num_gpus=int(row["Resources"].get("GPU", 0)),
            )
            for row, name in zip(living, names, strict=True)
        ]
        return sorted(nodes, key=lambda node: (node.id != self.own_id, node.name))

    def surveyed(self, folder: Path) -> list[ClusterNode]:
        """The nodes that may get processes, and this one, with their facts.

        Args:
            folder: In the run directory; every node must see a file that is written here now.

        Raises:
            InputError: A node does not answer, has another installation, or sees another disk.
        """
        drained = self.drained()
        nodes = [
            node
            for node in self.nodes()
            if node.id == self.own_id or (node.id not in drained and (node.num_cpus or node.num_gpus))
        ]
        self._folder = folder
        surveyed = self._judged(nodes)
        node_survey.check_gpus([node.as_planned() for node in surveyed])
        self._surveyed = {node.id: node for node in surveyed}
        return surveyed

    def _judged(self, nodes: Sequence[ClusterNode]) -> list[ClusterNode]:
        """The nodes, that of this process first, with their facts.

        Raises:
            InputError: One is not fit.
        """
        nonce, file = uuid.uuid4().hex, self._folder / _NONCE_NAME
        file.write_text(nonce)
        try:
            answers = self._answers(nodes, file)
        finally:
            file.unlink()
        node_survey.judge([node.name for node in nodes], nodes[0].name, self._folder, nonce, answers)
        return [replace(node, facts=answers[node.name]) for node in nodes]

    def node(self, node_id: str) -> ClusterNode:
        """A node by its id; one that joined after the survey is looked at first.

        Raises:
            InputError: It is not fit.
        """
        with self._survey:  # each writes the same file
            if node_id not in self._surveyed:
                joined = [node for node in self.nodes() if node.id in (self.own_id, node_id)]
                self._surveyed |= {node.id: node for node in self._judged(joined)}
        return self._surveyed.get(node_id, ClusterNode(node_id, node_id[:6], "", 0.0, 0))

    def _answers(self, nodes: Sequence[ClusterNode], file: Path) -> dict[str, dict[str, Any]]:
        ray = self.ray
        # By value: a node without gspo could not import it.
        ray.cloudpickle.register_pickle_by_value(node_survey)
        try:
            look = ray.remote(num_cpus=0, max_retries=0)(node_survey.look)
            affinity = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
            calls = {
                look.options(scheduling_strategy=affinity(node.id, soft=False)).remote(str(file), _SEEN_S): node.name
                for node in nodes
            }
        finally:
            ray.cloudpickle.unregister_pickle_by_value(node_survey)
        done, _ = ray.wait(list(calls), num_returns=len(calls), timeout=_SURVEY_S)
        answers = {}
        for call in done:
            with suppress(ray.exceptions.RayError):  # judged as no answer
                answers[calls[call]] = ray.get(call)
        return answers

    def drained(self) -> dict[str, float | None]:
        """The nodes that are to end, by id, with the seconds until then where they are known.

        `ray drain-node` asks for that, an autoscaler, or the end of `ray start --block` by SIGTERM. The node of this
        process is among them if it has ended.
        """
        try:
            deadlines_ms = self._client.get_draining_nodes(timeout=_ASK_S)
            if not all(self._client.check_alive([self.ray.NodeID.from_hex(self.own_id)], timeout=_ASK_S)):
                deadlines_ms[self.own_id] = 0
        except self.errors.RayError:
            return {}  # the head does not answer
        now = time.time()
        return {str(node_id): at / 1000 - now if at else None for node_id, at in deadlines_ms.items()}

    def groups_on(self, node_id: str) -> set[str]:
        """Ids of the placement groups that have a bundle on a node."""
        table = self.ray.util.placement_group_table() if self.answers() else {}
        return {group_id for group_id, row in table.items() if node_id in row["bundles_to_node_id"].values()}

    def num_free(self, resource: str) -> float:
        """The free units of a resource; none while the head does not answer."""
        return float(self.ray.available_resources().get(resource, 0.0)) if self.answers() else 0.0

    def users_of(self, resource: str, own: Sequence[str]) -> str:
        """The users of a resource, by the names of placement groups, and the free units.

        Args:
            own: Names of the run's own placement groups.
        """
        if not self.answers():
            return f"the head, {self.head}, does not answer"
        free, total = (
            counts.get(resource, 0.0) for counts in (self.ray.available_resources(), self.ray.cluster_resources())
        )
        users: dict[str, float] = {}
        for row in self.ray.util.placement_group_table().values():
            if row["state"] == "CREATED" and row["name"] not in own:
                number = sum(bundle.get(resource, 0.0) for bundle in row["bundles"].values())
                name = row["name"] or f"an unnamed placement group ({row['placement_group_id'][:8]})"
                users[name] = users.get(name, 0.0) + number
        listed = [f"{name} has {number:g}" for name, number in users.items() if number]
        return "; ".join([f"{free:g} of {total:g} are free", *listed])


def _end_at_once() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(EXIT_FAILED)


def _connected(namespace: str) -> Any:
    """The module of Ray, connected.

    Raises:
        InputError: Ray is not installed, the cluster cannot be reached, refuses the token, or has another version.
    """
    os.environ.setdefault(*_TRY_S)
    os.environ.setdefault(*_NO_OTHER_CONNECTION)
    os.environ[_RECONNECT] = str(int(_PATIENCE_S + _END_S))
    try:
        import ray
        import ray.util.scheduling_strategies
    except ImportError as error:
        raise InputError(
            "--cluster", "needs Ray, which is not installed here", "Install it on every node: pip install 'gspo[ray]'"
        ) from error
    _check_environment()
    _check_port(os.environ.get(_ADDRESS, "auto"))
    try:
        ray.init(
            address="auto", namespace=namespace, log_to_driver=False, logging_level="ERROR", configure_logging=False
        )
    except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        raise _refusal(error) from error
    return ray


def _refusal(error: Exception) -> InputError:
    words = " ".join(str(error).split())
    # Its port has answered.
    if type(error).__name__ == "AuthenticationError" or "Failed to connect to Ray cluster at" in words:
        return InputError(
            "RAY_AUTH_TOKEN",
            "the cluster does not take this token, or there is none, or RAY_AUTH_MODE is another one there",
            "Set both as the nodes were started with them; RAY_AUTH_TOKEN_PATH names a file with the token",
        )
    if "Version mismatch" in words:
        return InputError(
            "--cluster",
            words.rstrip("."),
            "Start gspo by the Python and the Ray of the cluster's nodes: one environment or image for all",
        )
    return InputError(
        _ADDRESS,
        f"{os.environ.get(_ADDRESS, 'not set')}: this machine has no running node of a cluster ({words[:300]})",
        "Start gspo on a node of the cluster: in `ray symmetric-run`, or by `ray job submit -- gspo run ...`",
    )


def _check_environment() -> None:
    """Refuse addresses that are not of a cluster, and a cluster that anybody on the network may use, unless asked for.

    Raises:
        InputError: Names the variable.
    """
    address = os.environ.get(_ADDRESS, "auto")
    if "://" in address:
        raise InputError(
            _ADDRESS,
            f"{address} is the address of {'a Ray Client server' if address.startswith('ray:') else 'a dashboard'}",
            "Start gspo on a node of the cluster: `ray job submit -- gspo run ...`, or set it to HOST:6379 there",
        )
    if os.environ.get(_AUTH_MODE, "").lower() not in ("token", "disabled"):
        raise InputError(
            _AUTH_MODE,
            "is not set, so the cluster may have no token: everybody who reaches its ports could run code on it",
            "Set it to `token` on all nodes, with one RAY_AUTH_TOKEN (`ray get-auth-token --generate`); or here to "
            "`disabled`, if only you reach the cluster's network",
        )


def _check_port(address: str) -> None:
    """Ray itself would try for minutes.

    Raises:
        InputError: Nothing answers at an address of a cluster.
    """
    if address in ("auto", "local"):
        return
    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + _CONNECT_S
    reason = "it is no HOST:PORT"
    while host and port.isdigit():
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S).close()
            return
        except OSError as error:
            reason = error.strerror or str(error)
        if time.monotonic() > deadline:
            break
        time.sleep(1)
    raise InputError(
        _ADDRESS,
        f"nothing answers at {address} within {_CONNECT_S:g} s ({reason})",
        "Start the cluster (`ray start --head`), or correct the address",
    )
