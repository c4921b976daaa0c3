"""The examples as the containers mount them, each alone: prepare.py makes model and prompts, and the run directory.

tests/unit/deploy/test_prepare.py has the cases of a user's own folder.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from gspo.common.config.loading import read_config
from tests.unit.deploy.test_prepare import REDIS, ROOT, load

Prepare = Callable[[Path], str]


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that the Dockerfile puts into /app, and the volume /runs, which all examples share."""
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


@pytest.fixture
def prepare(image: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Prepare:
    """Runs the image's prepare.py on a mounted folder, with a short cold start; what it printed."""

    def run(folder: Path) -> str:
        words = ["--input", folder, "--runs", image / "runs", "--secrets", image / "secrets", "--redis-url", REDIS]
        monkeypatch.setattr(sys, "argv", ["prepare.py", *map(str, words), "--cold-start", "--steps 2"])
        monkeypatch.chdir(image)
        load("prepare", image / "app").main()
        return capfd.readouterr().out

    return run


def mount(name: str, folder: Path) -> Path:
    """An example as a folder of its own."""
    return shutil.copytree(ROOT / "examples" / name, folder / "input", ignore=shutil.ignore_patterns("__pycache__"))


@pytest.mark.long
@pytest.mark.parametrize(("name", "code"), [("arithmetic", ["reward.py"]), ("calculator", [])])
def test_an_example_that_is_mounted_alone_becomes_a_run(
    name: str, code: list[str], prepare: Prepare, image: Path, tmp_path: Path
) -> None:
    mounted = mount(name, tmp_path)
    printed = prepare(mounted)
    assert "2 steps" in printed
    assert "is ready" in printed
    config = read_config(image / "runs/current/config.yaml")
    inputs = image / "runs/inputs"
    assert (image / "runs/current").resolve() == image / "runs" / name
    assert config.run.total_steps == read_config(mounted / "config.yaml").run.total_steps
    assert Path(config.model.path) == inputs / "model"
    assert config.data.prompts == inputs / "prompts.jsonl"
    paths = [config.environment.path, *(function.path for function in config.reward.functions)]
    assert [path for path in paths if path] == [inputs / file for file in code]
    assert all((inputs / file).read_text() == (mounted / file).read_text() for file in code)


@pytest.mark.long
def test_code_that_was_changed_since_is_taken_over_beside_the_cold_start_that_is_there(
    prepare: Prepare, image: Path, tmp_path: Path
) -> None:
    mounted = mount("guess", tmp_path)
    config = yaml.safe_load((mounted / "config.yaml").read_text())
    config["environment"] = {**config["environment"], "path": "code/game.py", "reads": ["code/words"]}
    (mounted / "config.yaml").write_text(yaml.safe_dump({**config, "name": "own"}))
    (mounted / "code/words").mkdir(parents=True)
    (mounted / "code/words/list.txt").write_text("higher\n")
    game = image / "runs/inputs/code/game.py"
    for comment in ("# first", "# second"):
        (mounted / "code/game.py").write_text((mounted / "game.py").read_text() + comment)
        printed = prepare(mounted)
        assert game.read_text().endswith(comment)
    assert "up to date" in printed
    assert read_config(image / "runs/current/config.yaml").environment.path == game
    assert (image / "runs/inputs/code/words/list.txt").read_text() == "higher\n"
