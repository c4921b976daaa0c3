"""The bundles that a run asks a cluster for, its configuration there, and the environment of its processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from gspo.cli.cluster.layout import lay_out
from gspo.cli.cluster.process_actor import node_environment
from gspo.cli.cluster.ray_cluster import ClusterNode
from gspo.cli.cluster.ray_run import write_cluster_config
from gspo.cli.cluster.reservations import Demand, demands
from gspo.cli.processes.programs import process_names, services_of
from gspo.common.config.loading import read_config
from tests.support.service_process import make_run
from tests.unit.cli.cluster.test_layout import allocation, run_of, shared_run


def asked(folder: Path, *num_gpus: int, shared: bool = False, **demand: int) -> list[Demand]:
    config = (shared_run if shared else run_of)(folder, **demand)
    return demands(config, lay_out(config, allocation(*num_gpus)), process_names(config, services_of(config)))


def test_ranks_are_packed_by_node_and_a_generator_has_its_gpus(tmp_path: Path) -> None:
    assert asked(tmp_path, 8, 8, 8, ranks=12, replicas=2, tensor=2) == [
        Demand(("learner-0",), ({"GPU": 6.0, "CPU": 1.0},) * 2, "PACK"),
        Demand(("generation-0",), ({"GPU": 2.0, "CPU": 1.0},)),
        Demand(("generation-1",), ({"GPU": 2.0, "CPU": 1.0},)),
        Demand(("reward-0",), ({"CPU": 1.0},)),
    ]


def test_shared_gpus_are_bundles_of_both(tmp_path: Path) -> None:
    first, *others = asked(tmp_path, 8, 8, shared=True, ranks=16, replicas=4, tensor=4)
    generators = ("generation-0", "generation-1", "generation-2", "generation-3")
    assert first == Demand(("learner-0", *generators), ({"GPU": 8.0, "CPU": 1.0},) * 2, "PACK")
    assert [demand.processes for demand in others] == [("reward-0",)]
    assert first.in_words() == f"2 x 8 GPU for learner-0, {', '.join(generators)}"


def test_without_gpus_ranks_are_on_different_nodes(tmp_path: Path) -> None:
    first, *others = asked(tmp_path, 0, 0, 0, ranks=2, replicas=2)
    assert first == Demand(("learner-0",), ({"CPU": 1.0},) * 2, "SPREAD")
    assert [demand.bundles for demand in others] == [({"CPU": 1.0},)] * 3


def test_a_node_has_as_many_gpus_as_ray_counts() -> None:
    facts = {"gpus": [{"name": "0", "total_bytes": 80 << 30}, {"name": "1"}]}
    cards = ClusterNode("id", "n1", "10.0.0.1", 4.0, 3, facts).as_planned().gpus
    assert [(gpu.name, gpu.total_bytes) for gpu in cards] == [("0", 80 << 30), ("1", None), ("2", None)]
    assert ClusterNode("id", "n1", "10.0.0.1", 4.0, 1, facts).as_planned().gpus[0].name == "0"


def test_a_run_keeps_its_secrets_and_the_users(tmp_path: Path) -> None:
    folder = tmp_path / "services" / "cluster"
    folder.mkdir(parents=True)
    first = read_config(write_cluster_config(make_run(tmp_path, tmp_path), folder)).services
    again = read_config(write_cluster_config(make_run(tmp_path, tmp_path), folder)).services
    assert first == again
    assert first.host == "0.0.0.0"
    assert first.token_file and first.redis_password_file
    assert first.token_file.stat().st_mode & 0o077 == 0
    assert first.token_file.read_text() != first.redis_password_file.read_text()
    of_user = make_run(tmp_path, tmp_path, services={"token_file": str(tmp_path / "mine")})
    assert read_config(write_cluster_config(of_user, folder)).services.token_file == tmp_path / "mine"


@pytest.mark.parametrize(
    ("name", "on_node", "at_driver", "expected"),
    [
        ("HF_HOME", None, "/models", "/models"),
        ("PATH", "/node/bin", "/driver/bin", "/node/bin"),
        ("RAY_AUTH_TOKEN", "secret", "secret", None),
        ("CUDA_VISIBLE_DEVICES", None, "3", None),
        ("OMP_NUM_THREADS", "1", None, None),
        ("OMP_NUM_THREADS", "1", "8", "8"),
    ],
)
def test_the_environment_of_a_process_on_a_node(
    name: str, on_node: str | None, at_driver: str | None, expected: str | None
) -> None:
    node, driver = ({name: value} if value else {} for value in (on_node, at_driver))
    assert node_environment(node, driver).get(name) == expected
