"""docker-compose.yml and its GPU form against the code: what they name exists, and what they promise is written down.

What it is not: a start of containers, which tests/compose does.
"""

from __future__ import annotations

import json
import re
import shlex
import socket
import subprocess
import sys
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
import yaml

from gspo.cli.processes.redis_server import redis_command
from gspo.common.config.schema import RunConfig
from gspo.common.host.machine import GENERATORS_PER_GPU
from gspo.common.host.module_command import module_command
from gspo.common.service import options as options_module
from gspo.common.service.options import Options, parse_options
from gspo.common.streams.keys import AGENTS, GATEWAY, SERVICES
from tests.support.service_process import make_run

ROOT = Path(__file__).parents[3]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
CONTAINERS: dict[str, Any] = COMPOSE["services"]
GPU: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.gpu.yml").read_text())["services"]
STARTED = (*SERVICES, GATEWAY, AGENTS)
OURS = (*STARTED, "secrets", "prepare", "proxy", "gspo")
HTTP_PORT = 8000


def words(name: str) -> list[str]:
    return shlex.split(CONTAINERS[name]["command"])


def options_of(service: str, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Options:
    """What the service would read from its container's command line."""
    command = words(service)
    command[command.index("--run-dir") + 1] = str(run_dir)
    monkeypatch.setattr(sys, "argv", command[3:])
    monkeypatch.setattr(options_module, "set_up_logs", lambda *_, **__: None)
    monkeypatch.setattr("socket.gethostname", lambda: "4f1c2d3e4a5b")
    return parse_options(service, lambda _: None, meaning="")


def test_the_containers_are_the_services_and_what_they_need() -> None:
    assert set(CONTAINERS) == {*OURS, "redis", "prometheus", "grafana"}
    # Only what a person asks for is not started by `up`.
    profiles = {name: container["profiles"] for name, container in CONTAINERS.items() if "profiles" in container}
    assert profiles == {"gateway": ["gateway", "agents"], "agents": ["agents"], "gspo": ["tools"]}


@pytest.mark.parametrize("service", STARTED)
def test_a_service_starts_by_the_command_that_gspo_run_uses(
    service: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "token").write_text("a-secret-of-many-characters")
    (tmp_path / "redis_password").write_text("another-secret-of-many-characters")
    secrets = {"token_file": str(tmp_path / "token"), "redis_password_file": str(tmp_path / "redis_password")}
    config = make_run(tmp_path, tmp_path, services=secrets)
    assert words(service)[1:4] == [*module_command(f"gspo.{service}")[1:]]
    options = options_of(service, config.run_dir, monkeypatch)
    assert (options.host, options.http_port, options.stay) == ("0.0.0.0", HTTP_PORT, True)
    # Replicas are told apart; of the others there is one, which keeps its name.
    replicated = service in ("generation", "reward", "gateway", "agents")
    assert options.name == (f"{service}-4f1c2d3e4a5b" if replicated else f"{service}-0")


@pytest.mark.parametrize("service", STARTED)
def test_every_service_waits_for_redis_and_for_the_run_directory(service: str) -> None:
    container = CONTAINERS[service]
    assert container["depends_on"]["redis"]["condition"] == "service_healthy"
    assert container["depends_on"]["prepare"]["condition"] == "service_completed_successfully"
    assert container["environment"] == CONTAINERS["prepare"]["environment"]
    own = ["policies:/policies"] if service == "generation" else []
    assert container["volumes"] == [*CONTAINERS["prepare"]["volumes"], *own]
    assert words(service)[words(service).index("--run-dir") + 1] == "/runs/current"


@pytest.mark.parametrize("name", CONTAINERS)
def test_every_container_is_shut_in(name: str) -> None:
    container = CONTAINERS[name]
    assert container["init"]
    assert container["read_only"]
    assert container["cap_drop"] == ["ALL"]
    assert "no-new-privileges:true" in container["security_opt"]
    unconfined = [option for option in container["security_opt"] if "unconfined" in option]
    # bubblewrap mounts a /proc of its own in each sandbox.
    assert unconfined == (["apparmor=unconfined", "systempaths=unconfined"] if name == AGENTS else [])
    limits = container["deploy"]["resources"]["limits"]
    assert limits["memory"]
    assert limits["pids"]
    # vLLM's memory policy; an entry point that starts as root and leaves it.
    assert set(container.get("cap_add", [])) <= {
        "generation": {"SYS_NICE"},
        "redis": {"SETUID", "SETGID", "CHOWN", "DAC_OVERRIDE"},
    }.get(name, set())


def test_the_reward_service_is_in_a_network_that_leads_nowhere() -> None:
    assert CONTAINERS["reward"]["networks"] == ["inner"]
    assert CONTAINERS["redis"]["networks"] == ["inner"]
    assert COMPOSE["networks"]["inner"]["internal"] is True


def test_what_user_code_may_ask_of_the_kernel_is_less_than_all() -> None:
    (option,) = [option for option in CONTAINERS["reward"]["security_opt"] if option.startswith("seccomp=")]
    profile = json.loads((ROOT / option.removeprefix("seccomp=")).read_text())
    refused = {name for rule in profile["syscalls"] for name in rule["names"] if rule["action"] == "SCMP_ACT_ERRNO"}
    assert {"mount", "ptrace", "bpf", "keyctl", "unshare", "setns", "init_module", "io_uring_setup"} <= refused
    assert not [name for name in refused if name.startswith("landlock")]
    (clone,) = [rule for rule in profile["syscalls"] if rule["names"] == ["clone"]]
    new_user = 0x10000000  # CLONE_NEWUSER
    assert clone["args"] == [{"index": 0, "value": new_user, "valueTwo": new_user, "op": "SCMP_CMP_MASKED_EQ"}]


def test_the_service_of_agents_may_make_namespaces_and_nothing_more_than_reward() -> None:
    profiles = {}
    for name in ("reward", AGENTS):
        (option,) = [option for option in CONTAINERS[name]["security_opt"] if option.startswith("seccomp=")]
        profile = json.loads((ROOT / option.removeprefix("seccomp=")).read_text())
        profiles[name] = {call for rule in profile["syscalls"] for call in rule["names"]}
        assert profile["defaultAction"] == "SCMP_ACT_ALLOW"
    namespaces = {"clone", "mount", "pivot_root", "sethostname", "umount", "umount2", "unshare"}
    assert profiles["reward"] - profiles[AGENTS] == namespaces
    assert profiles[AGENTS] <= profiles["reward"]


def test_secrets_come_as_files() -> None:
    for name in STARTED:
        (mounted,) = [volume for volume in CONTAINERS[name]["volumes"] if ":/secrets" in volume]
        assert mounted.endswith(":ro")
        assert not [key for key in CONTAINERS[name]["environment"] if re.search("TOKEN|PASSWORD|SECRET", key)]
    assert words("redis")[1] == "/secrets/redis.conf"
    grafana = CONTAINERS["grafana"]["environment"]
    assert grafana["GF_SECURITY_ADMIN_PASSWORD__FILE"] == "/secrets/grafana_password"
    assert "GF_SECURITY_ADMIN_PASSWORD" not in grafana
    # Not the volume that has the token and the password of Redis.
    assert [it for it in CONTAINERS["grafana"]["volumes"] if "secret" in it] == ["grafana-secret:/secrets:ro"]


def test_healthy_means_ready() -> None:
    for service in STARTED:
        assert f"127.0.0.1:{HTTP_PORT}/readyz" in CONTAINERS[service]["healthcheck"]["test"][-1]


def test_the_page_names_whom_up_waits_for() -> None:
    """Compose waits for a health check where there is one, and for the start of everybody else."""
    asked_for = {name for name, container in CONTAINERS.items() if "profiles" in container}
    checked = {name for name, container in CONTAINERS.items() if "healthcheck" in container} - asked_for
    assert checked == {*SERVICES, "redis", "proxy"}
    ran_once = {"secrets", "prepare"}
    started = " and ".join(sorted(name.capitalize() for name in set(CONTAINERS) - checked - ran_once - asked_for))
    page = (ROOT / "docs/deployment.md").read_text()
    assert f"Redis, the four services and the proxy; {started} start then" in page


def test_the_proxy_is_healthy_when_it_takes_calls() -> None:
    check = CONTAINERS["proxy"]["healthcheck"]["test"]
    assert check[:3] == ["CMD", "python", "-c"]
    ports = [int(port.rpartition(":")[2]) for port in CONTAINERS["proxy"]["ports"]]
    places = "(8080, 8081, 8082)"
    assert str(tuple(ports)) == places
    with ExitStack() as listening:
        given = [listening.enter_context(closing(socket.create_server(("127.0.0.1", 0)))) for _ in ports]
        here = tuple(server.getsockname()[1] for server in given)
        asked = [sys.executable, "-c", check[3].replace(places, str(here))]
        assert subprocess.run(asked, capture_output=True, check=False, timeout=60).returncode == 0
        given[1].close()
        assert subprocess.run(asked, capture_output=True, check=False, timeout=60).returncode != 0


def test_a_container_is_given_the_time_that_a_drain_takes() -> None:
    for service in STARTED:
        grace = int(CONTAINERS[service]["stop_grace_period"].removesuffix("s"))
        assert grace > RunConfig().drain_timeout_s


def test_redis_keeps_what_the_redis_of_one_machine_keeps() -> None:
    expected = redis_command("0.0.0.0", 6379, Path("/data"))
    assert words("redis")[0] == "redis-server"
    for option in ("--appendonly", "--maxmemory-policy", "--auto-aof-rewrite-min-size", "--rdbcompression"):
        assert words("redis")[words("redis").index(option) + 1] == expected[expected.index(option) + 1]


def test_nothing_is_published_beyond_loopback() -> None:
    published = {name: container["ports"] for name, container in CONTAINERS.items() if "ports" in container}
    assert set(published) == {"proxy", "prometheus", "grafana"}
    assert all(port.startswith("127.0.0.1:") for ports in published.values() for port in ports)


def test_the_proxy_routes_to_every_service_with_an_http_api() -> None:
    config = (ROOT / "deploy/docker/haproxy.cfg").read_text()
    bound = set(re.findall(r"^  bind :(\d+)$", config, re.MULTILINE))
    assert bound == {port.rpartition(":")[2] for port in CONTAINERS["proxy"]["ports"]}
    servers = dict(re.findall(r"^  server-template \w+ \d+ (\w+):(\d+)$", config, re.MULTILINE))
    assert servers == dict.fromkeys(("coordinator", "reward", "gateway"), str(HTTP_PORT))


def test_prometheus_scrapes_every_service() -> None:
    (job,) = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())["scrape_configs"]
    (scraped,) = job["dns_sd_configs"]
    assert (set(scraped["names"]), scraped["port"]) == (set(STARTED), HTTP_PORT)


@pytest.mark.parametrize("service", ["generation", "learner"])
def test_on_gpus_each_engine_has_one_shared_memory_and_the_cuda_build(service: str) -> None:
    container = GPU[service]
    assert container["image"] == "gspo-engine-cuda"
    assert container["build"]["target"] == "engine-cuda"
    (devices,) = container["deploy"]["resources"]["reservations"]["devices"]
    assert (devices["driver"], devices["capabilities"]) == ("nvidia", ["gpu"])
    assert container["shm_size"].endswith(":-16gb}")
    assert "NCCL_SOCKET_IFNAME" in container["environment"]


def test_a_learner_knows_of_generators_on_its_gpu() -> None:
    assert GENERATORS_PER_GPU in GPU["learner"]["environment"]
    assert "NCCL_SOCKET_IFNAME" in GPU["learner"]["environment"]


def test_the_gpu_form_changes_only_what_needs_a_gpu() -> None:
    assert set(GPU) == {"prepare", "generation", "learner", "gspo"}
    assert not [name for name in GPU if "command" in GPU[name] or "networks" in GPU[name]]


def test_what_is_mounted_from_the_repository_is_there() -> None:
    for name, container in CONTAINERS.items():
        for volume in container.get("volumes", []):
            source = re.sub(r"^\$\{\w+:-(.*?)\}", r"\1", volume).split(":")[0]
            if source.startswith("./"):
                assert (ROOT / source).is_dir(), f"{name}: {source}"
            else:
                assert source in COMPOSE["volumes"], f"{name}: {source}"


def test_the_commands_of_the_documents_are_those_that_the_engine_test_runs() -> None:
    driven = "".join((ROOT / f"tests/compose/{name}.py").read_text() for name in ("__main__", "agents"))
    for document in ("README.md", "docs/deployment.md"):
        blocks = re.findall(r"```sh\n(.*?)```", (ROOT / document).read_text(), re.DOTALL)
        lines = [line for block in blocks for line in block.splitlines() if line.startswith("docker compose")]
        assert lines
        assert [line for line in lines if f'"{line}"' not in driven] == [], document
