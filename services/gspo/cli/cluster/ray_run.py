"""`gspo run --cluster ray`: a run over the nodes of a Ray cluster, from one of its nodes.

Redis and coordinator run here, under the same supervisor as on one machine. Everything else is in actors on the nodes,
which end with this process.
"""

import os
import secrets
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from gspo.cli.cluster.layout import lay_out
from gspo.cli.cluster.ray_cluster import RayCluster
from gspo.cli.cluster.ray_nodes import RayNodes
from gspo.cli.cluster.reservations import demands
from gspo.cli.processes.exit_codes import InterruptedRunError
from gspo.cli.processes.programs import process_names, services_of
from gspo.cli.processes.redis_server import write_secret
from gspo.cli.run.training import run
from gspo.cli.rundir.start import SERVICES_DIR, decide_start, lock_run_dir
from gspo.common.config.loading import CONFIG_NAME, parse_config, write_config
from gspo.common.config.schema import Config
from gspo.common.errors import InputError
from gspo.common.network.credentials import ADDRESS_VARIABLE, EVERY_INTERFACE

_FOLDER = "cluster"
_SECRETS = {"token_file": "token", "redis_password_file": "redis_password"}


def run_on_ray(target: Path, *, resume: bool, plain: bool, console: Console, leave_out: int | None = None) -> int:
    """Run over the nodes of a cluster; arguments and errors as for `run`.

    Raises:
        InputError: Also if the cluster, a node of it, or its size does not suit.
    """
    start = decide_start(target, resume=resume, leave_out=leave_out)
    if start.finished:
        return run(target, resume=resume, leave_out=leave_out, plain=plain, console=console)
    with lock_run_dir(start.run_dir):  # before anything is asked of the cluster
        folder = start.run_dir / SERVICES_DIR / _FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)
    if start.from_device:
        console.print(start.from_device, style="dim", highlight=False, soft_wrap=True)

    def say(text: str) -> None:
        console.print(text, style="yellow", highlight=False, soft_wrap=True)

    try:
        with (
            RayCluster(f"gspo-{start.config.name}") as cluster,
            cluster.watched(lambda: _nodes(cluster, start.config, folder, say)) as nodes,
        ):
            file = write_cluster_config(start.config, folder)
            return run(file, resume=resume, leave_out=leave_out, plain=plain, console=console, nodes=nodes)
    except KeyboardInterrupt as stop:
        raise InterruptedRunError("stopped before anything was started") from stop


def _nodes(cluster: RayCluster, config: Config, folder: Path, say: Callable[[str], None]) -> RayNodes:
    """The places of the run, when the cluster has given them.

    Raises:
        InputError: A node is not fit, or the cluster is too small.
    """
    surveyed = cluster.surveyed(folder)
    os.environ[ADDRESS_VARIABLE] = surveyed[0].address
    layout = lay_out(config, [node.as_planned() for node in surveyed if node.num_gpus or node.num_cpus])
    asked = demands(config, layout, process_names(config, services_of(config)))
    num_cpus, num_bundles = sum(node.num_cpus for node in surveyed), sum(len(demand.bundles) for demand in asked)
    if num_bundles > num_cpus:
        raise InputError(
            "--cluster",
            f"the run has {num_bundles} places of one CPU each, and Ray counts {num_cpus:g} CPUs on "
            f"{len(surveyed)} nodes",
            "Lower generation.replicas, reward.replicas or learner.ranks, or start nodes with more (--num-cpus)",
        )
    nodes = RayNodes(cluster, config, asked, say)
    try:
        nodes.await_bundles()
    except BaseException:
        nodes.give_back()
        raise
    return nodes


def write_cluster_config(config: Config, folder: Path) -> Path:
    """The run's configuration on a cluster: on every interface, with a token and a Redis password of its own.

    They stay the same over resumes. Credentials that the user has set stay too.
    """
    services = config.services.model_dump(mode="json") | {"host": EVERY_INTERFACE[0]}
    for key, name in _SECRETS.items():
        if services[key] is None:
            path = folder / name
            if not path.exists():
                write_secret(path, secrets.token_hex(32).encode())
            services[key] = str(path)
    file = folder / CONFIG_NAME
    write_config(parse_config(config.model_dump(mode="json") | {"services": services}, folder), file)
    return file
