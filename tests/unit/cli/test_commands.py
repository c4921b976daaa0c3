"""The commands as a user calls them: help, bad input with exit code 2, and what each prints or writes."""

from __future__ import annotations

import io
import json
import re
import shlex
import shutil
import socket
import subprocess
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import yaml
from redis.asyncio import Redis
from rich.console import Console

from gspo.cli import findings
from gspo.cli.__main__ import _refusal, main
from gspo.cli.commands import app
from gspo.cli.doctor import _memory_gib, merge_findings
from gspo.cli.findings import DoctorFinding
from gspo.cli.keys_table import print_keys
from gspo.cli.processes.exit_codes import ServiceRefusedError
from gspo.cli.processes.redis_server import check_redis, check_unused
from gspo.cli.run.evaluation import EvaluationSpec, eval_config, in_order, naming_options
from gspo.cli.rundir.start import lock_run_dir
from gspo.common.config.loading import parse_config, write_config
from gspo.common.config.reference import explain
from gspo.common.config.schema import Config
from gspo.common.errors import InputError
from gspo.common.model.files import ModelFiles
from gspo.common.planning.host_memory import PROCESSES_GIB
from gspo.common.streams.keys import Keys
from tests.unit.cli.step_logs import WHY, write_log

Call = Callable[..., tuple[int, str, str]]
COMMANDS = (
    "plan",
    "replay",
    "run",
    "agent",
    "status",
    "scale",
    "config",
    "export",
    "report",
    "view",
    "init",
    "doctor",
    "eval",
    "certs",
)


@pytest.fixture
def gspo(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """`gspo WORDS`: exit code, standard output, standard error."""

    def call(*words: object, columns: int = 240) -> tuple[int, str, str]:
        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setattr("sys.argv", ["gspo", *map(str, words)])
        with pytest.raises(SystemExit) as end:
            main()
        output, errors = capsys.readouterr()
        return int(end.value.code or 0), output, errors

    return call


def test_every_command_is_known_and_its_help_teaches_with_an_example(gspo: Call) -> None:
    assert {command.name or command.callback.__name__ for command in app.registered_commands if command.callback} == {
        *COMMANDS
    }
    for command in COMMANDS:
        code, output, _ = gspo(command, "--help")
        assert (code, f"Example: gspo {command}" in output) == (0, True), output


# Every place of every command where a user gives a file or folder; BAD is one that cannot work there.
BAD, GOOD = "BAD", "GOOD"
PATHS = (
    ("run", BAD),
    ("run", "--resume", BAD),
    ("status", BAD),
    ("export", BAD, "out"),
    ("report", BAD),
    ("replay", BAD),
    ("init", BAD),
    ("certs", BAD),
    ("doctor", BAD),
    ("eval", "model", BAD, "--reward", GOOD),
    ("eval", "model", GOOD, "--config", BAD),
    ("eval", "model", GOOD, "--reward", GOOD, "--out", BAD),
    ("reward", "submit", BAD, "--url", "http://127.0.0.1:1"),
    ("reward", "submit", GOOD, "--tests", BAD, "--url", "http://127.0.0.1:1"),
    ("reward", "try", "exact", BAD, "--url", "http://127.0.0.1:1"),
    ("reward", "list", "--run", BAD),
    ("reward", "serve", BAD),
    ("deadletter", "list", "--run", BAD),
)


@pytest.mark.parametrize("words", PATHS, ids=" ".join)
@pytest.mark.parametrize("bad", ["file.txt/x", "/proc/x/y", "loop", "x" * 300, "\udce4"])
def test_no_path_makes_a_traceback(
    gspo: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], bad: str
) -> None:
    (tmp_path / "file.txt").write_text("here")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "good.py").write_text("def reward(completions, **columns):\n    return [0.0] * len(completions)\n")
    monkeypatch.chdir(tmp_path)
    code, _, errors = gspo(*(bad if word == BAD else "good.py" if word == GOOD else word for word in words))
    assert code in (1, 2)
    assert errors.startswith("error: ")
    assert "Traceback" not in errors
    assert not (tmp_path / "out").exists()


def test_a_plan_refuses_quantized_weights(gspo: Call, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3", "quantization_config": {"quant_method": "fp8"}}')
    code, _, errors = gspo("plan", tmp_path, "--gpus", 8, "--gpu-memory", 80)
    assert (code, f"{tmp_path} holds quantized weights (fp8, by its quantization_config)" in errors) == (2, True)


def test_the_home_of_nobody_is_no_model(gspo: Call, tmp_path: Path) -> None:
    code, _, errors = gspo("init", tmp_path / "new", "--model", "~nobody-here/m")
    assert (code, errors.startswith("error: --model: there is no model at ~nobody-here/m")) == (2, True)


def test_a_full_disk_is_one_line(gspo: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Path("/dev/full").open("wb", buffering=0) as full:
        monkeypatch.setattr("sys.stdout", io.TextIOWrapper(full, write_through=True))
        code, _, errors = gspo("config", "name")
    assert (code, errors) == (
        1,
        "error: [Errno 28] No space left on device. Free some, or name a folder on another disk\n",
    )


def test_a_model_that_cannot_be_copied_is_one_line(gspo: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (run_dir := tmp_path / "run").mkdir()
    (run_dir / "export").mkdir()
    (run_dir / "export" / "config.json").write_text("{}")
    (run_dir / "export" / "model.safetensors").symlink_to("/proc/1/mem")
    code, _, errors = gspo("export", run_dir, tmp_path / "out")
    assert (code, errors.startswith("error: ")) == (2, True)
    assert "model.safetensors: cannot be written ([Errno" in errors


def test_a_path_behind_a_link_is_one_of_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to("there")
    monkeypatch.chdir(tmp_path)
    error = PermissionError(13, "Permission denied", f"{tmp_path}/there/log")
    assert str(_refusal(error, ["status", "link"])).startswith(
        f"{tmp_path}/there/log: cannot be used (Permission denied)"
    )
    with pytest.raises(PermissionError):
        _refusal(error, ["status", "other"])
    scratch = PermissionError(13, "Permission denied", f"{tmp_path}/there/.out.tmp")
    assert "cannot be used (Permission denied)" in str(_refusal(scratch, ["export", "run", "link/out"]))


def test_an_init_over_a_file_names_it(gspo: Call, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("here")
    code, _, errors = gspo("init", tmp_path / "file")
    assert (code, errors) == (
        2,
        f"error: {tmp_path / 'file'}: cannot be used (File exists). Give another path, or check this one\n",
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"reward": {"functions": [{"path": "r.py", "wieght": 2}]}}, "functions.0.wieght: is not a key"),
        (
            {"learner": {"learning_rat": 1.0}},
            "learner.learning_rat: is not a key (value 1.0). Did you mean 'learning_rate'",
        ),
        ({"run": {}}, "run.total_steps: the run has no end. Set run.total_steps"),
        ({"run": {"total_steps": 0}}, "run.total_steps: 0 is not allowed"),
        ({"sampling": {"top_p": 0.9}}, "sampling.top_p: 0.9 cuts the distribution to any number of tokens"),
        ({"sampling": {"top_k": 65}}, "sampling.top_k: 65 must be 2 to 64"),
        ({"sampling": {"min_p": 0.1}}, "sampling.min_p: 0.1 cuts the distribution to any number of tokens"),
        ({"algorithm": {"pg_clip": 0.1, "pg_clip_low": 0.1}}, "algorithm.pg_clip: 0.1 sets both sides"),
        ({"services": {"host": "0.0.0.0"}}, "services.host: 0.0.0.0 can be reached from other machines"),
        ({"services": {"host": "0.0.0.0", "token_file": "no"}}, "services.token_file: "),
        ({"services": {"coordinator_port": 4711, "reward_port": 4711}}, "services.reward_port: 4711 is services.coord"),
        (
            {"gateway": {"replicas": 1}, "services": {"reward_port": 4711, "gateway_port": 4711}},
            "services.gateway_port: 4711 is services.reward_port",
        ),
        ({"services": {"gateway_port": 4711}}, "services.gateway_port: 4711 has no effect without gateway.replicas: 1"),
        (
            {"services": {"redis_url": "redis://127.0.0.1:1/0"}},
            "services.redis_url: redis://127.0.0.1:1/0 cannot be",
        ),
        (
            {"services": {"redis_url": "redis://:hunter2@127.0.0.1:1/0"}},
            "services.redis_url: holds a password",
        ),
        ({"services": {"redis_url": "127.0.0.1"}}, "services.redis_url: is not a Redis address"),
    ],
)
def test_bad_configuration_is_one_message_with_key_and_fix(
    gspo: Call, tmp_path: Path, raw_config: dict[str, Any], change: dict[str, Any], message: str
) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump({**raw_config, **change}))
    code, _, errors = gspo("run", file)
    assert code == 2
    (line,) = errors.strip().splitlines()
    assert line.startswith(
        f"error: {message}" if not message.startswith("functions") else f"error: reward.{message}"
    ), line
    assert "hunter2" not in errors
    assert not (tmp_path / "runs" / "small" / "config.yaml").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("run", "no.yaml"), r"no\.yaml: cannot be read \(No such file or directory\).*gspo init"),
        (("run", "broken.yaml"), r"broken\.yaml: is not YAML"),
        (("run", "--resume", "."), r"\.: has no config\.yaml.*not a run directory"),
        (("status", "."), r"\.: has no config\.yaml"),
        (("status",), r"runs: holds no run directory"),
        (("report", "."), r"\.: has no config\.yaml"),
        (("export", ".", "out"), r"\.: has no export/config\.json"),
        (("config", "lerner"), r"lerner: is not a key\. Did you mean 'learner'\?"),
        (("eval", "model", "eval.jsonl"), r"--reward: is missing"),
        (("doctor", "no.yaml"), r"no\.yaml: cannot be read"),
        (("init", "taken"), r"config\.yaml: exists already"),
    ],
)
def test_bad_words_are_one_message(
    gspo: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.yaml").write_text("a: [")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "config.yaml").touch()
    code, _, errors = gspo(*words)
    assert code == 2
    (line,) = errors.strip().splitlines()
    assert re.match(f"error: (taken/)?{message}", line), line


def test_a_port_in_use_is_named(gspo: Call, tmp_path: Path, raw_config: dict[str, Any]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        file = tmp_path / "config.yaml"
        file.write_text(yaml.safe_dump({**raw_config, "services": {"reward_port": port}}))
        code, _, errors = gspo("run", file)
    assert (code, errors.startswith(f"error: services.reward_port: {port} cannot be bound on 127.0.0.1")) == (
        2,
        True,
    ), errors


@pytest.mark.asyncio(loop_scope="function")
async def test_a_redis_that_answers_passes_and_foreign_keys_are_refused(
    redis: Redis, redis_url: str, config: Config
) -> None:
    await check_redis(redis_url, config)
    await check_unused(redis, config)
    await redis.hset(Keys("small").open, "0", "{}")
    with pytest.raises(InputError, match=r"name: small has keys in the Redis.*gspo:\{small\}:"):
        await check_unused(redis, config)


def test_config_explains_every_key(gspo: Call) -> None:
    for words in (("config",), ("config", "--markdown")):
        code, output, _ = gspo(*words)
        assert code == 0
        assert all(key.name in output for key in explain()), words
    assert "Versions a trained rollout may be behind" in output


def test_config_explains_one_section_or_key(gspo: Call) -> None:
    _, output, _ = gspo("config", "staleness.max_lag")
    assert "staleness.max_lag" in output
    assert "integer, >= 0, <= 64" in output
    assert "may change" in output
    assert "on_stale" not in output
    _, output, _ = gspo("config", "reward")
    assert "reward.timeout_s" in output
    assert "services.redis_url" not in output
    _, output, _ = gspo("config", "reward.functions")
    assert re.search(r"reward\.functions\.N\.part_weights .*Factors of named parts", output)
    assert "reward.sandbox_minimum" not in output
    _, output, _ = gspo("config", "reward.functions.N.weight")
    assert "Factor of this function's value" in output and "reward.functions " not in output


def test_init_prints_the_next_commands_and_refuses_a_model_that_is_not_there(gspo: Call, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    folder = tmp_path / "my run"
    code, output, _ = gspo("init", folder, "--model", tmp_path)
    assert (code, f"gspo run {shlex.quote(str(folder / 'config.yaml'))}" in output) == (0, True)
    code, _, errors = gspo("init", tmp_path / "a", "--model", tmp_path / "none")
    assert (code, errors.startswith(f"error: --model: there is no model at {tmp_path / 'none'}")) == (2, True)


def test_the_version(gspo: Call) -> None:
    assert gspo("--version") == (0, f"gspo {version('gspo')}\n", "")


def test_every_key_of_config_is_one_line_in_a_pipe(gspo: Call) -> None:
    _, output, _ = gspo("config", columns=80)
    lines = output.splitlines()
    keys = [key.name for key in explain()]
    assert set(keys) <= {line.split("  ")[0] for line in lines}
    (line,) = (line for line in lines if line.startswith("algorithm.pg_clip_low "))
    assert "number | null, <= 1, > 0; default null; fixed  Ratios below 1 - pg_clip_low are clipped" in line


def test_status_prints_whole_lines_into_a_pipe(gspo: Call, tmp_path: Path, config: Config) -> None:
    run_dir = tmp_path / ("long" * 30)
    write_log(run_dir, {1: [WHY.format(7)]})
    (run_dir / "environment.json").write_text("{}")
    write_config(config, run_dir / "config.yaml")
    code, output, _ = gspo("status", run_dir, columns=80)
    assert code == 0
    assert f"gspo run --resume {run_dir}" in output.splitlines()[-1]
    assert any(WHY.format(7) in line for line in output.splitlines())


@pytest.mark.parametrize("width", [40, 80, 200])
def test_no_terminal_is_too_narrow_for_a_key(width: int) -> None:
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    print_keys("", console)
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    # A longer name than the terminal is wide cannot be whole in a line of it.
    missing = [key.name for key in explain() if len(key.name) <= width and f"{key.name} " not in shown]
    assert missing == []


def test_doctor_says_once_what_several_checks_say() -> None:
    same = "model.path: x is not a folder here"
    checks = [
        DoctorFinding("coordinator", "problem", same),
        DoctorFinding("reward", "OK", "passed"),
        DoctorFinding("learner", "problem", same),
    ]
    assert list(merge_findings(checks)) == [
        DoctorFinding("check of coordinator, learner", "problem", same),
        DoctorFinding("check of reward", "OK", "passed"),
    ]


@pytest.mark.parametrize(
    ("places", "options", "lengths"),
    [
        (512, {}, (256, 256)),
        (32_768, {}, (2048, 4096)),
        (4096, {}, (2048, 2048)),
        (512, {"prompt_length": 100}, (100, 412)),
        (512, {"response_length": 500}, (12, 500)),
        # A value of the user that cannot work is refused, and never changed.
        (512, {"prompt_length": 600, "response_length": 700}, (600, 700)),
        (512, {"response_length": 700}, (2048, 700)),
    ],
)
def test_an_evaluation_takes_the_lengths_that_the_model_has(
    tmp_path: Path, places: int, options: dict[str, Any], lengths: tuple[int, int]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"max_position_embeddings": places}}))
    question = EvaluationSpec(str(tmp_path), (tmp_path / "e.jsonl",), reward=tmp_path / "r.py", **options)
    algorithm = eval_config(question, tmp_path).algorithm
    assert (algorithm.prompt_length, algorithm.response_length) == lengths


def test_the_figures_of_an_evaluation_are_in_order() -> None:
    names = [
        "sampled_mean",
        "sampled_stderr",
        "greedy_mean",
        "greedy_stderr",
        "pass_at_1",
        "pass_at_2",
        "pass_at_2_stderr",
    ]
    names += ["pass_at_16", "best_at_16", "part_a_mean", "response_tokens_mean", "truncated_share"]
    names += ["greedy_response_tokens_mean", "num_answers", "num_failed", "num_prompts"]
    assert list(in_order(dict.fromkeys(reversed(names), 0.0))) == names


def test_an_evaluation_learns_at_once_that_it_cannot_be_written(gspo: Call, tmp_path: Path) -> None:
    (tmp_path / "r.py").write_text("")
    out = tmp_path / "none" / "result.json"
    code, _, errors = gspo("eval", "model", tmp_path / "p.jsonl", "--reward", tmp_path / "r.py", "--out", out)
    assert (code, errors.startswith(f"error: {out}: cannot be used (No such file or directory)")) == (2, True)


def test_export_copies_and_does_not_overwrite(gspo: Call, tmp_path: Path) -> None:
    source = tmp_path / "run" / "export"
    source.mkdir(parents=True)
    (source / "config.json").write_text("{}")
    out = tmp_path / "models" / "mine"
    assert gspo("export", tmp_path / "run", out)[0] == 0
    assert (out / "config.json").read_text() == "{}"
    code, _, errors = gspo("export", tmp_path / "run", out)
    assert (code, "exists and is not an empty folder" in errors) == (2, True)


@pytest.mark.parametrize("exists", [True, False])
def test_export_fills_what_a_link_names(gspo: Call, tmp_path: Path, exists: bool) -> None:
    (tmp_path / "export").mkdir()
    (tmp_path / "export" / "config.json").write_text("{}")
    if exists:
        (tmp_path / "there").mkdir()
    (tmp_path / "out").symlink_to("there")
    assert gspo("export", tmp_path, tmp_path / "out")[0] == 0
    assert (tmp_path / "out").is_symlink() and (tmp_path / "there" / "config.json").is_file()


def test_an_export_that_ends_early_leaves_nothing(gspo: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "export").mkdir()
    (tmp_path / "export" / "config.json").write_text("{}")
    (tmp_path / "loop").symlink_to("loop")
    code, _, errors = gspo("export", tmp_path, tmp_path / "loop")
    assert (code, "loop: is a link that leads back to itself" in errors) == (2, True)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", interrupt)
    assert gspo("export", tmp_path, tmp_path / "out")[0] == 130
    assert {path.name for path in tmp_path.iterdir()} == {"export", "loop"}


def test_dead_letters_of_a_finished_run_are_gone(gspo: Call, tmp_path: Path, config: Config) -> None:
    (tmp_path / "log").mkdir()
    (tmp_path / "log" / "step-000004.parquet").touch()
    write_config(config, tmp_path / "config.yaml")
    (tmp_path / "environment.json").write_text("{}")
    assert "Resume it, then ask again" in gspo("deadletter", "list", "--run", tmp_path)[2]
    summary = {"steps": 4, "end_reason": "total_steps 4 reached", "end": "completed"}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    code, _, errors = gspo("deadletter", "list", "--run", tmp_path)
    assert (code, "has finished (total_steps 4 reached), and its dead letters have ended" in errors) == (2, True)


def test_export_of_the_adapters_alone(gspo: Call, tmp_path: Path) -> None:
    for name in ("export", "best"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    code, _, errors = gspo("export", tmp_path, tmp_path / "mine", "--adapter")
    assert (code, "this run trained all weights" in errors) == (2, True)
    for name in ("export", "best"):
        (tmp_path / name / "adapter").mkdir()
        (tmp_path / name / "adapter" / name).write_text("")
        out = tmp_path / f"mine-{name}"
        assert gspo("export", tmp_path, out, "--adapter", *(["--best"] if name == "best" else []))[0] == 0
        assert [file.name for file in out.iterdir()] == [name]


def test_status_of_a_run_that_rests(gspo: Call, tmp_path: Path, config: Config) -> None:
    (tmp_path / "log").mkdir()
    write_config(config, tmp_path / "config.yaml")
    (tmp_path / "environment.json").write_text("{}")
    record = {"step": 4, "version": 4, "unix_s": 1.0, "figures": {"reward_mean": 0.5}}
    (tmp_path / "log" / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    code, output, _ = gspo("status", tmp_path)
    assert code == 0
    assert "step 4/10  reward 0.500" in output
    go_on = f"not running. Continue it: gspo run --resume {tmp_path}"
    assert go_on in output
    for steps, reason, end, expected in (
        (
            4,
            "total_steps 4 reached",
            "completed",
            f"finished: total_steps 4 reached. Report: {tmp_path / 'report.html'}",
        ),
        (4, "every reward failed", "failed", "failed: every reward failed."),
        (4, "stopped: Ctrl-C", "stopped", go_on),
        (3, "total_steps 3 reached", "completed", go_on),
    ):
        summary = {"steps": steps, "end_reason": reason, "end": end}
        (tmp_path / "summary.json").write_text(json.dumps(summary))
        assert expected in gspo("status", tmp_path)[1], summary


def test_status_of_a_run_without_its_redis_says_so(gspo: Call, tmp_path: Path, config: Config) -> None:
    write_config(config, tmp_path / "config.yaml")
    (tmp_path / "environment.json").write_text("{}")
    with lock_run_dir(tmp_path):
        (tmp_path / "services" / "supervisor.json").write_text('{"redis_url": "redis://127.0.0.1:1/0"}')
        code, _, errors = gspo("status", tmp_path)
    assert (code, errors.startswith("error: redis: does not answer")) == (2, True), errors


def test_doctor_finds_what_is_missing(gspo: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    code, output, _ = gspo("doctor")
    shown = dict(re.findall(r"^ *(?:OK|warning|problem) +(\S+(?: \S+)*)  +(.*)$", output, flags=re.MULTILINE))
    names = {
        "Python",
        "torch",
        "vLLM",
        "DeepSpeed",
        "cores",
        "GPU",
        "memory",
        "disk",
        "shared memory",
        "C++ compiler",
        "libnuma",
        "sandbox",
        "Redis",
    }
    assert names == shown.keys()
    assert "GiB free" in shown["memory"]
    assert re.match(
        r"(bubblewrap|landlock|rlimits) \(.*rlimits.*\); reward.sandbox_minimum is landlock", shown["sandbox"]
    )
    monkeypatch.setattr(shutil, "which", lambda _name: None)
    code, output, _ = gspo("doctor")
    # Nothing but vLLM's compiled graphs, which are off by default, needs a compiler.
    assert code == 0
    assert "warning" in output and "apt install g++" in output
    monkeypatch.setattr(findings, "PROCESSES_GIB", 1e6)
    monkeypatch.setattr(findings, "_NUMA", "libnuma-is-not-here.so")
    code, output, _ = gspo("doctor")
    assert code == 1
    assert "about 1000000.0 GiB needed" in output
    assert "apt install libnuma1" in output


# DeepSpeed's reduce_bucket_size.
BUCKET_GIB = 4 * 5 * 10**8 / 2**30


@pytest.mark.parametrize(
    ("keys", "gib"),
    [
        # 16 bytes a parameter, 12 to push, 4 of the generator; GiB for a model of 2**30 parameters. ZeRO 2 has its
        # gradients twice, an offload as well. A full bucket is copied; ZeRO 3 also gathers 10**9 weights.
        ({}, 32 + BUCKET_GIB),
        ({"learner": {"ranks": 4}}, 4 * (16 + BUCKET_GIB) + 16),
        ({"learner": {"ranks": 4, "zero_stage": 2}}, 4 * (4 + 2 + 2 + 2 * BUCKET_GIB) + 16),
        ({"learner": {"ranks": 4, "zero_stage": 3, "offload": "all"}}, 4 * (1 + 2 + 3 + 4 * BUCKET_GIB) + 16),
        ({"learner": {"lora": {"rank": 8}}}, 4 + 16),
        ({"staleness": {"max_lag": 1}}, 36 + BUCKET_GIB),
        ({"algorithm": {"use_kl_loss": True}, "generation": {"replicas": 2}}, 40 + BUCKET_GIB),
    ],
)
def test_doctor_knows_ranks_and_zero_stage(
    raw_config: dict[str, Any], tmp_path: Path, keys: dict[str, Any], gib: float
) -> None:
    sections = {"staleness": {"max_lag": 0}, "generation": {}, **keys}
    sections["generation"] = {"kv_cache_gb": 1e-3, **sections["generation"]}
    files = ModelFiles({}, 1 << 30, None, None, {"q_proj": [8, 8]})
    config = parse_config({**raw_config, **sections}, tmp_path)
    assert _memory_gib(config, files, on_gpus=False) == pytest.approx(PROCESSES_GIB + gib, rel=1e-3)
    # On GPUs: every rank loads 4 bytes a parameter, or has 6 offloaded. A generator has two copies beside those of the
    # learner, and several generators have three.
    learner = config.learner
    on_gpus = (
        (4 if learner.offload == "none" else 6) * max(1, learner.ranks)
        + (4 if config.staleness.max_lag else 0)
        + 4 * (3 + min(2 * config.generation.replicas, 3))
    )
    assert _memory_gib(config, files, on_gpus=True) == pytest.approx(PROCESSES_GIB + on_gpus, rel=1e-3)


@pytest.mark.parametrize(
    ("output", "minimum", "level", "message"),
    [
        ('{"level": "bubblewrap", "parts": ["seccomp"], "lacks": []}', "bubblewrap", "OK", "bubblewrap (seccomp)"),
        (
            '{"level": "landlock", "parts": [], "lacks": ["no bwrap"]}',
            "landlock",
            "OK",
            "not stronger because no bwrap",
        ),
        ('{"level": "landlock", "parts": [], "lacks": ["no bwrap"]}', "bubblewrap", "problem", "too weak"),
        ('{"level": "rlimits", "parts": [], "lacks": ["a", "b"]}', "landlock", "problem", "too weak"),
        ("noise", "landlock", "problem", "cannot be tried"),
    ],
)
def test_doctor_holds_the_sandbox_against_its_minimum(
    monkeypatch: pytest.MonkeyPatch, output: str, minimum: str, level: str, message: str
) -> None:
    done = subprocess.CompletedProcess([], 0, stdout=output, stderr="")
    monkeypatch.setattr(subprocess, "run", lambda *_words, **_options: done)
    finding = findings.sandbox(minimum)
    assert (finding.level, message in finding.text) == (level, True), finding
    assert (finding.advice == "") is (level == "OK")


def test_eval_takes_its_configuration_from_words_or_from_a_file(tmp_path: Path, raw_config: dict[str, Any]) -> None:
    question = EvaluationSpec(
        model=str(tmp_path),
        prompts=(tmp_path / "e.jsonl",),
        reward=tmp_path / "r.py",
        num_answers=2,
        temperature=0.5,
        limit=7,
    )
    config = eval_config(question, tmp_path)
    assert (config.evaluation.num_answers, config.evaluation.limit, config.sampling.temperature) == (2, 7, 0.5)
    assert (config.evaluation.prompts, config.reward.functions[0].path) == (tmp_path / "e.jsonl", tmp_path / "r.py")
    assert config.run_dir == tmp_path / "eval"

    base = tmp_path / "base.yaml"
    base.write_text(yaml.safe_dump({**raw_config, "seed": 5, "generation": {"max_rollouts": 32}}))
    config = eval_config(EvaluationSpec(model="other", prompts=(tmp_path / "e.jsonl",), base=base), tmp_path)
    assert (config.seed, config.generation.max_rollouts, config.model.path) == (5, 32, "other")
    assert config.reward.functions[0].path == tmp_path / "r.py"
    held_out = {"prompts": "e.jsonl", "temperature": 0.6}
    base.write_text(yaml.safe_dump({**raw_config, "evaluation": held_out}))
    for words, own, of_training in ((None, 0.6, 1.0), (0.5, None, 0.5)):
        spec = EvaluationSpec(model="other", prompts=(tmp_path / "e.jsonl",), base=base, temperature=words)
        config = eval_config(spec, tmp_path)
        assert (config.evaluation.temperature, config.sampling.temperature) == (own, of_training)


def test_eval_refuses_external_agents_and_takes_those_that_it_can_start(
    tmp_path: Path, raw_config: dict[str, Any]
) -> None:
    keys = {**raw_config, "agent": {"external": True}, "gateway": {"replicas": 1}}
    (base := tmp_path / "base.yaml").write_text(yaml.safe_dump(keys))
    spec = EvaluationSpec(model="m", prompts=(tmp_path / "e.jsonl",), base=base)
    with pytest.raises(InputError, match="agents that you start"):
        eval_config(spec, tmp_path)
    base.write_text(yaml.safe_dump({**keys, "agent": {"path": "agent.py"}}))
    assert eval_config(spec, tmp_path / "eval").agent.path == tmp_path / "agent.py"


def test_eval_scores_as_one_of_several_sources(tmp_path: Path, raw_config: dict[str, Any]) -> None:
    sources = [
        {"name": "a", "prompts": "a.jsonl", "prompt_column": "question", "types": {"n": "number"}},
        {"name": "b", "prompts": "b.jsonl", "functions": [], "environment": {"path": "env.py"}, "stop": ["."]},
    ]
    (base := tmp_path / "base.yaml").write_text(yaml.safe_dump({**raw_config, "data": {"sources": sources}}))

    def config_of(source: str | None) -> Config:
        spec = EvaluationSpec(model="m", prompts=(tmp_path / "e.jsonl",), base=base, source=source)
        return eval_config(spec, tmp_path)

    (first,), (second,) = config_of("a").sources, config_of("b").sources
    assert (first.prompts, first.prompt_column, len(first.functions)) == ((tmp_path / "e.jsonl",), "question", 1)
    assert (first.types, first.answer_column) == ({"n": "number"}, None)
    assert (first.environment.used, first.stop) == (False, ())
    assert (second.functions, second.environment.path, second.stop) == ((), tmp_path / "env.py", (".",))
    with pytest.raises(InputError, match=r"--source: is missing, .* Name the one that scores the answers: a, b"):
        config_of(None)
    with pytest.raises(InputError, match="--source: 'c' names no source of the configuration"):
        config_of("c")


def test_eval_takes_several_files_by_their_names(tmp_path: Path) -> None:
    paths = (tmp_path / "easy.jsonl", tmp_path / "hard.jsonl")
    config = eval_config(EvaluationSpec(model="m", prompts=paths, reward=tmp_path / "r.py"), tmp_path)
    assert config.evaluation.files == {"easy": paths[0], "hard": paths[1]}
    again = (tmp_path / "easy.jsonl", tmp_path / "other" / "easy.jsonl")
    with pytest.raises(InputError, match=r"has the name of .*easy.jsonl. Rename one"):
        eval_config(EvaluationSpec(model="m", prompts=again, reward=tmp_path / "r.py"), tmp_path)


def test_eval_speaks_of_its_own_options() -> None:
    with pytest.raises(InputError) as raised, naming_options():
        raise InputError(
            "algorithm.response_length",
            "prompt_length + response_length is 4096, and the model has 64 positions",
            "Lower prompt_length or response_length",
        )
    assert str(raised.value) == (
        "--response-length: --prompt-length + --response-length is 4096, and the model has 64 positions. "
        "Lower --prompt-length or --response-length"
    )
    with (
        pytest.raises(ServiceRefusedError, match=r"^PROMPTS: /data/prompt_lengths.jsonl has no rows$"),
        naming_options(),
    ):
        raise ServiceRefusedError("evaluation.prompts: /data/prompt_lengths.jsonl has no rows")
