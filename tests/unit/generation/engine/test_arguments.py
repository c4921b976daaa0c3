"""The mapping `generation.engine`: allowed and refused arguments, checked without importing vLLM."""

from __future__ import annotations

import ast
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from gspo.common.errors import ConfigError, InputError
from gspo.generation.check import check
from gspo.generation.engine.arguments import ALLOWED_ARGS, OWN_ARGS, REFUSED_ARGS, check_engine_args
from tests.support.tiny_model import make_tiny_model
from tests.support.training.rollout_rows import make_config


def test_vllms_own_arguments_pass() -> None:
    check_engine_args({"tensor_parallel_size": 2, "gpu_memory_utilization": 0.5, "quantization": "fp8_per_tensor"})


def test_an_unknown_argument_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"generation\.engine\.tensor_paralel_size: 2 .*'tensor_parallel_size'"):
        check_engine_args({"tensor_paralel_size": 2})


def test_an_argument_of_the_service_is_refused_with_the_way_to_go() -> None:
    with pytest.raises(ConfigError, match=r"generation\.engine\.dtype: half .*set `generation\.dtype`"):
        check_engine_args({"dtype": "half"})


def test_a_second_way_to_say_a_key_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"generation\.engine\.max_num_seqs: 8 .*set `generation\.max_rollouts`"):
        check_engine_args({"max_num_seqs": 8})


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("distributed_executor_backend", "ray", r"memory of one host\. Set mp or uni"),
        ("speculative_config", {"method": "ngram"}, r"set `generation\.draft_tokens`"),
        ("enable_lora", True, "whole weights, in which adapters are merged"),
        ("hf_overrides", {"rope_theta": 1}, "the learner would not know"),
        ("nnodes", 2, "memory of one host"),
        ("scheduling_policy", "priority", "every request has the same priority"),
    ],
)
def test_an_argument_without_an_effect_or_with_a_bad_one_is_refused(name: str, value: object, reason: str) -> None:
    with pytest.raises(ConfigError, match=rf"generation\.engine\.{name}: .*{reason}.*[Rr]emove the key"):
        check_engine_args({name: value})


def test_values_that_the_placement_checks_need_no_import_of_vllm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The import takes up to a minute before a run starts."""
    monkeypatch.setitem(sys.modules, "gspo.generation.engine.startup", None)
    model = make_tiny_model(tmp_path / "model")
    plain = {"gpu_memory_utilization": 0.5, "kv_cache_memory_bytes": 1 << 30, "enforce_eager": False}
    check(make_config(model, generation={"engine": plain}))
    with pytest.raises(ImportError):
        check(make_config(model, generation={"engine": {**plain, "block_size": 8}}))


def test_a_model_whose_code_needs_a_missing_package_is_refused_before_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_tiny_model(tmp_path / "model")
    facts = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(facts | {"architectures": ["Qwen3_5ForCausalLM"]}))
    monkeypatch.setattr("gspo.generation.check.find_spec", lambda _: None)
    with pytest.raises(InputError, match=r"is a Qwen3_5ForCausalLM, whose code in vLLM needs the package torchvision"):
        check(make_config(model))
    monkeypatch.setattr("gspo.generation.check.find_spec", lambda _: True)
    check(make_config(model))


def test_executors_of_one_host_pass() -> None:
    check_engine_args({"distributed_executor_backend": "mp"})


def test_every_argument_of_the_installed_vllm_is_ours_refused_or_allowed() -> None:
    """An upgrade of vLLM puts each new argument into one of the tables; what one version lacks is refused."""
    tables = [set(OWN_ARGS), set(REFUSED_ARGS), set(ALLOWED_ARGS)]
    package = importlib.util.find_spec("vllm")
    assert package is not None and package.submodule_search_locations is not None
    source = Path(package.submodule_search_locations[0], "engine", "arg_utils.py").read_text()
    names = {
        line.target.id
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef) and node.name in ("EngineArgs", "AsyncEngineArgs")
        for line in node.body
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
    }
    assert names <= set.union(*tables)
    assert set(OWN_ARGS) | set(ALLOWED_ARGS) <= names
    assert sum(map(len, tables)) == len(set.union(*tables))


def test_the_check_does_not_import_vllm() -> None:
    code = (
        "import sys; from gspo.generation.engine.arguments import check_engine_args as check; "
        "check({'block_size': 8}); assert not {'vllm', 'torch'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
