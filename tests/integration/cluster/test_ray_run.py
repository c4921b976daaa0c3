"""`gspo run --cluster ray` on a real Ray cluster of three nodes: deaths, refusals, and what it leaves.

The services are in small; tests/integration/cluster/test_killed_cluster.py has the real engines.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from rich.console import Console

from gspo.cli.cluster import ray_cluster as ray_cluster_module
from gspo.cli.cluster.ray_run import run_on_ray
from gspo.cli.run.scaling import scale
from gspo.common.errors import InputError
from gspo.common.host.module_command import POLICIES_VARIABLE
from gspo.common.network.credentials import ADDRESS_VARIABLE
from tests.integration.cli.test_run import Gspo
from tests.support.cluster.ray_cluster import RayNodesHere, actor_of, processes_with, ray_cluster, until

pytestmark = pytest.mark.timeout(300)
SERVICES = "coordinator generation reward learner"


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayNodesHere]:
    """The head has one place; two of three generators are on the other nodes."""
    with ray_cluster(head={"num_cpus": 1}, n1={"num_cpus": 4}, n2={"num_cpus": 4}) as nodes:
        yield nodes


@pytest.fixture
def gspo(tmp_path: Path) -> Iterator[Gspo]:
    command_line = Gspo(tmp_path.resolve())
    yield command_line
    command_line.close()


def refusal(gspo: Gspo) -> str:
    with pytest.raises(InputError) as error:
        run_on_ray(gspo.folder / "config.yaml", resume=False, plain=True, console=Console(quiet=True))
    return str(error.value)


def files_of_policies(gspo: Gspo, names: Iterable[str]) -> dict[str, set[int]]:
    """By address of a node, the inodes of the files in which its generators keep policies."""
    files: dict[str, set[int]] = {}
    for name in names:
        (process,) = processes_with(f"--name {name}", gspo.folder)
        variables = process.environ()
        inode = Path(variables[POLICIES_VARIABLE]).stat().st_ino
        files.setdefault(variables[ADDRESS_VARIABLE], set()).add(inode)
    return files


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"RAY_AUTH_MODE": ""}, "RAY_AUTH_MODE: is not set, so the cluster may have no token"),
        ({"RAY_ADDRESS": "ray://127.0.0.1:10001"}, "is the address of a Ray Client server. Start gspo on a node"),
        ({"RAY_ADDRESS": "http://127.0.0.1:8265"}, "is the address of a dashboard. Start gspo on a node"),
        ({"RAY_ADDRESS": "127.0.0.1:9"}, "nothing answers at 127.0.0.1:9 within 0.1 s (Connection refused). Start"),
    ],
)
def test_a_cluster_that_cannot_be_used_is_refused(
    gspo: Gspo, cluster: RayNodesHere, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], words: str
) -> None:
    monkeypatch.setattr(ray_cluster_module, "_CONNECT_S", 0.1)
    for name, value in {**cluster.environment, **variables}.items():
        monkeypatch.setenv(name, value)
    assert words in refusal(gspo)


@pytest.mark.long
@pytest.mark.parametrize("variables", [{"RAY_AUTH_TOKEN": "0" * 32}, {"RAY_AUTH_MODE": "disabled"}])
def test_another_token_is_refused(gspo: Gspo, cluster: RayNodesHere, variables: dict[str, str]) -> None:
    gspo.environment = {**cluster.environment, **variables}
    code, printed = gspo.run("config.yaml", "--cluster", "ray", fake="")
    assert code == 2
    assert "error: RAY_AUTH_TOKEN: the cluster does not take this token" in printed.splitlines()[-1]


def test_another_version_of_ray_is_refused(gspo: Gspo, cluster: RayNodesHere, monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    for name, value in cluster.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(ray, "__version__", "2.59.0")
    words = refusal(gspo)
    ray.shutdown()  # this process would have half a connection
    assert re.search(r"Ray: 2\.6\d\.\d.*Ray: 2\.59\.0.*Start gspo by the Python and the Ray", words)


@pytest.mark.long
def test_a_cluster_that_is_too_small_is_refused(
    gspo: Gspo, cluster: RayNodesHere, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in cluster.environment.items():
        monkeypatch.setenv(name, value)
    gspo.configure(generation={"replicas": 20})
    assert "the run has 22 places of one CPU each, and Ray counts 9 CPUs on 3 nodes" in refusal(gspo)


def test_what_dies_starts_again_elsewhere_and_a_killed_driver_leaves_nothing(gspo: Gspo, cluster: RayNodesHere) -> None:
    gspo.environment = cluster.environment
    gspo.configure(generation={"replicas": 3})
    process = gspo.start("config.yaml", "--cluster", "ray", "--plain", fake="learner:child", services=SERVICES)
    names = ("generation-0", "generation-1", "generation-2", "reward-0", "learner-0")
    until(lambda: all(gspo.starts(name) for name in names), "the first start of all")
    assert all(len(files) == 1 for files in files_of_policies(gspo, names[:3]).values())
    # One whose process, one whose actor and one whose node dies.
    (learner,) = processes_with("--name learner-0", gspo.folder)
    learner.kill()
    until(lambda: len(gspo.starts("learner-0")) == 2, "the learner again")
    (reward,) = processes_with("--name reward-0", gspo.folder)
    actor_of(reward).kill()
    until(lambda: len(gspo.starts("reward-0")) == 2, "the reward service again")
    assert not reward.is_running() or reward.status() == "zombie"
    cluster.lose("n2")
    until(lambda: sum(len(gspo.starts(name)) for name in names) > 7, "those of the lost node again")
    until(lambda: all(len(processes_with(f"--name {name}", gspo.folder)) == 1 for name in names), "one process of each")
    os.kill(process.pid, 9)
    until(lambda: not gspo.remaining(), "the end of all processes")
    assert process.stdout is not None
    printed = process.stdout.read()
    assert re.search(r"process +node\n", printed)
    assert "learner-0 died (killed by SIGKILL). Starting it again" in printed
    assert re.search(r"reward-0 died \(its actor on \w+ has died, or the whole node\). Starting it again", printed)
    assert re.search(r"-\d died \(its actor on n2 has died, or the whole node\). Starting it again", printed)
    assert (gspo.run_dir / "services" / "generation-2.log").exists()


@pytest.mark.long
def test_a_joined_node_is_used_and_a_lost_head_ends_the_run(gspo: Gspo, cluster: RayNodesHere) -> None:
    """The last test: it ends the cluster."""
    gspo.environment = cluster.environment
    gspo.configure(generation={"replicas": 3})
    process = gspo.start("config.yaml", "--cluster", "ray", "--plain", fake="learner:child", services=SERVICES)
    until(lambda: gspo.starts("learner-0") and gspo.starts("generation-0"), "the start")
    num_cpus = sum(cluster.num_cpus.values())
    with pytest.raises(
        InputError, match=rf"{num_cpus - 1} more need {num_cpus - 1} CPU, and \d of {num_cpus} are free"
    ):
        scale(gspo.run_dir, f"generation={num_cpus + 2}")
    # A node with another gspo gets the last one, which waits until it gets another place.
    number = num_cpus - 1
    other = gspo.folder / "other" / "gspo-0.0.1.dist-info"
    other.mkdir(parents=True)
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: gspo\nVersion: 0.0.1\n")
    cluster.add("other", {"PYTHONPATH": os.pathsep.join([str(other.parent), *sys.path])}, num_cpus=1)
    assert scale(gspo.run_dir, f"generation={number}").startswith(f"generation: 3 -> {number}; starting generation-3")
    until(lambda: len(list(gspo.run_dir.glob("generation-*.starts"))) == number - 1, "all generators but one")
    time.sleep(10)
    cluster.lose("other")
    cluster.add("joined", num_cpus=1)
    until(lambda: len(list(gspo.run_dir.glob("generation-*.starts"))) == number, "the last generator")
    files = files_of_policies(gspo, [f"generation-{at}" for at in range(number)])
    assert sum(map(len, files.values())) == len(files) < number, "a file for each node"
    scale(gspo.run_dir, "generation=3")
    until(lambda: not processes_with("--name generation-3", gspo.folder), "the end of those that are too many")
    cluster.lose_head()
    printed, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    words = r"error: the head of the Ray cluster \(127\.0\.0\.10:\d+\) has not answered for 2\d s: .*"
    assert re.search(r"generation-\d cannot start there, and waits: .* has gspo 0\.0\.1", printed), printed
    command = f"Continue it:\n  gspo run --resume {gspo.run_dir} --cluster ray\n"
    assert re.search(words + re.escape(command), printed), printed
    assert "GCS may have been killed" not in printed, "Ray's own end comes first"
    until(lambda: not gspo.remaining(), "the end of all processes")
