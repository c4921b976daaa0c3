"""What a process imports before it knows whether its input can work, or for the whole of its life: nothing large.

A start waits for these imports, and every library can bring others; so each is asked in an interpreter of its own.
"""

import subprocess
import sys

import pytest

ENGINES = {"torch", "vllm", "deepspeed", "transformers"}
TABLES = {"pandas", "pyarrow", "matplotlib"}
# numpy takes a third of a second, gRPC and the web framework as long again.
FACES = {"grpc", "fastapi", "uvicorn"}

BUDGETS = {
    "gspo.cli.__main__": ENGINES | TABLES | FACES | {"numpy"},
    "gspo.cli.run.training": ENGINES | TABLES | FACES | {"numpy"},
    "gspo.cli.processes.guard": ENGINES | TABLES | FACES | {"numpy", "pydantic", "redis"},
    # It works on machines without an engine.
    "gspo.agents.worker": ENGINES | TABLES | FACES | {"numpy", "pydantic", "redis"},
    "gspo.coordinator.__main__": ENGINES | TABLES | FACES | {"numpy"},
    "gspo.coordinator.app": ENGINES | TABLES,
    "gspo.reward.__main__": ENGINES | TABLES | {"numpy"},
    "gspo.generation.__main__": ENGINES | TABLES | FACES | {"numpy"},
    "gspo.gateway.__main__": ENGINES | TABLES | FACES | {"numpy"},
    "gspo.learner.__main__": ENGINES | TABLES | FACES | {"numpy"},
    "gspo.tracking.__main__": ENGINES | TABLES | FACES | {"numpy"},
    # Engines load in its children alone.
    "benchmarks.__main__": ENGINES,
}


@pytest.mark.parametrize("module", BUDGETS)
def test_a_process_imports_no_more_than_it_needs(module: str) -> None:
    program = f"import {module}, sys; print(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert BUDGETS[module].intersection(done.stdout.split()) == set()
