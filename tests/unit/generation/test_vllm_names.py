"""The names that each service takes from vLLM's modules: deploy/vllm_names.toml and the installed vLLM have them."""

from __future__ import annotations

import ast
import importlib
import json
import tomllib
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
FILE = ROOT / "deploy/vllm_names.toml"
NAMES: dict[str, dict[str, list[str]]] = tomllib.loads(FILE.read_text())


def taken_names() -> dict[str, dict[str, list[str]]]:
    """Service -> module of vLLM -> names that its code imports from there; none for the module itself."""
    taken: defaultdict[str, defaultdict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for path in (ROOT / "services/gspo").rglob("*.py"):
        modules = taken[path.relative_to(ROOT / "services/gspo").parts[0]]
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "vllm":
                modules[str(node.module)] |= {alias.name for alias in node.names}
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    if alias.name.partition(".")[0] == "vllm":
                        modules[alias.name] |= set()
    return {
        service: {module: sorted(names) for module, names in sorted(modules.items())}
        for service, modules in sorted(taken.items())
        if modules
    }


def as_toml(names: dict[str, dict[str, list[str]]]) -> str:
    """The sections of the file."""
    lines = []
    for service, modules in names.items():
        lines += [f"\n[{service}]"]
        lines += [f'"{module}" = {json.dumps(own)}' for module, own in modules.items()]
    return "\n".join(lines)


def test_the_file_has_the_names_that_the_code_takes() -> None:
    taken = taken_names()
    assert taken == NAMES, f"deploy/vllm_names.toml: write these sections:\n{as_toml(taken)}"


@pytest.mark.long
@pytest.mark.parametrize("service", NAMES)
def test_the_installed_vllm_has_every_name(service: str) -> None:
    missing = []
    for module, names in NAMES[service].items():
        try:
            loaded = importlib.import_module(module)
        except ImportError as error:
            missing.append(f"{module} ({error})")
            continue
        missing += [f"{module}.{name}" for name in names if not has_name(loaded, name)]
    assert not missing


def has_name(module: object, name: str) -> bool:
    """Whether a module has an attribute or a submodule of this name."""
    if hasattr(module, name):
        return True
    try:
        importlib.import_module(f"{module.__name__}.{name}")  # type: ignore[attr-defined]
    except ImportError:
        return False
    return True
