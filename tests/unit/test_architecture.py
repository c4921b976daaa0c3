"""Allowed imports of each package, and forbidden constructions, read from the source of every module.

What it is not: a check of behaviour. Each rule is shown to fail on a small source that breaks it.
"""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions

import pytest

from tests.support.repository.source_files import ROOT, fail_with, nodes, text_of

SOURCES = ROOT / "services"
SERVICES = ("agents", "coordinator", "environments", "gateway", "generation", "learner", "reward", "tracking", "view")
# Packages that every service may import.
SHARED = ("common", "runlog")
# Of these, the ones that each of the two may import.
BELOW: dict[str, tuple[str, ...]] = {"common": (), "runlog": ("common",)}
# Programs for any machine, which import none of ours either; the command line has one of them.
ANYWHERE = ("gspo.agents.player", "gspo.agents.worker")
# Agents and MCP servers of a run have the launcher of the reward service's sandboxes, with a profile of their own.
LAUNCHER = "gspo.reward.sandbox"
# Generators play the episodes of environments, the reward service tries one, the coordinator lists the tools of MCP.
ENVIRONMENTS = "gspo.environments"
# It alone may import the package mcp.
MCP_FOLDER = "services/gspo/environments/mcp/"
# The page of a run, which the command line serves.
PAGE = "gspo.view"
# The one file that may import DeepSpeed.
DEEPSPEED_FILE = "services/gspo/learner/training/policy_engine.py"
# A program that the reward service starts where a reward model is asked for; nothing imports it.
TORCH_PROGRAM = "services/gspo/reward/functions/builtins/reward_model.py"
# Runs in the sandbox, where a function may ask for the tokenizer.
TOKENIZER_FILE = "services/gspo/reward/sandbox/inside/supplied.py"
# Shared modules that need torch: the engines of generators and learners call them.
TORCH_MODULES = (
    "services/gspo/common/host/bfloat16_products.py",
    "services/gspo/common/weights/device_fingerprint.py",
    "services/gspo/common/weights/fingerprint_kernel.py",
)
WITHOUT_TORCH = (
    "services/gspo/agents",
    "services/gspo/common",
    "services/gspo/coordinator",
    "services/gspo/environments",
    "services/gspo/reward",
    "services/gspo/tracking",
    "services/gspo/runlog",
    "services/gspo/cli",
    "services/gspo/view",
)
# The sandbox knows none of the others, the HTTP API may use all.
REWARD_LAYERS = ("sandbox", "registry", "functions", "submissions", "scoring", "http_api")
TORCH = ("torch", "gspo_core")
# Libraries -> beginnings of the paths that may import them.
OWNERS = {
    ("vllm",): ("services/gspo/generation/", "services/gspo/gateway/"),
    ("deepspeed",): (DEEPSPEED_FILE,),
    ("mcp", "mcp_types"): (MCP_FOLDER,),
    ("tensorboardX", "wandb"): ("services/gspo/tracking/",),
    # A run without the option needs no Ray, and no service knows of it.
    ("ray",): ("services/gspo/cli/cluster/",),
}
PICKLING = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}

MAX_FUNCTION_LINES = 60

Break = tuple[int, str]  # the line of a module, and the rule that it breaks


def modules() -> list[str]:
    """Every module of the project, as a path from its root; the generated contract apart."""
    folders = (ROOT / "gspo_core", SOURCES / "gspo")
    return sorted(str(path.relative_to(ROOT)) for folder in folders for path in folder.rglob("*.py"))


def imports(path: str, source: str) -> dict[str, int]:
    """Full name -> line of everything a module imports, wherever in it the statement stands."""
    package = path.removeprefix("services/").removesuffix("/__init__.py").removesuffix(".py").split("/")
    lines: dict[str, int] = {}
    for node in nodes(source):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            start = ".".join(package[: len(package) - node.level]) if node.level else ""
            name = ".".join(part for part in (start, node.module or "") if part)
            # `from gspo import learner` imports a package, not a name in one.
            names = [f"{name}.{alias.name}" for alias in node.names] if name == "gspo" else [name]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            names = [str(part.value) for part in node.args[:1] if isinstance(part, ast.Constant)]
        for name in names:
            lines.setdefault(name, getattr(node, "lineno", 1))
    lines.pop("__future__", None)
    return lines


def broken_rules(path: str, source: str) -> list[str]:
    """Return what the module at `path` breaks, each as `file:line: rule: fix`."""
    imported = imports(path, source)
    breaks = [
        *_foreign_services(path, imported),
        *_foreign_engines(path, imported),
        *_upward_imports(path, imported),
        *_pickling(imported),
        *_never_allowed(source),
        *_long_functions(path, source),
    ]
    return [f"{path}:{line}: {rule}" for line, rule in breaks]


def _is_http_api(path: str) -> bool:
    return path.endswith("_api.py") or "/http_api/" in path


def _module(path: str) -> str:
    return path.removeprefix("services/").removesuffix(".py").replace("/", ".")


def _top(name: str) -> str:
    return name.split(".")[0]


def _foreign_services(path: str, imported: dict[str, int]) -> Iterator[Break]:
    service = path.split("/")[2] if path.startswith("services/gspo/") else ""
    for name, line in imported.items():
        other = name.split(".")[1] if name.startswith("gspo.") else ""
        if path.startswith("gspo_core/") and _top(name) not in {"torch", "gspo_core", *sys.stdlib_module_names}:
            yield line, f"gspo_core imports {name}: torch and the standard library only"
        elif _module(path).startswith(ANYWHERE) and name.startswith("gspo") and not name.startswith(ANYWHERE):
            yield line, f"imports {name}: a program for any machine needs the standard library and httpx alone"
        elif (
            (path.startswith(("services/gspo/agents/", MCP_FOLDER)) and name.startswith(LAUNCHER))
            or (service in ("coordinator", "generation", "reward") and name.startswith(ENVIRONMENTS))
            or (service == "cli" and name.startswith((*ANYWHERE, PAGE)))
        ):
            continue
        elif service and other and other not in (service, *BELOW.get(service, SHARED)):
            yield line, f"gspo.{service} imports {name}, of another service: move what both need to gspo.common"
        elif _top(name) in ("tests", "examples", "benchmarks"):
            yield line, f"imports {name}: it is not part of the product"


def _foreign_engines(path: str, imported: dict[str, int]) -> Iterator[Break]:
    tops = {_top(name): line for name, line in reversed(imported.items())}

    def lines(*names: str) -> Iterator[tuple[int, str]]:
        return ((tops[name], name) for name in names if name in tops)

    if path.startswith(WITHOUT_TORCH) and path not in (TORCH_PROGRAM, *TORCH_MODULES):
        yield from ((line, f"imports {name}: this package runs without torch") for line, name in lines(*TORCH))
    for names, folders in OWNERS.items():
        if not path.startswith(folders):
            yield from ((line, f"imports {name} outside {' and '.join(folders)}") for line, name in lines(*names))
    if not _is_http_api(path):
        web = lines("fastapi", "fastapi_offline", "starlette")
        yield from ((line, f"imports {name} outside an HTTP API: move the route to one") for line, name in web)
    without_tokenizer = ("services/gspo/common", "services/gspo/cli", "services/gspo/reward")
    if path.startswith(without_tokenizer) and path not in (TORCH_PROGRAM, TOKENIZER_FILE):
        yield from ((line, "imports transformers: no text is tokenised here") for line, _ in lines("transformers"))


def _upward_imports(path: str, imported: dict[str, int]) -> Iterator[Break]:
    """Imports of a package of the reward service from one that is above it in REWARD_LAYERS."""
    package = path.split("/")[3] if path.startswith("services/gspo/reward/") else ""
    above = REWARD_LAYERS[REWARD_LAYERS.index(package) + 1 :] if package in REWARD_LAYERS else ()
    for name, line in imported.items():
        if name.startswith("gspo.reward.") and name.split(".")[2] in above:
            yield line, f"imports {name} upward: the layers are {', '.join(REWARD_LAYERS)}"


def _pickling(imported: dict[str, int]) -> Iterator[Break]:
    for name, line in imported.items():
        if _top(name) in PICKLING:
            yield line, f"imports {name}: never pickle"


def _never_allowed(source: str) -> Iterator[Break]:
    docs = {id(first.value) for first in map(_first_expression, nodes(source)) if first}
    for node in nodes(source):
        if id(node) not in docs and isinstance(node, ast.Constant) and isinstance(node.value, str):
            trims = "MAXLEN" in node.value or "XTRIM" in node.value
            if trims:
                yield node.lineno, "a script trims a stream: trimming drops pending entries too"
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        if ast.unparse(node.func) == "torch.load" and given.get("weights_only") != "True":
            yield node.lineno, "torch.load unpickles: pass weights_only=True"
        if node.func.attr == "xtrim" or (node.func.attr == "xadd" and {"maxlen", "minid"} & given.keys()):
            events = node.func.attr == "xadd" and node.args and ast.unparse(node.args[0]).endswith(".events")
            if not events:
                yield node.lineno, "trims a stream other than events: trimming drops pending entries too"


def _long_functions(path: str, source: str) -> Iterator[Break]:
    for node in nodes(source):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > MAX_FUNCTION_LINES:
                yield node.lineno, f"{node.name} has {lines} lines, and at most {MAX_FUNCTION_LINES}: split it"


def _first_expression(node: ast.AST) -> ast.Expr | None:
    """The place of a docstring, if there is one."""
    if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return None
    return node.body[0] if node.body and isinstance(node.body[0], ast.Expr) else None


def test_every_module_keeps_the_rules() -> None:
    fail_with(rule for path in modules() for rule in broken_rules(path, text_of(path)))


def test_every_service_is_checked() -> None:
    services = {path.split("/")[2] for path in modules() if path.startswith("services/gspo/") and path.count("/") > 2}
    assert services == {"cli", *SHARED, *SERVICES}


def test_the_wheel_has_every_package_and_no_other() -> None:
    folders = {path.parent for path in SOURCES.rglob("__init__.py")}
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    assert sorted(packages) == sorted(
        ["gspo_core", "gspo_proto", *(".".join(folder.relative_to(SOURCES).parts) for folder in folders)]
    )


def test_no_module_beside_the_sandbox_shadows_a_library() -> None:
    # launch.py puts the folder on sys.path for the import of `inside`.
    stems = {path.stem for path in (SOURCES / "gspo/reward/sandbox").glob("*.py")} - {"__init__", "__main__"}
    assert stems.isdisjoint({*sys.stdlib_module_names, *packages_distributions()})


def test_exactly_one_file_imports_deepspeed() -> None:
    having = [path for path in modules() if any(_top(name) == "deepspeed" for name in imports(path, text_of(path)))]
    assert having == [DEEPSPEED_FILE]


@pytest.mark.parametrize(
    ("path", "source", "said"),
    [
        ("gspo_core/loss.py", "import numpy", "gspo_core imports numpy"),
        (
            "gspo_core/loss.py",
            "from gspo.common.config.schema import Config",
            "gspo_core imports gspo.common.config.schema",
        ),
        ("services/gspo/common/streams/keys.py", "import torch.nn", "imports torch: this package runs without torch"),
        ("services/gspo/common/streams/keys.py", "from gspo.learner.assembly.rows import Row", "another service"),
        ("services/gspo/reward/scoring/consumer.py", "from gspo.learner import rows", "another service"),
        ("services/gspo/reward/scoring/consumer.py", "from gspo import learner", "another service"),
        ("services/gspo/reward/scoring/consumer.py", "from ...learner.rows import Row", "another service"),
        ("services/gspo/learner/loop.py", "def f():\n    import gspo.generation.engine.vllm_engine", "another service"),
        ("services/gspo/learner/loop.py", "importlib.import_module('gspo.reward.scoring.scorer')", "another service"),
        ("services/gspo/cli/run/training.py", "from gspo.coordinator.groups.slots import Slots", "another service"),
        ("services/gspo/cli/run/training.py", "from gspo_core.loss import policy_loss", "imports gspo_core"),
        ("services/gspo/coordinator/loop.py", "import torch", "imports torch"),
        ("services/gspo/generation/loop.py", "from mcp import Client", "imports mcp outside"),
        (
            "services/gspo/learner/loop.py",
            "from gspo.environments.mcp.tool_listing import listed_tools",
            "another service",
        ),
        ("services/gspo/reward/scoring/scorer.py", "from gspo_core import loss", "imports gspo_core"),
        ("services/gspo/learner/push/policy_weights.py", "from vllm import LLM", "imports vllm outside"),
        ("services/gspo/runlog/run_log.py", "from gspo.learner.assembly.rows import Row", "another service"),
        ("services/gspo/common/tasks.py", "from gspo.runlog.run_log import RunLog", "another service"),
        ("services/gspo/runlog/run_log.py", "import torch", "imports torch"),
        ("services/gspo/learner/loop.py", "import deepspeed", "imports deepspeed outside"),
        ("services/gspo/learner/trackers.py", "import wandb", "outside services/gspo/tracking"),
        ("services/gspo/learner/loop.py", "def f():" + "\n    pass" * 60, "f has 61 lines, and at most 60"),
        ("services/gspo/reward/functions/library.py", "from gspo.reward.submissions.admission import A", "upward"),
        ("services/gspo/tracking/follower.py", "import torch", "imports torch"),
        ("services/gspo/coordinator/loop.py", "from fastapi import FastAPI", "outside an HTTP API"),
        ("services/gspo/reward/scoring/scorer.py", "from fastapi_offline import FastAPIOffline", "outside an HTTP API"),
        ("services/gspo/reward/scoring/scorer.py", "from transformers import AutoTokenizer", "imports transformers"),
        ("services/gspo/common/streams/inbox.py", "import pickle", "never pickle"),
        ("services/gspo/learner/assembly/rows.py", "from cloudpickle import dumps", "never pickle"),
        ("services/gspo/learner/training/trainer.py", "torch.load(path)", "unpickles"),
        ("services/gspo/learner/training/trainer.py", "torch.load(path, weights_only=False)", "unpickles"),
        ("services/gspo/common/streams/inbox.py", "redis.xadd(stream, fields, maxlen=10)", "trims a stream"),
        ("services/gspo/common/streams/inbox.py", "redis.xtrim(keys.events, 10)", "trims a stream"),
        (
            "services/gspo/common/streams/inbox.py",
            "SCRIPT = \"redis.call('XADD', KEYS[1], 'MAXLEN', 9)\"",
            "trims a stream",
        ),
        (
            "services/gspo/learner/loop.py",
            "from tests.support.tiny_model import make_tiny_model",
            "not part of the product",
        ),
    ],
)
def test_a_rule_fails_when_it_is_broken(path: str, source: str, said: str) -> None:
    found = broken_rules(path, source)
    assert len(found) == 1
    assert said in found[0]


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("gspo_core/loss.py", "import math\nimport torch\nfrom gspo_core.kl import kl_divergence"),
        ("services/gspo/learner/loop.py", "from gspo_core.loss import policy_loss\nfrom gspo.common import metrics"),
        ("services/gspo/learner/storage/step_log.py", "from gspo.runlog.step_files import step_files"),
        ("services/gspo/coordinator/http_api.py", "from fastapi import FastAPI"),
        ("services/gspo/coordinator/app.py", "from gspo.environments.mcp.tool_listing import with_listed_tools"),
        ("services/gspo/environments/mcp/server_program.py", "from gspo.reward.sandbox.inside import scratch"),
        ("services/gspo/reward/http_api/routes.py", "from fastapi import FastAPI"),
        (TORCH_PROGRAM, "import torch\nfrom transformers import AutoTokenizer"),
        (TORCH_MODULES[0], "import torch"),
        ("services/gspo/learner/loop.py", "def f():" + "\n    pass" * 59),
        ("services/gspo/common/streams/events.py", "redis.xadd(self._keys.events, fields, maxlen=10)"),
        ("services/gspo/common/streams/inbox.py", '"""Never with MAXLEN."""'),
        ("services/gspo/learner/training/trainer.py", "torch.load(path, weights_only=True)"),
        ("services/gspo/cli/monitor/watcher.py", "from collections import deque\nlast = deque(maxlen=3)"),
    ],
)
def test_what_is_allowed_passes(path: str, source: str) -> None:
    assert broken_rules(path, source) == []


_IMPORT_ALL = """
import importlib, pkgutil, sys
for name in ("torch", "vllm", "deepspeed", "gspo_core"):
    sys.modules[name] = None  # an import of it, or of anything in it, raises ModuleNotFoundError
for package in sys.argv[1:]:
    found = importlib.import_module(package)
    for module in pkgutil.walk_packages(found.__path__, package + "."):
        torch_modules = ("bfloat16_products", "device_fingerprint", "fingerprint_kernel")
        if not any(part in module.name for part in ("__main__", "builtins", ".inside", *torch_modules)):
            importlib.import_module(module.name)
"""


def _import_all(*packages: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", _IMPORT_ALL, *packages]
    env = {"PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}:{SOURCES}", "PATH": "/usr/bin:/bin"}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120, check=False)


def test_common_coordinator_reward_and_cli_import_without_torch() -> None:
    done = _import_all("gspo.common", "gspo.coordinator", "gspo.environments", "gspo.reward", "gspo.cli")
    assert done.returncode == 0, done.stderr


def test_the_block_on_torch_blocks() -> None:
    done = _import_all("gspo.learner")
    assert done.returncode != 0
    assert "ModuleNotFoundError" in done.stderr
