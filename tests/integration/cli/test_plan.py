"""`gspo plan` as users call it, on a folder with the config.json of Qwen3-8B alone."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import yaml
from transformers import AutoConfig, Qwen3Config

from benchmarks.plans.published_models import published_models
from gspo.cli.processes.planned_memory import ProcessMemory
from gspo.common.config.loading import read_config
from gspo.common.host.gpu_kinds import GPU_KINDS
from gspo.common.planning.model_profile import ModelProfile
from tests.support.gpu_machine import gpu_machine
from tests.support.gspo_run import stray_modules
from tests.support.repository.command_line import gspo_here
from tests.support.tiny_model import make_tiny_model

QWEN3_8B = published_models()["Qwen3-8B"]
H100 = "NVIDIA H100 80GB HBM3"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "Qwen3-8B"
    Qwen3Config(
        vocab_size=151936,
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40960,
        tie_word_embeddings=False,
    ).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A cache of this module's own, so that the model is counted once."""
    return {**os.environ, "XDG_CACHE_HOME": str(tmp_path_factory.mktemp("cache")), "COLUMNS": "150"}


def call(environment: dict[str, str], *arguments: object) -> subprocess.CompletedProcess[str]:
    return gspo_here("plan", *arguments, environment=environment)


def started(
    environment: dict[str, str], *words: object, working_dir: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """`gspo WORDS` as a process of its own, which believes in the GPUs of gpu_machine.py."""
    command = [sys.executable, "-P", "-m", "gspo.cli", *map(str, words)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, env=environment, cwd=working_dir
    )


def planned(environment: dict[str, str], *arguments: object) -> dict[str, Any]:
    return json_of(call(environment, *arguments, "--json"))


def json_of(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def test_a_plan_counts_the_model_and_writes_its_configuration(
    model: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    file = tmp_path / "config.yaml"
    plan = planned(environment, model, "--gpus", 8, "--gpu-memory", 80, "--write", file)
    assert ModelProfile.from_json(json.dumps(plan["model"])) == QWEN3_8B
    config = read_config(file)
    assert plan["config"] == yaml.safe_load(file.read_text())
    assert config.learner.ranks == plan["ranks"]
    assert config.generation.replicas * config.generation.engine.get("tensor_parallel_size", 1) + plan["ranks"] <= 8
    assert sum(plan["rank"][part] for part in ("weights", "gradients", "optimizer")) < GPU_KINDS[H100].memory_bytes
    again = call(environment, model, "--gpu-memory", 80, "--write", file)
    assert (again.returncode, "exists already" in again.stderr) == (2, True)


def test_a_teacher_takes_memory_and_time_of_the_learner(
    model: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    file = tmp_path / "config.yaml"
    alone, taught = (
        planned(environment, model, "--gpus", 16, "--gpu-memory", 80, *options)
        for options in ((), ("--teacher", model, "--write", file))
    )
    assert taught["model"]["teacher"] == alone["model"]
    assert taught["rank"]["teacher"] > 0 == alone["rank"]["teacher"]
    assert read_config(file).teacher.path == str(model)
    assert taught["times"]["products"]["low"] > alone["times"]["products"]["low"]
    shown = call(environment, model, "--teacher", model, "--gpus", 16, "--gpu-memory", 80).stdout
    assert "a teacher of 8.19 B" in shown and re.search(r"^ *teacher +\d", shown, re.MULTILINE)


def test_tables_name_the_source_of_each_rate(model: Path, environment: dict[str, str], tmp_path: Path) -> None:
    results = tmp_path / "gpu.json"
    rates = {"train_flops_share": 0.5, "decode_bytes_share": 0.6}
    results.write_text(
        json.dumps([{"part": "step", "passed": True, "card": H100, "date": "2027-01-02", "rates": rates}])
    )
    done = call(environment, model, "--gpu-memory", 80, "--rates", results)
    assert done.returncode == 0, done.stderr
    for text in ("KV cache", "optimizer", "seconds a step", "staleness: 95th percentile", "Advice: "):
        assert text in done.stdout
    (line,) = [line for line in done.stdout.splitlines() if "train_flops_share" in line and "measured" in line]
    assert "0.5 " in line and "part step, 2027-01-02" in line
    assert any("prefill_flops_share" in line and "assumed" in line for line in done.stdout.splitlines())
    plan = planned(environment, model, "--gpu-memory", 80, "--rates", results)
    products = plan["times"]["products"]
    assert products["low"] == products["high"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--gpus", 1, "--gpu-memory", 24), r"nothing fits on 1 x NVIDIA L4 of 22.5 GiB, .*Nearest: ZeRO .* lacks"),
        (("--gpus", 2, "--gpu-memory", 48, "--context", "32k"), r"nothing fits on 2 x NVIDIA L40S.*These fit: --gpus"),
        (
            ("--gpu-memory", 80, "--host-memory", 64),
            r"with 64 GiB of memory on a host.* a host lacks .*These fit: (--gpus \d+, or )?--host-memory \d+",
        ),
        (("--gpus", 2), "--gpu-memory: is not given, and nvidia-smi shows no GPU.*--card, or give its GB: 24"),
        (("--gpu-memory", 79), "79 GB stands for no known GPU"),
        (("--card", "TPU v5"), "'TPU v5' is no known GPU"),
        (("--gpu-memory", 80, "--context", "64k"), "reads at most 40960"),
        (("--gpu-memory", 80, "--context", "long"), "'long' does not count tokens"),
        (("--gpu-memory", 80, "--on-stale", "hope"), "staleness.on_stale: hope is not allowed"),
        (("--gpu-memory", 80, "--groups", 3, "--group-size", 3), "9 rollouts in 4 mini-batches divide over no number"),
    ],
)
def test_bad_input_is_refused(
    model: Path, environment: dict[str, str], arguments: tuple[object, ...], message: str
) -> None:
    done = call(environment, model, *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    first, *parts = (line for line in done.stderr.splitlines() if not line.startswith("counting the sizes"))
    assert re.search(message, first), done.stderr
    if "nothing fits" in first:
        # A table for each place, a part a line; together they are more than there is.
        tables = "\n".join(parts).split("GiB ")[1:]
        assert tables
        for table in tables:
            sizes = [float(line.split()[0]) for line in table.splitlines()[1:]]
            assert table.endswith(("it has", "it has\n")) and sum(sizes[:-1]) > sizes[-1]
    else:
        assert not parts


def test_the_gpus_of_the_machine_are_the_default(model: Path, environment: dict[str, str], tmp_path: Path) -> None:
    here = environment | gpu_machine(tmp_path, 4)
    done = started(here, "plan", model, "--host-memory", 1000)
    assert (done.returncode, f"4 x {H100}" in done.stdout) == (0, True), done.stderr
    assert f"2 x {H100}" in started(here, "plan", model, "--gpus", 2, "--host-memory", 1000).stdout
    assert "8 x NVIDIA H200" in started(here, "plan", model, "--gpu-memory", 141).stdout


@pytest.mark.parametrize(("max_lag", "placement"), [(0, "shared"), pytest.param(1, "split", marks=pytest.mark.long)])
def test_a_written_configuration_can_start_and_takes_what_was_planned(
    environment: dict[str, str], tmp_path: Path, max_lag: int, placement: str
) -> None:
    """Checked as every start is, up to the engines: `gspo doctor` on a machine with the plan's GPUs."""
    model, file = make_tiny_model(tmp_path / "model"), tmp_path / "config.yaml"
    here = environment | gpu_machine(tmp_path / "machine", 2) | {"COLUMNS": "200"}
    words = ("plan", model, "--context", 64, "--max-lag", max_lag, "--write", file, "--json")
    plan = json_of(started(here, *words))
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}\n' * 64)
    (tmp_path / "reward.py").write_text("def reward(prompts, completions):\n    return [0.0] * len(prompts)\n")
    done = started(here, "doctor", file)
    assert (done.returncode, "no problems" in done.stdout) == (0, True), done.stdout + done.stderr
    assert read_config(file).placement == placement
    rows = [re.split(r" {2,}", line) for line in done.stdout.splitlines() if re.match(r"(generation|learner)-\d", line)]
    cells = {row[0]: tuple(row[-6:-1]) for row in rows}  # free memory, the last one, is not the plan's
    generator, rank = plan["generator"], plan["rank"]
    generation = ProcessMemory(generator["weights"], kv_cache=generator["kv_cache"], activations=generator["working"])
    learner = ProcessMemory(
        rank["weights"],
        rank["gradients"] + rank["buckets"],
        rank["optimizer"],
        activations=rank["activations"] + rank["output_layer"],
    )
    names = [f"generation-{number}" for number in range(plan["config"]["generation"]["replicas"])]
    assert cells == {**dict.fromkeys(names, generation.cells()[:5]), "learner-0": learner.cells()[:5]}


def test_a_folder_without_config_json_is_refused(environment: dict[str, str], tmp_path: Path) -> None:
    done = call(environment, tmp_path, "--gpu-memory", 80)
    assert (done.returncode, done.stderr) == (
        2,
        f"error: {tmp_path}: has no config.json. Give a folder with the config.json of a model\n",
    )


@pytest.fixture
def hub(model: Path) -> Iterator[tuple[str, list[str]]]:
    """(address, names of fetched files) of a hub with one model."""
    fetched: list[str] = []
    files = {"config.json": (model / "config.json").read_bytes(), "model.safetensors": b"weights"}
    commit = "1" * 40

    class Hub(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.answer()

        def do_GET(self) -> None:
            self.answer()

        def answer(self) -> None:
            content = files.get(name := self.path.rpartition("/")[2])
            if self.path.startswith("/api/models/Qwen/Qwen3-8B"):
                tree = [{"type": "file", "path": file, "size": len(files[file]), "oid": "1"} for file in files]
                siblings = [{"rfilename": file} for file in files]
                facts = {"id": "Qwen/Qwen3-8B", "sha": commit, "siblings": siblings}
                content = json.dumps(tree if "/tree/" in self.path else facts).encode()
            elif content and self.command == "GET":
                fetched.append(name)
            self.send_response(200 if content else 404)
            self.send_header("Content-Length", str(len(content or b"")))
            self.send_header("ETag", '"1"')
            self.send_header("X-Repo-Commit", commit)
            if not content:
                self.send_header("X-Error-Code", "RepoNotFound")
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content or b"")

        def log_message(self, *_: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", fetched
        server.shutdown()


def test_a_name_on_a_hub_is_planned_without_its_weights(
    model: Path, environment: dict[str, str], hub: tuple[str, list[str]], tmp_path: Path
) -> None:
    address, fetched = hub
    with_hub = environment | {"HF_ENDPOINT": address, "HF_HOME": str(tmp_path)}
    done = started(with_hub, "plan", "Qwen/Qwen3-8B", "--gpu-memory", 80, "--json")
    assert done.returncode == 0, done.stderr
    assert fetched == ["config.json"]
    by_name, by_file = json_of(done), planned(environment, model / "config.json", "--gpu-memory", 80)
    assert (by_name["config"].pop("model")["path"], by_name["config"]["name"]) == ("Qwen/Qwen3-8B", "Qwen3-8B")
    assert by_file["config"].pop("model")["path"] == str(model)
    assert (by_name.pop("model"), by_name) == (by_file.pop("model"), by_file)
    done = started(with_hub, "plan", "Qwen/Qwen9", "--gpu-memory", 80)
    assert done.returncode == 2
    assert "error: Qwen/Qwen9: is not a folder here, and no hub gave it (404" in done.stderr


def test_a_file_of_the_working_directory_replaces_no_module(
    model: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    new_cache = environment | {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    done = started(new_cache, "plan", model, "--gpu-memory", 80, working_dir=stray_modules(tmp_path))
    assert done.returncode == 0, done.stderr


def test_the_command_imports_no_torch(model: Path, environment: dict[str, str]) -> None:
    code = (
        "import sys; from pathlib import Path; from gspo.cli.plan.plan_request import PlanRequest;"
        "from gspo.cli.plan.planner import make_plan;"
        "from gspo.cli.plan.plan_tables import plan_json;"
        f"plan_json(make_plan(PlanRequest({str(model)!r}, 8, gpu_gb=80)));"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], timeout=120, check=True, env=environment)


@pytest.mark.long
def test_a_deep_model_with_linear_attention_is_counted_in_20_s_of_processor_time(
    environment: dict[str, str], tmp_path: Path
) -> None:
    sizes = {"hidden_size": 5120, "intermediate_size": 17_408, "num_hidden_layers": 64, "head_dim": 256}
    heads = {"num_attention_heads": 24, "num_key_value_heads": 4, "linear_num_value_heads": 48}
    AutoConfig.for_model("qwen3_5_text", vocab_size=248_320, **sizes, **heads).save_pretrained(tmp_path)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = started(environment, "plan", tmp_path, "--gpus", 8, "--gpu-memory", 80)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert (done.returncode, "counting the sizes" in done.stderr) == (0, True), done.stderr
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 20  # 8 alone
