"""What runs once before the containers' services: the secrets and the run directory, from a user's folder.

What it is not: the examples with their cold starts (tests/integration/run/test_prepare.py).
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from gspo.common.config.loading import read_config
from gspo.common.errors import InputError
from tests.support.tiny_model import make_tiny_model

ROOT = Path(__file__).parents[3]
REDIS = "redis://redis:6379/0"


def load(name: str, folder: Path = ROOT / "deploy/docker") -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's folder, as README describes it: everything by relative paths."""
    folder = tmp_path_factory.mktemp("my-run")
    make_tiny_model(folder / "model")
    (folder / "prompts.jsonl").write_text(json.dumps({"prompt": "1+1=", "answer": "2"}) + "\n")
    shutil.copy(ROOT / "examples/arithmetic/reward.py", folder / "reward.py")
    config = {
        "name": "mine",
        "model": {"path": "model"},
        "data": {"prompts": "prompts.jsonl"},
        "reward": {"functions": [{"path": "reward.py"}]},
        "algorithm": {"prompt_length": 32, "response_length": 8},
        "run": {"total_steps": 2},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return folder


@pytest.fixture
def secrets(tmp_path: Path) -> Path:
    (tmp_path / "secrets").mkdir()
    load("make_secrets").make(tmp_path / "secrets")
    return tmp_path / "secrets"


def test_a_users_folder_becomes_a_run_and_goes_on_with_what_may_change(
    folder: Path, secrets: Path, tmp_path: Path
) -> None:
    prepare, runs, again = load("prepare"), tmp_path / "runs", tmp_path / "again"
    run_dir = prepare.make_run(folder, runs, secrets, REDIS)
    assert run_dir == runs / "mine"
    assert (runs / "current").resolve() == run_dir.resolve()
    config = read_config(runs / "current/config.yaml")
    assert Path(config.model.path) == folder / "model"
    assert config.reward.functions[0].path == folder / "reward.py"
    assert config.services.token_file == secrets / "token"
    assert config.services.redis_password_file == secrets / "redis_password"
    assert config.services.redis_url == REDIS
    assert {"coordinator", "reward"} <= set(config.services.http_hosts)

    (run_dir / "log").mkdir()
    shutil.copytree(folder, again)
    given = yaml.safe_load((again / "config.yaml").read_text())
    # The same folder is mounted in the same place: only the values differ.
    given["model"]["path"] = str(folder / "model")
    given["data"]["prompts"] = str(folder / "prompts.jsonl")
    given["reward"]["functions"][0]["path"] = str(folder / "reward.py")
    given["run"]["total_steps"] = 5
    (again / "config.yaml").write_text(yaml.safe_dump(given))
    prepare.make_run(again, runs, secrets, REDIS)
    assert read_config(run_dir / "config.yaml").run.total_steps == 5
    assert (run_dir / "log").is_dir(), "what a running service has written was removed"
    given["seed"] = 7
    (again / "config.yaml").write_text(yaml.safe_dump(given))
    with pytest.raises(InputError, match="seed: cannot change on resume"):
        prepare.make_run(again, runs, secrets, REDIS)


def test_a_folder_without_a_configuration_is_one_line(tmp_path: Path, secrets: Path) -> None:
    command: list[str | Path] = [sys.executable, ROOT / "deploy/docker/prepare.py", "--input", tmp_path / "nothing"]
    command += ["--runs", tmp_path / "runs", "--secrets", secrets]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "config.yaml: is not there" in done.stderr
    assert "GSPO_INPUT" in done.stderr


def test_tls_which_the_containers_do_not_speak_is_refused(folder: Path, secrets: Path, tmp_path: Path) -> None:
    given = tmp_path / "with-tls"
    shutil.copytree(folder, given)
    config = yaml.safe_load((given / "config.yaml").read_text())
    tls = {"cert": "tls/cert.pem", "key": "tls/key.pem"}
    (given / "config.yaml").write_text(yaml.safe_dump({**config, "services": {"tls": tls}}))
    command: list[str | Path] = [
        sys.executable,
        ROOT / "deploy/docker/prepare.py",
        "--input",
        given,
        "--redis-url",
        REDIS,
    ]
    command += ["--runs", tmp_path / "runs", "--secrets", secrets]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: services.tls.cert: 'tls/cert.pem' is set")
    assert "Take services.tls out of config.yaml" in done.stderr


@pytest.mark.parametrize("services", [None, {"tls": {"cert": None}}])
def test_no_tls_may_be_said_in_words(services: Any, folder: Path, secrets: Path, tmp_path: Path) -> None:
    config = yaml.safe_load((folder / "config.yaml").read_text())
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({**config, "services": services}))
    for name in ("model", "prompts.jsonl", "reward.py"):
        (tmp_path / name).symlink_to(folder / name)
    made = load("prepare").container_config(tmp_path, tmp_path / "runs", secrets, REDIS).for_cpus
    assert not made.services.tls.is_on


def test_a_model_that_is_not_in_the_folder_is_named(folder: Path, secrets: Path, tmp_path: Path) -> None:
    given = tmp_path / "elsewhere"
    shutil.copytree(folder, given)
    config = yaml.safe_load((given / "config.yaml").read_text())
    config["model"]["path"] = "/home/me/models/qwen"
    (given / "config.yaml").write_text(yaml.safe_dump(config))
    prepare = load("prepare")
    with pytest.raises(prepare.RunError, match=r"model.path: /home/me/models/qwen is not a folder") as refused:
        prepare.make_run(given, tmp_path / "runs", secrets, REDIS)
    assert refused.value.exit_code == 2


def test_runs_that_cannot_be_written_are_said_so(folder: Path, secrets: Path, tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file stands where the folder belongs")
    with pytest.raises(InputError, match=r"run.directory: .* cannot be written by user"):
        load("prepare").make_run(folder, tmp_path / "runs", secrets, REDIS)


def test_secrets_are_made_once_and_belong_to_their_owner(tmp_path: Path) -> None:
    make = load("make_secrets").make
    assert set(make(tmp_path)) == {"token", "redis_password", "redis.conf", "grafana_password"}
    before = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert make(tmp_path) == []
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == before
    assert len(before["token"]) > 32
    assert before["redis.conf"] == f"requirepass {before['redis_password']}\n"
    assert (tmp_path / "token").stat().st_mode & 0o777 == 0o400


def test_grafana_gets_its_password_alone(tmp_path: Path) -> None:
    folders = [tmp_path / "secrets", tmp_path / "grafana"]
    for folder in folders:
        folder.mkdir()
    command: list[str | Path] = [sys.executable, ROOT / "deploy/docker/make_secrets.py", *folders]
    for _ in range(2):
        subprocess.run(command, check=True, timeout=60)
    assert [path.name for path in folders[1].iterdir()] == ["grafana_password"]
    assert (folders[1] / "grafana_password").read_text() == (folders[0] / "grafana_password").read_text()


def test_secrets_of_ones_own_stay(tmp_path: Path) -> None:
    (tmp_path / "redis_password").write_text("chosen-by-me\n")
    load("make_secrets").make(tmp_path)
    assert (tmp_path / "redis_password").read_text() == "chosen-by-me\n"
    assert (tmp_path / "redis.conf").read_text() == "requirepass chosen-by-me\n"


def test_a_folder_that_takes_no_secrets_is_one_line(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    command: list[str | Path] = [sys.executable, ROOT / "deploy/docker/make_secrets.py", file]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: secrets: ")
    assert done.stderr.count("\n") == 1
