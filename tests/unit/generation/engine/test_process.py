"""The engine's process before it has vLLM.

Its variables: no threads that a fork would lose, no compilation for small models. Its early fork: it runs its work
later, and never outlives a parent that has no work for it.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import triton.language as tl
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import ASTSource, make_backend
from triton.runtime.jit import JITFunction

from gspo.common.config.loading import parse_config
from gspo.common.config.schema import Config
from gspo.generation.engine import process
from gspo.generation.engine.process import fixed_variables, generation_threads, import_variables

# In a process of its own: pytest's has threads.
_PROGRAM = """
import os, sys, threading, time
from multiprocessing import current_process
from multiprocessing.connection import wait
from gspo.generation.engine.process import ForkedProcess

def work(path, code):
    open(path, "w").write(f"{current_process().name} {os.environ['LATER']} {os.getpid()}")
    sys.exit(code)

"""


def config_of(folder: Path, model: dict[str, Any] | None, **generation: Any) -> Config:
    if model is not None:
        (folder / "config.json").write_text(json.dumps(model))
    return parse_config(
        {
            "name": "test",
            "model": {"path": str(folder)},
            "data": {"prompts": "prompts.jsonl"},
            "reward": {"functions": [{"path": "reward.py"}]},
            "generation": generation,
            "run": {"total_steps": 1},
        },
        folder,
    )


@pytest.mark.parametrize(
    ("model", "engine", "compiles"),
    [
        ({"vocab_size": 4096}, {}, False),
        ({"vocab_size": 4097}, {}, True),
        ({"text_config": {"vocab_size": 100}}, {}, False),
        ({"vocab_size": 100}, {"enforce_eager": False}, True),
        ({}, {}, True),
        (None, {}, True),
    ],
)
def test_only_a_small_vocabulary_compiles_nothing(
    tmp_path: Path, model: dict[str, Any] | None, engine: dict[str, Any], compiles: bool
) -> None:
    values = import_variables(config_of(tmp_path, model, engine=engine))
    assert ("TORCH_COMPILE_DISABLE" not in values) == compiles
    assert values["OPENBLAS_NUM_THREADS"] == "1"


def test_imports_for_gpus_start_no_threads_and_the_rest_is_left_to_vllm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "torch_is_for_cpus", lambda: False)
    values = import_variables(config_of(tmp_path, {"vocab_size": 100}, dtype="bfloat16"))
    assert values.keys() == {"OPENBLAS_NUM_THREADS", "JE_ARROW_MALLOC_CONF"}


@pytest.mark.parametrize(("dtype", "product"), [("float32", "tt.dot"), ("bfloat16", "inputPrecision = tf32")])
def test_float32_on_a_gpu_is_whole_in_triton(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, product: str
) -> None:
    monkeypatch.setattr(process, "torch_is_for_cpus", lambda: False)
    monkeypatch.delenv("TRITON_F32_DEFAULT", raising=False)
    for name, value in import_variables(config_of(tmp_path, None, dtype=dtype)).items():
        monkeypatch.setenv(name, value)
    (line,) = (line for line in product_of_float32().splitlines() if "tt.dot" in line)
    assert product in line
    assert ("tf32" in line) == (dtype == "bfloat16")


def multiply(first: tl.tensor, second: tl.tensor, out: tl.tensor) -> None:
    place = tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)[None, :]
    tl.store(out + place, tl.dot(tl.load(first + place), tl.load(second + place)))


def product_of_float32() -> str:
    """Triton's intermediate code for an H100 of a product of two float32 matrices."""
    target = GPUTarget("cuda", 90, 32)
    backend = make_backend(target)
    options, context = backend.parse_options({}), ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    source = ASTSource(JITFunction(multiply), dict.fromkeys(("first", "second", "out"), "*fp32"))
    functions = backend.get_codegen_implementation(options)
    return str(source.make_ir(target, options, functions, backend.get_module_map(), context))


def test_the_number_of_threads_is_the_configured_one(tmp_path: Path) -> None:
    assert fixed_variables(config_of(tmp_path, None, threads=3))["OMP_NUM_THREADS"] == "3"


def test_vllm_sees_the_fixed_variables_whatever_the_user_has_set(tmp_path: Path) -> None:
    config = config_of(tmp_path, {"vocab_size": 100}, threads=3)
    (tmp_path / "config.yaml").write_text(json.dumps(config.model_dump(mode="json", exclude_unset=True)))
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm/__init__.py").write_text("import json, os; print(json.dumps(dict(os.environ))); os._exit(0)")
    command = [sys.executable, "-P", "-m", "gspo.generation", "--run-dir", str(tmp_path)]
    paths = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    environment = {**os.environ, "PYTHONPATH": paths, "VLLM_USE_FLASHINFER_SAMPLER": "1", "OMP_NUM_THREADS": "9"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=120)
    seen = json.loads(done.stdout)
    assert (seen["VLLM_USE_FLASHINFER_SAMPLER"], seen["OMP_NUM_THREADS"]) == ("0", "3"), done.stderr


@pytest.mark.parametrize(
    ("configured", "cores", "num_threads"), [(0, 1, 1), (0, 2, 1), (0, 8, 7), (8, 8, 8), (3, 2, 3)]
)
def test_an_engine_leaves_a_core_free_unless_threads_are_configured(
    monkeypatch: pytest.MonkeyPatch, configured: int, cores: int, num_threads: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    assert generation_threads(configured) == num_threads


def _run(body: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", _PROGRAM + body, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)


def test_what_its_work_raises_is_known_and_a_killed_one_gives_nothing() -> None:
    done = _run(
        """
def fail():
    raise ValueError("the cause")

process, killed = ForkedProcess(), ForkedProcess()
process.Process(target=fail, name="engine", kwargs={}).start()
print(process.failure(10.0), process.failure(0.0), sep="|")
killed.kill()
print(killed.failure(10.0) or "nothing")
"""
    )
    assert done.stdout == "ValueError: the cause|\nnothing\n", done.stderr


def test_each_of_two_threads_that_wait_for_the_end_sees_it() -> None:
    done = _run(
        """
processes = [ForkedProcess() for _ in range(40)]
threading.Thread(target=lambda: [sum(range(1000)) for _ in iter(int, 1)], daemon=True).start()

def end(process):
    process.join(10)
    alive.append(process.is_alive())

alive = []
for process in processes:
    other = threading.Thread(target=end, args=(process,))
    other.start()
    process.Process(target=sys.exit, name="EngineCore", kwargs={}).start()
    process.join(10)
    alive.append(process.is_alive())
    other.join(10)
print(len(alive), sum(alive))
"""
    )
    assert done.stdout.split() == ["80", "0"], done.stderr


def test_it_runs_its_work_with_the_environment_of_the_start(tmp_path: Path) -> None:
    done = _run(
        """
process = ForkedProcess()
os.environ["LATER"] = "yes"
made = process.Process(target=work, name="EngineCore", kwargs={"path": sys.argv[1], "code": 3})
made.start()
wait([made.sentinel], 10)
made.join()
print(made.name, made.pid, made.exitcode, made.is_alive())
""",
        tmp_path / "out",
    )
    name, pid, *rest = done.stdout.split()
    assert (tmp_path / "out").read_text() == f"EngineCore yes {pid}"
    assert [name, *rest] == ["EngineCore", "3", "False"]


def test_there_is_one_piece_of_work() -> None:
    done = _run(
        """
process = ForkedProcess()
process.Process(target=work, name="a", kwargs={})
process.Process(target=work, name="b", kwargs={})
"""
    )
    assert "process b: the one forked process has its work already" in done.stderr


def test_a_parent_that_ends_without_work_does_not_wait_for_it() -> None:
    done = _run("print(ForkedProcess().pid)")
    assert done.returncode == 0
    assert not psutil.pid_exists(int(done.stdout))


def test_it_ends_with_a_parent_that_is_killed() -> None:
    body = "process = ForkedProcess(); print(process.pid, flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", _PROGRAM + body], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        parent.stdout.readline()
        os.kill(parent.pid, signal.SIGKILL)
        # The forked process has inherited this pipe: its end comes when both are gone.
        assert parent.stdout.read() == ""


def test_it_is_refused_where_there_are_threads() -> None:
    done = _run("threading.Thread(target=time.sleep, args=(1,), daemon=True).start(); ForkedProcess()")
    assert "a process is forked while there is one thread, and there are 2" in done.stderr
