"""The learner's refusals before it starts an engine, and the key or file that each names."""

from __future__ import annotations

import inspect
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from gspo.common.config.schema import Config
from gspo.common.errors import InputError
from gspo.common.host.machine import Gpu
from gspo.common.model.files import ModelFiles, read_model_files, weight_files
from gspo.common.model.trained_parameters import TrainedSize, num_trained, trained_size
from gspo.common.planning.memory import RankMemory, rank_memory
from gspo.common.planning.model_profile import profile_model
from gspo.learner.check import check
from gspo.learner.training import policy_engine
from gspo.learner.training.deepspeed_config import _ALLOWED, _OWN_KEYS, _REFUSED, _ZERO, engine_config
from gspo.learner.training.gpu_memory import check_gpu_memory, own_fraction
from tests.support.gpu_machine import pretend_gpu_machine
from tests.support.tiny_model import make_tiny_model
from tests.support.training.rollout_rows import make_config

ROOT = Path(__file__).parents[3]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path / "model")


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def refused(folder: Path, **sections: Any) -> InputError:
    with pytest.raises(InputError) as caught:
        check(make_config(folder, **sections))
    return caught.value


def test_a_whole_folder_passes(folder: Path) -> None:
    check(make_config(folder))


def test_the_parameters_are_those_in_the_file(folder: Path) -> None:
    # 99 tokens of width 64, two layers (q 64x64, k and v 64x32, o 64x64, three of 64x192, four norms), a last norm.
    layer = 64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 192 + 2 * 64 + 2 * 32
    assert read_model_files(folder, allow_pickle=False).num_parameters == 99 * 64 + 2 * layer + 64


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_missing_file_is_named(folder: Path, name: str) -> None:
    (folder / name).unlink()
    error = refused(folder)
    assert error.where == "model.path"
    assert str(folder) in error.rule


def test_a_missing_folder(folder: Path) -> None:
    assert "is not a folder" in refused(folder / "nowhere").rule


def test_a_cut_off_weight_file(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    assert "model.safetensors is not a whole safetensors file" in refused(folder).rule


def test_a_missing_shard(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-00001-of-00002.safetensors"}}')
    assert "model-00001-of-00002.safetensors, which is missing" in refused(folder).rule


def test_a_folder_around_a_model_names_the_model(folder: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "models--me--tiny/snapshots/abc123"
    shutil.copytree(folder, snapshot)
    assert refused(snapshot.parents[1]).fix == f"Give a folder in it that has one, such as {snapshot}"
    (snapshot / "config.json").rename(snapshot / "adapter_config.json")
    assert refused(snapshot).fix.startswith("It holds a LoRA adapter. ")


def test_files_that_one_of_the_engines_alone_would_read(folder: Path) -> None:
    model, copy = folder / "model.safetensors", folder / "consolidated.safetensors"
    shutil.copy(model, copy)
    assert f"holds model.safetensors beside {copy.name}: the learner would read the first alone" in refused(folder).rule
    # An index leaves the copy out for both, as Mistral's own does, and an older single file for vLLM alone.
    shard, index = folder / "model-00001-of-00001.safetensors", folder / "model.safetensors.index.json"
    shutil.copy(model, shard)
    index.write_text(json.dumps({"weight_map": dict.fromkeys(load_file(shard), shard.name)}))
    assert f"beside {shard.name}: the learner would read the first alone, and vLLM the files" in refused(folder).rule
    model.unlink()
    check(make_config(folder))
    assert weight_files(folder) == [shard]


def test_pickled_weights_only_when_asked_for(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "model.allow_pickle" in refused(folder).fix
    check(make_config(folder, model={"path": str(folder), "allow_pickle": True}))


def test_quantized_weights_are_refused_by_their_method(folder: Path) -> None:
    edit(folder / "config.json", quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    error = refused(folder)
    assert "holds quantized weights (mxfp4, by its quantization_config)" in error.rule
    assert "Mxfp4Config(dequantize=True)" in error.fix
    edit(folder / "config.json", quantization_config={"quant_method": "gptq"})
    assert refused(folder).fix == "Take the model's unquantized weights"


def test_a_tokenizer_with_more_tokens_than_the_model(folder: Path) -> None:
    edit(folder / "config.json", vocab_size=98)
    assert "token ids up to 98, the model a vocabulary of 98" in refused(folder).rule


def test_a_model_with_more_rows_than_tokens_is_usual(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.resize_token_embeddings(128)
    model.save_pretrained(folder)
    check(make_config(folder))


def test_a_model_that_transformers_does_not_know(folder: Path) -> None:
    edit(folder / "config.json", model_type="foo")
    assert "type 'foo'" in refused(folder).rule
    edit(folder / "config.json", auto_map={"AutoModelForCausalLM": "foo.Foo"})
    check(make_config(folder, model={"path": str(folder), "trust_remote_code": True}))


def test_a_model_for_images_is_refused_by_that_reason_also_by_a_plan(folder: Path) -> None:
    for kind, parts in (
        ("qwen3_vl", {"vision_config": {"depth": 2}}),
        ("qwen3_omni_moe", {"vision_config": None, "thinker_config": {"audio_config": {"d_model": 2}}}),
    ):
        edit(folder / "config.json", model_type=kind, **parts)
        sentence = f"is a model of type '{kind}' for images or sound beside text, and gspo trains text alone"
        assert sentence in refused(folder).rule
        with pytest.raises(InputError, match=sentence):
            profile_model(folder)


def test_a_model_that_writes_no_text_is_refused_also_by_a_plan(folder: Path) -> None:
    edit(folder / "config.json", architectures=["Qwen3ForSequenceClassification"])
    error = refused(folder)
    assert "is a Qwen3ForSequenceClassification (architectures of its config.json), which writes no text" in error.rule
    assert error.fix == "Take the model whose class is Qwen3ForCausalLM"
    with pytest.raises(InputError, match="writes no text"):
        profile_model(folder)


def lora(*names: str) -> dict[str, Any]:
    return {"lora": {"rank": 4, "target_modules": list(names)}}


def test_adapters_for_layers_that_are_there(folder: Path) -> None:
    for names in (("all-linear",), ("q_proj", "self_attn.v_proj"), ("layers.0.mlp.down_proj",)):
        check(make_config(folder, learner=lora(*names)))


def test_adapters_for_a_layer_that_is_none(folder: Path) -> None:
    error = refused(folder, learner=lora("q_proj", "w_proj"))
    assert error.where == "learner.lora.target_modules"
    assert f"'w_proj' fits no linear layer of {folder}" in error.rule
    assert error.fix == "Did you mean 'v_proj'?"


@pytest.fixture
def mixture(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path / "mixture", num_experts=4, tie_word_embeddings=False)


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "generation_config.json"])
def test_files_of_a_model_that_nest_without_end_are_named(folder: Path, name: str) -> None:
    """Other checks read them too, through transformers."""
    (folder / name).write_text("[" * 100_000)
    assert f"{name} cannot be read (it is nested too deeply)" in refused(folder).rule


def test_layers_are_compiled_of_dense_models_where_a_compiler_is(
    folder: Path, mixture: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {"torch_compile": True}
    check(make_config(folder, learner=keys))
    assert "true is refused for a mixture" in refused(mixture, learner=keys).rule
    monkeypatch.setenv("CXX", "no-such-compiler")
    error = refused(folder, learner=keys)
    assert (error.where, error.rule) == (
        "learner.torch_compile",
        "torch.compile needs a compiler (CXX, g++, clang++, c++)",
    )


def test_experts_are_replayed_in_a_mixture_alone(folder: Path, mixture: Path) -> None:
    keys = {"routing_replay": "learner", "old_logprobs": "recompute"}
    check(make_config(mixture, algorithm=keys))
    error = refused(folder, algorithm=keys)
    assert (error.where, error.fix) == ("algorithm.routing_replay", "Set it to none")
    assert f"learner, but routing_replay has no effect: the model ({folder}) has no experts" in error.rule
    edit(mixture / "config.json", model_type="phimoe")
    assert "a model of type phimoe chooses its experts in a way that cannot be replayed" in (
        refused(mixture, algorithm=keys).rule
    )


@pytest.mark.parametrize("name", ["embed_tokens", "lm_head"])
def test_embeddings_and_output_have_no_adapters(mixture: Path, name: str) -> None:
    assert f"{name!r} fits no linear layer" in refused(mixture, learner=lora(name)).rule


@pytest.mark.parametrize("names", [("q_proj",), ("down_proj", "gate"), ("gate_proj", "up_proj"), ("all-linear",)])
def test_experts_and_routers_have_adapters(mixture: Path, names: tuple[str, ...]) -> None:
    check(make_config(mixture, learner=lora(*names)))


def test_what_adapters_of_experts_cannot_do(mixture: Path) -> None:
    error = refused(mixture, learner=lora("up_proj"))
    assert (error.where, error.fix) == ("learner.lora.target_modules", "Name both, or neither")
    assert "gate_proj and up_proj lie in one parameter, and only one of them is named" in error.rule
    error = refused(mixture, learner=lora("experts.0.down_proj"))
    assert (error.where, error.fix) == ("learner.lora.target_modules", "Name down_proj")
    for names in (("all-linear",), ("q_proj", "gate")):
        chosen = lora(*names)["lora"]
        error = refused(mixture, learner={"lora": {**chosen, "dropout": 0.1}})
        assert error.where == "learner.lora.dropout" and "no dropout at the adapters of experts" in error.rule
        error = refused(mixture, learner={"lora": chosen, "zero_stage": 3})
        assert error.where == "learner.zero_stage" and "3 spreads weights over the ranks" in error.rule
    check(make_config(mixture, learner={"lora": {**lora("q_proj")["lora"], "dropout": 0.1}, "zero_stage": 3}))


def test_the_adapters_of_experts_are_counted(mixture: Path) -> None:
    """Two layers of four experts, 64 to 32 and back; gate_proj and up_proj are one matrix with twice the rank."""
    files = read_model_files(mixture, allow_pickle=False)
    num_parameters = num_trained(
        make_config(mixture, learner=lora("gate_proj", "up_proj", "down_proj")).learner.lora, files
    )
    assert num_parameters == 2 * 4 * (8 * (64 + 64) + 4 * (32 + 64))


def states(config: Config, files: ModelFiles) -> RankMemory:
    return rank_memory(config, trained_size(config, files), config.learner.ranks)


def test_adapters_take_the_memory_of_what_they_train(folder: Path) -> None:
    files = read_model_files(folder, allow_pickle=False)
    kl = {"use_kl_loss": True}
    assert states(make_config(folder, algorithm=kl), files).states == 20 * files.num_parameters
    # Two layers' q: 64 to 64. The reference is the base itself.
    config = make_config(folder, algorithm=kl, learner=lora("q_proj"))
    assert states(config, files).states == 4 * files.num_parameters + 16 * 2 * 4 * (64 + 64)


def test_weights_of_another_model(folder: Path) -> None:
    edit(folder / "config.json", hidden_size=128)
    assert "declares an input embedding of [99, 128], the weights hold one of [99, 64]" in refused(folder).rule


def size_of(gib: int) -> TrainedSize:
    """A model without a trained weight that takes so many GiB under ZeRO 0, on any number of ranks."""
    return TrainedSize((gib << 30) // 4, 0)


def test_only_who_shares_a_gpu_is_counted(folder: Path) -> None:
    def refusal(share: dict[str, float], training_gib: int, *sharing: int) -> str:
        config = make_config(folder, generation={"engine": share, "replicas": 2}, learner={"zero_stage": 0})
        gpus = [Gpu(str(n), total_bytes=80 << 30) for n in range(len(sharing))]
        try:
            check_gpu_memory(config, size_of(training_gib), len(gpus), gpus, sharing)
        except InputError as error:
            return str(error)
        return ""

    assert refusal({}, 79, 0, 0) == ""
    assert refusal({"gpu_memory_utilization": 0.5}, 40, 1) == ""
    assert "GPU 1 has 80.0 GiB, and the learner shares it: 0.92 (vLLM's default) leaves 6.4 GiB" in refusal({}, 7, 0, 1)
    assert "0.5 for each of 2 generators leaves 0.0 GiB" in refusal({"gpu_memory_utilization": 0.5}, 40, 2)
    assert "Set it below 0.25" in refusal({"gpu_memory_utilization": 0.5}, 40, 2)
    for sharing in (0, 1):
        rule = refusal({}, 81, sharing)
        assert rule.startswith(
            "learner.zero_stage: training, or loading the model for it, takes 81.0 GiB on each GPU, and GPU"
        )
    config = make_config(folder, learner={"zero_stage": 0})
    check_gpu_memory(config, size_of(81), 1, [Gpu("MIG-1")], [0])  # of a size that is not known
    with pytest.raises(InputError, match=r"CUDA_VISIBLE_DEVICES: training takes 41.0 GiB .* programs hold 40.0\. End"):
        check_gpu_memory(config, size_of(41), 1, [Gpu("0", "GPU-0", 80 << 30, 40 << 30)], [0])


def test_a_shared_gpu_is_left_to_generators_that_start_again(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(folder, generation={"engine": {"gpu_memory_utilization": 0.5}})
    limits: list[tuple[Any, int]] = []
    monkeypatch.setattr("torch.cuda.set_per_process_memory_fraction", lambda *arguments: limits.append(arguments))
    pretend_gpu_machine(monkeypatch, tmp_path / "machine", 2, gib=80)
    policy_engine._limit_gpu_memory(config, 1)
    assert limits == []  # its own
    monkeypatch.setenv("GSPO_GENERATORS_PER_GPU", "0,1")
    for rank in (0, 1, 2):
        policy_engine._limit_gpu_memory(config, rank)
    assert limits == [(pytest.approx(1 - 0.5 - 1 / 80), 1)]
    assert own_fraction(config, Gpu("0", total_bytes=80 << 30), 2) == 0.01


@pytest.mark.parametrize(
    ("ranks", "gib", "nearest"),
    [
        # 10 bytes a parameter, then 8, then 4, and buckets with their copies of 3.7 GiB.
        (4, 80, "Nearest on 4 rank(s): learner.zero_stage: 1 takes 68.9 GiB"),
        (4, 60, "Nearest on 4 rank(s): learner.zero_stage: 2 takes 55.9 GiB"),
        (4, 50, "Nearest on 4 rank(s): learner.zero_stage: 3 takes 33.5 GiB"),
        (1, 80, "Nearest on 1 rank(s): learner.zero_stage: 2 with offload: optimizer takes 29.8 GiB"),
        (1, 7, "Less is needed with zero_stage: 3 on more learner.ranks"),
    ],
)
def test_training_that_does_not_fit_gets_the_nearest_stage(folder: Path, ranks: int, gib: int, nearest: str) -> None:
    size = TrainedSize(int(7e9), int(7e9))
    config = make_config(folder, learner={"ranks": ranks})
    gpus = [Gpu(str(n), total_bytes=gib << 30) for n in range(ranks)]
    with pytest.raises(InputError) as caught:
        check_gpu_memory(config, size, ranks, gpus, [0] * ranks)
    assert caught.value.fix.startswith(nearest)


def empty_model(folder: Path, num_parameters: float) -> Path:
    """The tiny model's folder with weights of so many parameters, which take no space on disk."""
    header = json.dumps(
        {"weight": {"dtype": "BF16", "shape": [int(num_parameters)], "data_offsets": [0, 2 * int(num_parameters)]}}
    ).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + 2 * int(num_parameters))
    return folder


def gpus_in_compose() -> int:
    """GPUs that docker-compose.gpu.yml gives the learner."""
    learner = yaml.safe_load((ROOT / "docker-compose.gpu.yml").read_text())["services"]["learner"]
    (reserved,) = learner["deploy"]["resources"]["reservations"]["devices"]
    return len(reserved["device_ids"])


def gpus_in_kubernetes() -> int:
    """GPUs that the RayJob gives a node."""
    job = yaml.safe_load((ROOT / "deploy/ray/rayjob.yaml").read_text())
    (group,) = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    return int(group["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"])


# GPUs of 80 GiB that the learner has in the shipped forms, its parameters, what the run says, and whether it fits.
COMPOSE, KUBERNETES = gpus_in_compose(), gpus_in_kubernetes()
FORMS = [
    pytest.param(COMPOSE, 0.6e9, {}, True, id="compose"),
    pytest.param(COMPOSE, 1.7e9, {}, True, id="compose-1.7"),
    pytest.param(COMPOSE, 7.6e9, {}, False, id="compose-7.6"),
    pytest.param(KUBERNETES, 7.6e9, {"ranks": KUBERNETES, "zero_stage": 3}, True, id="kubernetes"),
    pytest.param(KUBERNETES, 7.6e9, {"ranks": KUBERNETES, "zero_stage": 1}, True, id="kubernetes-zero-1"),
    pytest.param(KUBERNETES, 7.6e9, {"ranks": KUBERNETES}, False, id="kubernetes-zero-0"),
    pytest.param(KUBERNETES, 32.8e9, {"ranks": KUBERNETES, "zero_stage": 3}, True, id="kubernetes-32.8"),
    pytest.param(KUBERNETES, 48e9, {"ranks": KUBERNETES, "zero_stage": 3}, False, id="kubernetes-48"),
]


@pytest.mark.parametrize(("num_gpus", "parameters", "learner", "fits"), FORMS)
def test_a_learner_with_gpus_of_its_own_has_all_of_them(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    num_gpus: int,
    parameters: float,
    learner: dict[str, int],
    fits: bool,
) -> None:
    pretend_gpu_machine(monkeypatch, tmp_path / "machine", num_gpus)
    monkeypatch.setattr("gspo.learner.check.shared_memory", lambda: 16 << 30)
    monkeypatch.setattr("gspo.learner.check.free_memory", lambda: 512 << 30)
    empty_model(folder, parameters)
    if fits:
        check(make_config(folder, learner=learner))
    else:
        assert "GiB on each GPU, and GPU 0 has 80.0 GiB" in refused(folder, learner=learner).rule


@pytest.mark.parametrize(
    ("learner", "expected"),
    [
        ({}, (16, 0)),
        ({"zero_stage": 1, "ranks": 4}, (4 + 4 + 2, 0)),
        ({"zero_stage": 2, "ranks": 4}, (4 + 2 + 2, 0)),
        ({"zero_stage": 2, "ranks": 4, "offload": "optimizer"}, (4, 3 + 3)),
        ({"zero_stage": 3, "ranks": 4}, (1 + 1 + 2, 0)),
        ({"zero_stage": 3, "ranks": 4, "offload": "all"}, (0, 1 + 3 + 2)),
    ],
)
def test_memory_of_a_parameter_by_stage_and_offload(
    folder: Path, learner: dict[str, Any], expected: tuple[float, float]
) -> None:
    files = read_model_files(folder, allow_pickle=False)
    memory = states(make_config(folder, learner=learner), files)
    assert (memory.states / files.num_parameters, memory.offloaded / files.num_parameters) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("stage", "ranks", "in_a_pass", "in_a_step"),
    [
        (0, 1, 5e8, 0),  # as much as is reduced at a time
        (1, 1, 2e8, 1e9),
        (1, 2, 2e8, 0),
        (2, 2, 2e8, 0),
        (3, 2, 2e8 + 3e8, 1e8 + 4e8),  # gathered weights; a bucket that stays, and a group of parameters
    ],
)
def test_buffers_have_the_sizes_that_deepspeed_is_given(
    folder: Path, tmp_path: Path, stage: int, ranks: int, in_a_pass: float, in_a_step: float
) -> None:
    spread = (
        {"stage3_max_live_parameters": 3e8, "stage3_max_reuse_distance": 0, "sub_group_size": 4e8} if stage == 3 else {}
    )
    section = {"zero_optimization": {"reduce_bucket_size": 1e8, "overlap_comm": "auto", **spread}}
    file = tmp_path / "deepspeed.json"
    file.write_text(json.dumps(section))
    for deepspeed in (section, str(file)):
        learner = {"zero_stage": stage, "ranks": ranks, "deepspeed": deepspeed}
        memory = rank_memory(make_config(folder, learner=learner), TrainedSize(10**9, 10**9), ranks)
        assert (memory.buckets, memory.update) == (4 * in_a_pass, 4 * in_a_step)
        assert memory.peak == memory.states + 4 * max(in_a_pass, in_a_step)


def test_below_zero_3_every_rank_loads_the_model_into_the_machines_own_memory(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_gpu_machine(monkeypatch, tmp_path / "machine", 8)
    monkeypatch.setattr("gspo.learner.check.shared_memory", lambda: 16 << 30)
    empty_model(folder, 1e9)
    sections = {"learner": {"ranks": 8, "zero_stage": 2}, "staleness": {"max_lag": 0}}
    monkeypatch.setattr("gspo.learner.check.free_memory", lambda: 8 * 4e9 - 1)
    assert "1,000 M parameters takes 29.8 GiB of this machine's memory for loading" in refused(folder, **sections).rule
    monkeypatch.setattr("gspo.learner.check.free_memory", lambda: 8 * 4e9)
    check(make_config(folder, **sections))
    monkeypatch.setattr("gspo.learner.check.free_memory", lambda: 1e9)
    check(make_config(folder, **{**sections, "learner": {"ranks": 8, "zero_stage": 3}}))


def test_too_little_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class MachineMemory:
        available = 1 << 20

    monkeypatch.setattr(psutil, "virtual_memory", lambda: MachineMemory)
    monkeypatch.setattr(shutil, "which", lambda name: None if name == "nvidia-smi" else name)
    assert "0.0 GiB are available" in refused(folder).rule


def test_a_batch_that_ranks_and_mini_batches_do_not_divide(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"rollout_batch_size": 3, "num_return_sequences_in_group": 4, "num_mini_batches": 2}
    check(make_config(folder, algorithm=sizes))
    check(make_config(folder, algorithm=sizes, learner={"ranks": 3}))
    error = refused(folder, algorithm={**sizes, "num_mini_batches": 5})
    assert error.where == "algorithm.rollout_batch_size"
    assert "3 groups of 4 are 12 rollouts, which 5 mini-batches (num_mini_batches) on 1 rank(s)" in error.rule
    assert "a multiple of 8" in refused(folder, algorithm=sizes, learner={"ranks": 4}).fix
    # As a launcher on two hosts says it: four ranks in all.
    for name, value in {"RANK": "2", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert "on 4 rank(s)" in refused(folder, algorithm=sizes, learner={"ranks": 4}).rule
    assert "differs from the 4 rank(s) that a launcher has started" in refused(folder, learner={"ranks": 3}).rule


def test_a_learner_without_ranks_is_refused(folder: Path) -> None:
    assert "gspo run … --cluster ray" in refused(folder, learner={"ranks": 0}).fix


def test_ranks_that_share_lines_divide_the_ranks_and_the_heads(tmp_path: Path) -> None:
    """A model has four heads and two of keys."""
    folder = make_tiny_model(tmp_path, hidden_size=128)
    sizes = {"rollout_batch_size": 3, "num_return_sequences_in_group": 4, "num_mini_batches": 2}
    check(make_config(folder, algorithm=sizes, learner={"ranks": 4, "sequence_ranks": 2}))
    # Four ranks have a head each and two of them the same key head.
    check(make_config(folder, algorithm=sizes, learner={"ranks": 4, "sequence_ranks": 4}))
    error = refused(folder, algorithm=sizes, learner={"ranks": 3, "sequence_ranks": 2})
    assert (error.where, error.rule) == (
        "learner.sequence_ranks",
        "2 does not divide 3 rank(s) into groups (learner.ranks)",
    )
    error = refused(folder, algorithm=sizes, learner={"ranks": 3, "sequence_ranks": 3})
    assert error.rule.startswith(
        "3 ranks cannot share out the 4 query heads of the model evenly, with their 2 heads of keys"
    )
    assert error.fix == "Set it to one of 1, 2, 4"
    error = refused(folder, algorithm={**sizes, "num_mini_batches": 3}, learner={"ranks": 16, "sequence_ranks": 2})
    assert "3 mini-batches (num_mini_batches) on 8 group(s) of 2 ranks (learner.sequence_ranks) do not" in error.rule
    error = refused(folder, learner={"ranks": 2, "sequence_ranks": 2, "packing": False})
    assert (error.where, error.fix) == ("learner.packing", "Set it to true")
    edit(folder / "config.json", num_attention_heads=None, n_head=3, num_key_value_heads=None)
    assert "the 3 query heads" in refused(folder, learner={"ranks": 2, "sequence_ranks": 2}).rule


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "bloom"},
        {"model_type": "qwen3_next"},
        {"layer_types": ["full_attention", "conv"]},
        {"text_config": {"layer_types": ["linear_attention", "full_attention"]}},
    ],
)
def test_no_ranks_share_lines_of_a_model_that_mixes_them(folder: Path, changes: dict[str, Any]) -> None:
    """They have an attention of their own, or recurrent layers."""
    edit(folder / "config.json", **changes)
    check(make_config(folder))
    error = refused(folder, learner={"ranks": 2, "sequence_ranks": 2})
    assert (error.where, error.fix) == ("learner.sequence_ranks", "Set it to 1, or take another model")
    assert error.rule.startswith("2 ranks cannot share a line of packed rollouts: a model of type ")


def test_each_rank_needs_a_gpu_where_there_are_any(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gspo.learner.check.visible_gpus", lambda: [Gpu("0", total_bytes=80 << 30)])
    error = refused(folder, learner={"ranks": 2})
    assert (error.where, error.rule) == ("learner.ranks", "2 ranks need a GPU each, and 1 can be seen")


def test_a_rollout_must_fit_into_a_micro_batch(folder: Path) -> None:
    error = refused(folder, learner={"micro_batch_tokens": 127})
    assert error.where == "learner.micro_batch_tokens"
    assert "128" in error.rule


def test_all_branches_of_a_rollout_must_fit_into_a_micro_batch(folder: Path) -> None:
    keys: dict[str, Any] = {"algorithm": {"rollout_length": 300}}
    keys |= {"agent": {"external": True}, "gateway": {"replicas": 1}}
    error = refused(folder, learner={"micro_batch_tokens": 299}, **keys)
    assert (error.where, error.fix) == (
        "learner.micro_batch_tokens",
        "Set it to at least 300, or lower algorithm.rollout_length",
    )
    assert error.rule == "299 is less than the longest rollout, rollout_length = 300 tokens"
    # The model reads one branch at a time.
    edit(folder / "config.json", max_position_embeddings=128)
    check(make_config(folder, learner={"micro_batch_tokens": 300}, **keys))


def test_a_rollout_must_fit_into_the_model(folder: Path) -> None:
    edit(folder / "config.json", max_position_embeddings=100)
    assert "128 tokens" in refused(folder).rule


@pytest.mark.parametrize(
    ("key", "value", "instead"),
    [
        ("gradient_clipping", 0.5, "learner.max_grad_norm"),
        ("optimizer", {"type": "Adam"}, "learner.learning_rate"),
        ("bf16", {"enabled": True}, "learner.dtype"),
        ("zero_optimization", {"stage": 2}, "learner.zero_stage"),
        ("gradient_accumulation_steps", 4, "learner.micro_batch_tokens"),
        ("optimizer", {"type": "AdamW", "params": {"lr": 1.0}}, "learner.learning_rate"),
        ("scheduler", {"type": "WarmupLR"}, "learner.schedule"),
        ("zero_optimization", {"cpu_offload": True}, "learner.offload"),
    ],
)
def test_deepspeed_keys_that_contradict_ours(folder: Path, key: str, value: Any, instead: str) -> None:
    error = refused(folder, learner={"deepspeed": {key: value}})
    assert error.where.startswith(f"learner.deepspeed.{key}")
    assert instead in error.fix


@pytest.mark.parametrize(
    ("section", "stage", "where", "rule", "fix"),
    [
        (
            {"zero_optimisation": {}},
            0,
            "zero_optimisation",
            "DeepSpeed has no such key",
            "Did you mean 'zero_optimization'?",
        ),
        ({"sequence_parallel_size": 2}, 3, "sequence_parallel_size", "set learner.sequence_ranks", "Leave it out"),
        ({"tensor_parallel": {"autotp_size": 2}}, 3, "tensor_parallel", "no layer is split", "Leave it out"),
        ({"activation_checkpointing": {}}, 0, "activation_checkpointing", "gradient_checkpointing", "Leave it out"),
        ({"zero_optimization": {"zenflow": {}}}, 2, "zero_optimization.zenflow", "torch's AdamW", "Leave it out"),
        (
            {"zero_optimization": {"reduce_bucket_sizes": 1}},
            2,
            "zero_optimization.reduce_bucket_sizes",
            "DeepSpeed has no such key",
            "Did you mean 'reduce_bucket_size'?",
        ),
        (
            {"zero_optimization": {"stage3_max_live_parameters": 1}},
            2,
            "zero_optimization.stage3_max_live_parameters",
            "no effect with learner.zero_stage 2, only with 3",
            "Leave it out, or set learner.zero_stage",
        ),
        ({"zero_optimization": 3}, 3, "zero_optimization", "is no mapping", "Give its keys, or none"),
    ],
)
def test_a_deepspeed_key_without_an_effect(
    folder: Path, section: dict[str, Any], stage: int, where: str, rule: str, fix: str
) -> None:
    error = refused(folder, learner={"deepspeed": section, "zero_stage": stage})
    assert error.where == f"learner.deepspeed.{where}"
    assert rule in error.rule and error.fix == fix


def test_every_key_of_the_installed_deepspeed_is_allowed_or_refused_with_a_reason() -> None:
    """An upgrade of DeepSpeed puts its new keys into one of the tables."""
    from deepspeed.runtime.config import DeepSpeedConfig
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    names = {field.alias or name for name, field in DeepSpeedZeroConfig.model_fields.items()}
    ours = {key.rpartition(".")[2] for key in _OWN_KEYS if key.startswith("zero_optimization.")}
    refused_there = {key.rpartition(".")[2] for key in _REFUSED if key.startswith("zero_optimization.")}
    assert names == set(_ZERO) | ours | refused_there
    # DeepSpeed's configuration has an attribute for each key that it reads; a table with another name is wrong.
    everything = Path(inspect.getfile(DeepSpeedConfig)).parents[1]
    source = "".join(
        file.read_text() for file in everything.rglob("*.py") if file.name in ("config.py", "constants.py")
    )
    for key in _ALLOWED | {key for key in _REFUSED if "." not in key}:
        assert f'"{key}"' in source or f"'{key}'" in source or f"{key}:" in source, key


def test_deepspeed_keys_that_say_the_same_or_more_pass(folder: Path) -> None:
    section = {
        "zero_optimization": {"stage": 1, "reduce_bucket_size": 1000},
        "wall_clock_breakdown": True,
        "gradient_clipping": 0.5,
        "bf16": {"enabled": True},
        "fp16": {"enabled": "auto", "loss_scale": 0, "initial_scale_power": 16},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.8, 0.99], "weight_decay": "auto"}},
        "train_batch_size": "auto",
    }
    learner = {"zero_stage": 1, "max_grad_norm": 0.5, "dtype": "bfloat16", "adam_betas": [0.8, 0.99]}
    config = make_config(folder, learner={**learner, "deepspeed": section})
    check(config)
    assert engine_config(config)["zero_optimization"] == {"stage": 1, "reduce_bucket_size": 1000}
    # The same as a file, named relative to the configuration.
    (folder / "ds.json").write_text(json.dumps(section))
    assert engine_config(make_config(folder, learner={**learner, "deepspeed": "ds.json"})) == engine_config(config)


def test_a_name_without_its_papers_definition_is_one_warning(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for keys, named in (({"objective": "cispo"}, ["algorithm.preset: cispo"]), ({}, [])):
        check(make_config(folder, algorithm=keys))
        lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("warning: algorithm.")]
        assert len(lines) == len(named)
        assert all(name in line for name, line in zip(named, lines, strict=True))


def test_a_deepspeed_file_that_is_none(folder: Path) -> None:
    error = refused(folder, learner={"deepspeed": "ds.json"})
    assert error.where == "learner.deepspeed" and "ds.json cannot be read as JSON" in error.rule
    (folder / "ds.json").write_text("[]")
    assert "holds no JSON object" in refused(folder, learner={"deepspeed": "ds.json"}).rule


@pytest.mark.parametrize(
    ("learner", "where", "rule"),
    [
        ({"offload": "optimizer"}, "learner.offload", "optimizer needs zero_stage 1 or more, and it is 0"),
        ({"torch_compile": True, "zero_stage": 3}, "learner.torch_compile", "needs whole weights, and zero_stage 3"),
        ({"offload": "all", "zero_stage": 2}, "learner.offload", "all needs zero_stage 3, and it is 2"),
        (
            {"zero_stage": 3, "deepspeed": {"zero_optimization": {"offload_param": {"device": "nvme"}}}},
            "learner.deepspeed.zero_optimization.offload_param",
            "{device: nvme} is not supported under ZeRO 3",
        ),
        (
            {
                "zero_stage": 3,
                "deepspeed": {"zero_optimization": {"offload_optimizer": {"device": "cpu", "ratio": 0.5}}},
            },
            "learner.deepspeed.zero_optimization.offload_optimizer",
            "is not supported under ZeRO 3",
        ),
        (
            {"zero_stage": 2, "deepspeed": {"zero_optimization": {"offload_param": {"device": "cpu"}}}},
            "learner.deepspeed.zero_optimization.offload_param",
            "no effect with learner.zero_stage 2, only with 3",
        ),
        (
            {
                "zero_stage": 3,
                "offload": "all",
                "deepspeed": {"zero_optimization": {"offload_param": {"device": "none"}}},
            },
            "learner.deepspeed.zero_optimization.offload_param.device",
            "contradicts learner.offload: all",
        ),
    ],
)
def test_an_offload_that_there_is_not(folder: Path, learner: dict[str, Any], where: str, rule: str) -> None:
    error = refused(folder, learner=learner)
    assert error.where == where
    assert rule in error.rule


def test_an_offload_and_more_about_it(folder: Path) -> None:
    further = {"zero_optimization": {"offload_optimizer": {"device": "cpu", "pin_memory": False}}}
    config = make_config(folder, learner={"zero_stage": 3, "offload": "all", "deepspeed": further})
    assert engine_config(config)["zero_optimization"] == {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": False},
        "offload_param": {"device": "cpu"},
    }


def test_the_check_imports_no_engine() -> None:
    code = "import sys, gspo.learner.check as c; print({'torch', 'deepspeed', 'transformers'} & sys.modules.keys())"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert process.stdout.strip() == "set()"


def test_on_shared_gpus_a_rank_has_all_but_what_sleeping_generators_keep(folder: Path) -> None:
    keys: dict[str, Any] = {"staleness": {"max_lag": 0}, "learner": {"zero_stage": 0}}
    config = make_config(folder, placement="shared", **keys)
    gpu = Gpu("0", total_bytes=80 << 30, used_bytes=70 << 30)  # of the run's own generators, at a restart
    check_gpu_memory(config, size_of(79), 1, [gpu], [1])
    with pytest.raises(InputError, match=r"80.0 GiB, of which sleeping generators keep 2.0") as refused:
        check_gpu_memory(config, size_of(79), 1, [gpu], [2])
    assert refused.value.where == "learner.zero_stage"
    assert own_fraction(config, gpu, 1) == pytest.approx(78 / 80)
