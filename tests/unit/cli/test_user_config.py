"""Keys that a user leaves to the device: their values on CPUs and GPUs, in the run's config.yaml and at a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from gspo.cli.doctor import _on_device
from gspo.cli.run.evaluation import EvaluationSpec, eval_config
from gspo.cli.rundir.start import RunStart, decide_start, lock_run_dir, prepare
from gspo.cli.rundir.user_config import UserConfig, user_config
from gspo.common.config.loading import key_value, parse_config, read_config
from gspo.common.config.reference import explain
from gspo.common.config.schema import Config
from gspo.common.errors import InputError
from tests.support.gpu_machine import PRODUCT, pretend_gpu_machine

ON_GPUS = {"generation.dtype": "bfloat16", "learner.dtype": "bfloat16", "learner.gradient_checkpointing": True}
ON_CPUS = {"generation.dtype": "float32", "learner.dtype": "float32", "learner.gradient_checkpointing": False}


def values_of(config: Config) -> dict[str, Any]:
    return {name: key_value(config, name) for name in ON_GPUS}


def config_of(raw_config: dict[str, Any], folder: Path) -> UserConfig:
    return user_config(raw_config, folder)


def started(folder: Path, raw_config: dict[str, Any]) -> RunStart:
    """A run that has trained a step, on the machine that this process believes to be on."""
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(raw_config))
    start = decide_start(file, resume=False)
    with lock_run_dir(start.run_dir):
        prepare(start)
    (start.run_dir / "log").mkdir()
    (start.run_dir / "log" / "step-000001.parquet").touch()
    return start


def test_without_gpus_nothing_changes(tmp_path: Path, raw_config: dict[str, Any]) -> None:
    config = parse_config(raw_config, tmp_path)
    assert values_of(config) == ON_CPUS
    # The one key without a number of its own gets the one that it stands for.
    raw_config["learner"] = {"micro_batch_tokens": config.micro_batch_tokens}
    resolved = parse_config(raw_config, tmp_path)
    del raw_config["learner"]
    assert config_of(raw_config, tmp_path).for_device() == resolved


def test_gpus_fill_in_what_the_user_leaves_out(
    tmp_path: Path, raw_config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_gpu_machine(monkeypatch, tmp_path / "machine", 2)
    assert values_of(config_of(raw_config, tmp_path).for_device()) == ON_GPUS
    user = config_of({**raw_config, "learner": {"dtype": "float32", "threads": 3}}, tmp_path)
    assert values_of(user.for_device()) == {**ON_GPUS, "learner.dtype": "float32"}
    assert user.for_device().learner.threads == 3
    assert user.left_out == [
        "generation.dtype",
        "generation.replicas",
        "learner.micro_batch_tokens",
        "learner.gradient_checkpointing",
        "learner.torch_compile",
        "learner.zero_stage",
        "learner.offload",
        "learner.ranks",
    ]


def test_a_container_without_a_gpu_prepares_for_those_that_have_one(
    tmp_path: Path, raw_config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engines built for CUDA leave no doubt, although nvidia-smi sees no GPU here."""
    pretend_gpu_machine(monkeypatch, tmp_path / "machine", 0)
    assert values_of(config_of(raw_config, tmp_path).for_device()) == ON_GPUS


def test_a_run_stands_resolved_and_keeps_its_values_on_another_device(
    tmp_path: Path, raw_config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as on_gpus:
        pretend_gpu_machine(on_gpus, tmp_path / "machine", 2)
        start = started(tmp_path, raw_config)
    assert start.from_device == (
        f"from the device (2 x {PRODUCT}): generation.dtype: bfloat16, generation.replicas: 1, "
        "learner.dtype: bfloat16, learner.micro_batch_tokens: 6144, learner.gradient_checkpointing: true, "
        "learner.torch_compile: false, learner.zero_stage: 0, learner.offload: none, learner.ranks: 1"
    )
    assert values_of(read_config(start.run_dir / "config.yaml")) == ON_GPUS
    for target in (start.run_dir, tmp_path / "config.yaml"):
        resumed = decide_start(target, resume=True)
        assert (values_of(resumed.config), resumed.changes, resumed.from_device) == (ON_GPUS, (), "")
    assert f"device was 2 x {PRODUCT} and is now CPU" in prepare(resumed)[0]
    with pytest.raises(InputError, match="already holds this run"):
        decide_start(tmp_path / "config.yaml", resume=False)
    raw_config["learner"] = {"dtype": "float32"}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(raw_config))
    with pytest.raises(InputError, match=r"learner\.dtype was bfloat16 and is now float32"):
        decide_start(tmp_path / "config.yaml", resume=True)


def test_a_run_that_began_before_a_key_goes_on_without_it(tmp_path: Path, raw_config: dict[str, Any]) -> None:
    stored = started(tmp_path, raw_config).run_dir / "config.yaml"
    assert read_config(stored).learner.decay_matrices_only
    keys = yaml.safe_load(stored.read_text())
    del keys["learner"]["decay_matrices_only"]
    stored.write_text(yaml.safe_dump(keys))
    resumed = decide_start(tmp_path / "config.yaml", resume=True)
    assert (resumed.config.learner.decay_matrices_only, resumed.changes) == (False, ())
    adapters = config_of({**raw_config, "learner": {"lora": {"rank": 4}}}, tmp_path)  # the key has no effect there
    assert adapters.for_run(adapters.for_device()) == adapters.for_device()
    raw_config["learner"] = {"decay_matrices_only": True}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(raw_config))
    with pytest.raises(InputError, match=r"decay_matrices_only was false and is now true"):
        decide_start(tmp_path / "config.yaml", resume=True)


def test_a_run_of_a_cpu_goes_on_as_it_was_on_gpus(
    tmp_path: Path, raw_config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert started(tmp_path, raw_config).from_device.startswith("from the device (CPU): generation.dtype: float32, ")
    pretend_gpu_machine(monkeypatch, tmp_path / "machine", 2)
    assert values_of(decide_start(tmp_path / "config.yaml", resume=True).config) == ON_CPUS


def test_an_evaluation_follows_its_device_too(
    tmp_path: Path, raw_config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_gpu_machine(monkeypatch, tmp_path / "machine", 1)
    alone = EvaluationSpec(model="m", prompts=(tmp_path / "e.jsonl",), reward=tmp_path / "r.py")
    assert eval_config(alone, tmp_path).generation.dtype == "bfloat16"
    base = tmp_path / "config.yaml"
    for keys, dtype in (({}, "bfloat16"), ({"dtype": "float16"}, "float16")):
        base.write_text(yaml.safe_dump({**raw_config, "generation": keys}))
        spec = EvaluationSpec(model="m", prompts=(tmp_path / "e.jsonl",), base=base)
        assert eval_config(spec, tmp_path).generation.dtype == dtype


def test_doctor_says_what_follows_from_the_device(
    tmp_path: Path, raw_config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    config, finding = _on_device(config_of(raw_config, tmp_path))
    assert (finding.level, "(CPU): generation.dtype: float32" in finding.text) == ("OK", True)
    pretend_gpu_machine(monkeypatch, tmp_path / "machine", 2)
    config, finding = _on_device(config_of(raw_config, tmp_path))
    assert values_of(config) == ON_GPUS
    assert "generation.dtype: bfloat16" in finding.text
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    _, finding = _on_device(config_of(raw_config, tmp_path))
    assert (finding.level, finding.text) == ("problem", "CUDA_VISIBLE_DEVICES: '7' names no GPU of this machine")


def test_the_reference_has_both_defaults() -> None:
    keys = {key.name: key for key in explain()}
    assert keys["learner.dtype"].default == "float32 on CPUs, bfloat16 on GPUs"
    on_gpus = {name: keys[name].on_gpus for name in ON_GPUS}
    assert on_gpus == ON_GPUS | {"learner.gradient_checkpointing": "true if memory needs it"}
    assert keys["learner.packing"].on_gpus is None
