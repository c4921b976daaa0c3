"""What runs once before the containers' services: the secrets and the run directory, from a user's folder.

What it is not: the example's cold start, which tests/compose runs. Neighbour: test_compose.py.
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

from services.common.configfile import read_config
from services.common.errors import InputError
from tests.tiny_model import make_tiny_model

ROOT = Path(__file__).parents[3]
REDIS = "redis://redis:6379/0"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / f"deploy/docker/{name}.py")
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


def test_a_users_folder_becomes_a_run(folder: Path, secrets: Path, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    run_dir = load("prepare").make_run(folder, runs, secrets, REDIS)
    assert run_dir == runs / "mine"
    assert (runs / "current").resolve() == run_dir.resolve()
    config = read_config(runs / "current/config.yaml")
    assert Path(config.model.path) == folder / "model"
    assert config.reward.functions[0].path == folder / "reward.py"
    assert config.services.token_file == secrets / "token"
    assert config.services.redis_password_file == secrets / "redis_password"
    assert config.services.redis_url == REDIS


def test_a_second_start_goes_on_with_what_may_change(folder: Path, secrets: Path, tmp_path: Path) -> None:
    prepare, runs, again = load("prepare"), tmp_path / "runs", tmp_path / "again"
    run_dir = prepare.make_run(folder, runs, secrets, REDIS)
    (run_dir / "log").mkdir()
    shutil.copytree(folder, again)
    config = yaml.safe_load((again / "config.yaml").read_text())
    # The same folder is mounted in the same place: only the values differ.
    config["model"]["path"] = str(folder / "model")
    config["data"]["prompts"] = str(folder / "prompts.jsonl")
    config["reward"]["functions"][0]["path"] = str(folder / "reward.py")
    config["run"]["total_steps"] = 5
    (again / "config.yaml").write_text(yaml.safe_dump(config))
    prepare.make_run(again, runs, secrets, REDIS)
    assert read_config(run_dir / "config.yaml").run.total_steps == 5
    assert (run_dir / "log").is_dir(), "what a running service has written was removed"
    config["seed"] = 7
    (again / "config.yaml").write_text(yaml.safe_dump(config))
    with pytest.raises(InputError, match="seed: cannot change on resume"):
        prepare.make_run(again, runs, secrets, REDIS)


def test_a_folder_without_a_configuration_is_one_line(tmp_path: Path, secrets: Path) -> None:
    command = [sys.executable, ROOT / "deploy/docker/prepare.py", "--input", tmp_path / "nothing"]
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
    command = [sys.executable, ROOT / "deploy/docker/prepare.py", "--input", given, "--redis-url", REDIS]
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
    made = load("prepare").container_config(tmp_path, tmp_path / "runs", secrets, REDIS)
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


def test_secrets_of_ones_own_stay(tmp_path: Path) -> None:
    (tmp_path / "redis_password").write_text("chosen-by-me\n")
    load("make_secrets").make(tmp_path)
    assert (tmp_path / "redis_password").read_text() == "chosen-by-me\n"
    assert (tmp_path / "redis.conf").read_text() == "requirepass chosen-by-me\n"


def test_a_folder_that_takes_no_secrets_is_one_line(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    command = [sys.executable, ROOT / "deploy/docker/make_secrets.py", file]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: secrets: ")
    assert done.stderr.count("\n") == 1


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the Dockerfile puts into /app, and the volume /runs, which every example comes to in turn."""
    image = tmp_path_factory.mktemp("image")
    dockerfile = (ROOT / "deploy/docker/Dockerfile").read_text()
    for source in ("examples", "deploy/docker/prepare.py"):
        target = f"/app/{Path(source).name}"
        assert f"COPY {source} {target}\n" in dockerfile
        copy = shutil.copytree if (ROOT / source).is_dir() else shutil.copy
        copy(ROOT / source, image / target.removeprefix("/"))
    (image / "secrets").mkdir()
    load("make_secrets").make(image / "secrets")
    return image


def prepared(image: Path, folder: Path) -> str:
    """Run the image's prepare.py on a mounted folder, with a short cold start; what it printed."""
    command = [sys.executable, image / "app/prepare.py", "--input", folder, "--runs", image / "runs"]
    command += ["--secrets", image / "secrets", "--redis-url", REDIS, "--cold-start", "--steps 2"]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, cwd=image, timeout=280
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.parametrize("name", ["arithmetic", "calculator", "guess"])
def test_an_example_that_is_mounted_alone_becomes_a_run(name: str, image: Path, tmp_path: Path) -> None:
    mounted = tmp_path / "input"
    shutil.copytree(ROOT / "examples" / name, mounted, ignore=shutil.ignore_patterns("__pycache__"))
    printed = prepared(image, mounted)
    assert "2 steps" in printed
    assert "is ready" in printed
    config = read_config(image / "runs/current/config.yaml")
    inputs = image / "runs/inputs"
    assert (image / "runs/current").resolve() == image / "runs" / name
    assert config.run.total_steps == read_config(mounted / "config.yaml").run.total_steps
    assert Path(config.model.path) == inputs / "model"
    assert config.data.prompts == inputs / "prompts.jsonl"
    code = [config.environment.path, *(function.path for function in config.reward.functions)]
    named = {"arithmetic": ["reward.py"], "calculator": [], "guess": ["game.py"]}[name]
    assert [path for path in code if path] == [inputs / file for file in named]
    assert all((inputs / file).read_text() == (mounted / file).read_text() for file in named)


def test_code_that_was_changed_since_is_taken_over_beside_the_cold_start_that_is_there(
    image: Path, tmp_path: Path
) -> None:
    mounted = tmp_path / "input"
    shutil.copytree(ROOT / "examples/guess", mounted, ignore=shutil.ignore_patterns("__pycache__"))
    config = yaml.safe_load((mounted / "config.yaml").read_text())
    config["environment"] = {**config["environment"], "path": "code/game.py", "reads": ["code/words"]}
    (mounted / "config.yaml").write_text(yaml.safe_dump({**config, "name": "own"}))
    (mounted / "code/words").mkdir(parents=True)
    (mounted / "code/words/list.txt").write_text("higher\n")
    for comment in ("# first", "# second"):
        (mounted / "code/game.py").write_text((mounted / "game.py").read_text() + comment)
        printed = prepared(image, mounted)
        assert (image / "runs/inputs/code/game.py").read_text().endswith(comment)
    assert "up to date" in printed
    assert (image / "runs/inputs/code/words/list.txt").read_text() == "higher\n"
