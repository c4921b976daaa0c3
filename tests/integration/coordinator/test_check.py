"""`--check`: exit code 2 with one message for an error, a warning for a doubtful configuration, and no torch."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gspo.common.config.schema import ModelConfig
from gspo.common.errors import InputError
from gspo.coordinator.data.tokenizer import load_tokenizer
from tests.integration.coordinator.conftest import ROOT

Configure = Callable[..., Path]


def check(run_dir: Path, env: dict[str, str], *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gspo.coordinator", "--check", str(run_dir / "config.yaml"), *options]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120, check=False)


def test_a_configuration_that_works_says_nothing(configure: Configure, no_torch_env: dict[str, str]) -> None:
    done = check(configure(held_out=2), no_torch_env)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_held_out_prompts_that_are_trained_on_are_a_warning(configure: Configure, no_torch_env: dict[str, str]) -> None:
    run_dir = configure(held_out=3)
    with (run_dir / "train.jsonl").open("a") as rows:
        rows.write(json.dumps({"prompt": "1+2=", "answer": 3}) + "\n")
    with (run_dir / "held_out.jsonl").open("a") as rows:
        rows.write(json.dumps({"prompt": "1+2="}) + "\n")  # a second time, and it counts again
    done = check(run_dir, no_torch_env)
    assert done.returncode == 0
    overlap, repeated = done.stderr.splitlines()
    where = "evaluation.prompts: 2 of 4 held-out prompts are also training prompts"
    assert overlap.startswith(f"warning: held_out_in_training: {where}")
    assert "held_out.jsonl, line 2; the evaluation would measure" in overlap
    assert repeated.startswith("warning: held_out_twice: evaluation.prompts: 1 of 4 held-out prompts are there before")
    assert check(run_dir, no_torch_env, "--evaluate").stderr.splitlines() == [repeated], "nothing is trained"


def test_what_cannot_work_is_one_message_and_exit_code_2(configure: Configure, no_torch_env: dict[str, str]) -> None:
    done = check(configure(prompts=[{"prompt": "x" * 33}]), no_torch_env)
    assert done.returncode == 2
    assert done.stderr.startswith("error: data.prompts: 1 of 1 prompts are longer than algorithm.prompt_length: 32")
    assert done.stderr.count("\n") == 1


def test_a_batch_that_no_memory_holds_is_refused_at_once(configure: Configure, no_torch_env: dict[str, str]) -> None:
    done = check(configure(algorithm={"rollout_batch_size": 1_000_000_000}), no_torch_env)
    assert done.returncode == 2
    assert done.stderr.startswith("error: algorithm.rollout_batch_size: 1000000000 groups of 2 answers")
    assert done.stderr.count("\n") == 1


def test_a_model_without_a_tokenizer(configure: Configure, model_folder: Path, no_torch_env: dict[str, str]) -> None:
    run_dir = configure()
    shutil.copytree(model_folder, run_dir / "broken")
    (run_dir / "broken" / "tokenizer.json").write_text('{"version": "1.0", "model": 3}')
    done = check(configure(model={"path": "broken"}), no_torch_env)
    assert done.returncode == 2
    assert done.stderr.startswith("error: model.path: no tokenizer loads from ")


def test_a_default_tokenizer_without_a_vocabulary_is_none(tmp_path: Path) -> None:
    """transformers has a default tokenizer for some kinds of model, also where the folder holds none."""
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    with pytest.raises(InputError, match=r"no tokenizer loads from .* \(it holds no vocabulary\)"):
        load_tokenizer(ModelConfig(path=str(tmp_path)))


def test_the_tokenizer_loads_without_importing_a_torch_that_is_there(model_folder: Path) -> None:
    code = (
        "import sys; from gspo.common.config.schema import ModelConfig;"
        "from gspo.coordinator.data.tokenizer import load_tokenizer;"
        f"tokenizer = load_tokenizer(ModelConfig(path={str(model_folder)!r}));"
        "print(len(tokenizer('1+2=')['input_ids']), 'torch' in sys.modules)"
    )
    env = {"PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}:{ROOT / 'services'}", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.stdout, done.stderr) == ("4 False\n", "")
