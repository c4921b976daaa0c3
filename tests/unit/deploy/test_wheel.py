"""The wheel outside the repository: built, installed into an environment of its own, and called from another folder.

The environment has gspo from the wheel alone; the packages that gspo needs come from the environment of the tests.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
DATA_SUFFIXES = {".html", ".css", ".yaml", ".txt", ".js", ".typed"}


def call(*command: str | Path, folder: Path) -> str:
    """Run a command with few environment variables, and return its output."""
    done = subprocess.run(
        [str(part) for part in command],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=240,
        env={"PATH": "/usr/bin:/bin"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The environment with the wheel: bin/gspo is the command, site the folder of its packages."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    # A copy: setuptools would keep an older build's files beside the sources.
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("gspo_core", "proto", "services"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    call(*pip, "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", folder, source, folder=folder)
    (wheel,) = folder.glob("gspo-*.whl")
    shutil.rmtree(source)
    environment = folder / "environment"
    venv.create(environment, with_pip=False)
    python = environment / "bin/python"
    call(*pip, "--python", python, "install", "-q", "--no-deps", "--no-index", wheel, folder=folder)
    site = call(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", folder=folder).strip()
    # A plain path: the .pth files in it, such as that of an editable gspo, are not read.
    (Path(site) / "packages_of_the_tests.pth").write_text(sysconfig.get_path("purelib") + "\n")
    (environment / "site").symlink_to(site)
    return environment


def test_gspo_is_the_wheel_s(installed: Path, tmp_path: Path) -> None:
    where = call(installed / "bin/python", "-c", "import gspo; print(gspo.__file__)", folder=tmp_path)
    assert Path(where.strip()).is_relative_to((installed / "site").resolve())


def test_every_module_and_data_file_is_in_the_wheel(installed: Path) -> None:
    for package, place in (("gspo", "services/gspo"), ("gspo_core", "gspo_core"), ("gspo_proto", "proto/gspo_proto")):
        for path in (ROOT / place).rglob("*"):
            if path.suffix in {".py", *DATA_SUFFIXES}:
                name = Path(package) / path.relative_to(ROOT / place)
                assert (installed / "site" / name).exists(), f"{name}: see package-data in pyproject.toml"


def test_commands_work_from_another_folder(installed: Path, tmp_path: Path) -> None:
    gspo = installed / "bin/gspo"
    assert "doctor" in call(gspo, "--help", folder=tmp_path)
    assert "algorithm.pg_clip_high" in call(gspo, "config", "--markdown", folder=tmp_path)
    call(gspo, "init", "my-run", "--model", "Qwen/Qwen3-0.6B", folder=tmp_path)
    assert {path.name for path in (tmp_path / "my-run").iterdir()} >= {"config.yaml", "reward.py", "prompts.jsonl"}
    doctor = subprocess.run(
        [gspo, "doctor"], cwd=tmp_path, capture_output=True, text=True, timeout=240, env={"PATH": "/usr/bin:/bin"}
    )
    assert "sandbox" in doctor.stdout and "Traceback" not in doctor.stdout + doctor.stderr
