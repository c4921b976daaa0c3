"""The table of planned memory, the longest rollout, and the micro-batch that fills a GPU, with a real profile."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gspo.cli.processes.longest_rollout import check_longest, longest_rollout
from gspo.cli.processes.placement import NO_GPUS, Placement, place
from gspo.cli.processes.planned_memory import (
    PlannedModel,
    free_for_ranks,
    memory_table,
    planned_memory,
    rank_of,
    read_planned_model,
)
from gspo.cli.processes.programs import process_names
from gspo.cli.rundir.user_config import user_config
from gspo.common.config.schema import Config
from gspo.common.errors import InputError
from gspo.common.host.machine import GIB, Gpu
from gspo.common.planning.longest import fitting_micro_batch, micro_batch_bound
from gspo.common.planning.memory import policy_bytes, reserved_bytes
from gspo.common.streams.keys import SERVICES
from tests.support.gpu_machine import pretend_gpu_machine
from tests.support.service_process import make_run
from tests.support.small_planned_model import small_planned_model
from tests.support.tiny_model import make_tiny_model

ON_GPU = {"dtype": "bfloat16", "gradient_checkpointing": True}
COLUMNS = "weights  gradients  optimizer  KV cache  activations  free"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> PlannedModel:
    # It reads longer sequences than small GPUs can hold.
    return small_planned_model(tmp_path_factory.mktemp("small"), max_positions=1 << 20)


def run_of(folder: Path, *, longest: int = 128, share: float = 0.92, **learner: Any) -> Config:
    sizes = {"prompt_length": 64, "response_length": longest - 64, "num_mini_batches": 1}
    return make_run(
        folder,
        folder,
        learner={**ON_GPU, **learner},
        generation={"dtype": "bfloat16", "engine": {"gpu_memory_utilization": share}},
        algorithm=sizes,
    )


def on_gpus(config: Config, gib: int, number: int = 2, used_gib: int = 0) -> Placement:
    gpus = [Gpu(str(n), f"GPU-{n}", gib * GIB, used_gib * GIB) for n in range(number)]
    return place(config, process_names(config, SERVICES), gpus)


def test_on_shared_gpus_a_rank_has_the_gpu_without_vllms_share(tmp_path: Path, model: PlannedModel) -> None:
    """Beside vLLM's share of 0.92 it would have nothing, and the longest rollout would be refused."""
    split = run_of(tmp_path)
    with pytest.raises(InputError, match="a rank has memory to train"):
        check_longest(split, on_gpus(split, 16, number=1), model)
    staleness = split.staleness.model_copy(update={"max_lag": 0})
    shared = split.model_copy(update={"placement": "shared", "staleness": staleness})
    assert check_longest(shared, on_gpus(shared, 16, number=1), model) == []
    longest = longest_rollout(shared, on_gpus(shared, 16, number=1), model)
    alone = longest_rollout(split, on_gpus(split, 16, number=2), model)
    assert longest.trainable and alone.trainable
    assert 0.7 * alone.trainable.planned < longest.trainable.planned < alone.trainable.planned


def test_the_parts_of_a_gpu_add_up(tmp_path: Path, model: PlannedModel) -> None:
    config = run_of(tmp_path)
    placement = on_gpus(config, 16, used_gib=1)
    planned = planned_memory(config, placement, process_names(config, SERVICES), model)
    generator, rank = planned["generation-0"], planned["learner-0"]
    assert generator.weights == policy_bytes(config, model.size.num_parameters)
    engine = generator.weights + generator.kv_cache + (generator.activations or 0)
    assert engine == pytest.approx(0.92 * 16 * GIB)
    assert generator.spare == pytest.approx((16 - 1) * GIB - engine)
    memory = rank_of(config, model, on_gpu=True)
    assert rank.weights + rank.gradients + rank.optimizer + (rank.activations or 0) == pytest.approx(memory.peak)
    assert rank.spare == pytest.approx((16 - 1) * GIB - memory.peak - reserved_bytes(16 * GIB))
    table = memory_table(config, placement, process_names(config, SERVICES), model).splitlines()
    assert table[0] == f"process       GPU  shared with  {COLUMNS}"
    assert table[1].split()[:4] == ["generation-0", "0", "nobody", f"{generator.weights / GIB:.1f}"]
    assert table[-1] == "(planned GiB on each GPU)"


def test_a_shared_gpu_is_counted_once(tmp_path: Path, model: PlannedModel) -> None:
    config = make_run(tmp_path, tmp_path, generation={"engine": {"gpu_memory_utilization": 0.4}}, learner=ON_GPU)
    planned = planned_memory(config, on_gpus(config, 16, 1), process_names(config, SERVICES), model)
    (spare,) = {memory.spare for memory in planned.values()}
    peak = rank_of(config, model, on_gpu=True).peak
    assert spare == pytest.approx(16 * GIB * 0.6 - peak - reserved_bytes(16 * GIB))


def test_the_table_of_shared_gpus_says_that_they_are_used_in_shifts(tmp_path: Path, model: PlannedModel) -> None:
    config = run_of(tmp_path).model_copy(update={"placement": "shared"})
    table = memory_table(config, on_gpus(config, 16, 1), process_names(config, SERVICES), model).splitlines()
    assert table[1].split()[:5] == ["generation-0", "0", "learner-0", "in", "shifts"]
    assert table[-1] == "(planned GiB on each GPU. Generators and learner use them in shifts: placement is shared)"


def test_without_gpus_the_table_is_of_host_memory(
    tmp_path: Path, model: PlannedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gspo.cli.processes.planned_memory.free_memory", lambda: 16.0 * GIB)
    config = make_run(tmp_path, tmp_path, generation={"replicas": 2}, learner={"ranks": 2})
    names = process_names(config, SERVICES)
    table = memory_table(config, NO_GPUS, names, model).splitlines()
    assert table[0] == f"process       {COLUMNS}"
    assert [line.split()[0] for line in table[1:]] == ["generation-0", "generation-1", "learner-0", "(planned"]
    alone, both = (
        planned_memory(replaced, NO_GPUS, names, model)["learner-0"]
        for replaced in (config.model_copy(update={"learner": config.learner.model_copy(update={"ranks": 1})}), config)
    )
    assert (both.gradients, both.optimizer) == (2 * alone.gradients, 2 * alone.optimizer)
    unknown = memory_table(config, NO_GPUS, names, replace(model, profile=None)).splitlines()[3]
    assert unknown.split()[-2] == "?"


def test_the_micro_batch_fills_the_gpu_and_no_more(tmp_path: Path, model: PlannedModel) -> None:
    assert model.profile
    config = run_of(tmp_path, longest=4096)

    def peak(num_tokens: int) -> float:
        return rank_of(run_of(tmp_path, longest=4096, micro_batch_tokens=num_tokens), model, on_gpu=True).peak

    tokens = fitting_micro_batch(config, model.profile, model.size, 1, 6 * GIB)
    assert tokens > 4096 and tokens % 1024 == 0
    assert peak(tokens) <= 6 * GIB < peak(tokens + 1024)
    # A whole mini-batch of 16 rollouts is enough, and the longest rollout the least.
    assert fitting_micro_batch(config, model.profile, model.size, 1, 600 * GIB) == 16 * 4096 == 65_536
    assert fitting_micro_batch(run_of(tmp_path, longest=8192), model.profile, model.size, 1, 600 * GIB) == 65_536
    assert fitting_micro_batch(config, model.profile, model.size, 4, 600 * GIB) == 4 * 4096
    assert fitting_micro_batch(config, model.profile, model.size, 1, 0.1 * GIB) == 4096


def test_a_rollout_that_no_gpu_holds_is_refused_with_the_nearest_that_fits(tmp_path: Path, model: PlannedModel) -> None:
    fitting = run_of(tmp_path, share=0.34)
    longest = longest_rollout(fitting, on_gpus(fitting, 8), model)
    assert longest.servable and longest.trainable
    assert f"holds {longest.servable.planned:,}, a rank trains {longest.trainable.planned:,}" in longest.line()
    assert check_longest(fitting, on_gpus(fitting, 8), model) == []

    between = run_of(tmp_path, longest=longest.servable.planned + 64, share=0.34)
    (warning,) = check_longest(between, on_gpus(between, 8), model)
    assert warning.startswith("algorithm.response_length: the longest rollout, prompt_length + response_length, has")
    planned = longest.servable.planned
    assert f"a generator holds {planned:,} by the plan. Set it to {planned - 64} or less, or set " in warning
    assert "set generation.engine.tensor_parallel_size to 2" in warning

    too_long = run_of(tmp_path, longest=longest.servable.most + 1, share=0.34)
    with pytest.raises(InputError, match=f"a generator holds at most {longest.servable.most:,}"):
        check_longest(too_long, on_gpus(too_long, 8), model)


def test_a_generator_holds_a_branch_and_a_rank_all_of_them(tmp_path: Path, model: PlannedModel) -> None:
    fitting = run_of(tmp_path, share=0.34)
    longest = longest_rollout(fitting, on_gpus(fitting, 8), model)
    assert longest.servable and longest.trainable
    assert longest.servable.planned < longest.trainable.planned

    def of_branches(tokens: int) -> Config:
        return fitting.with_keys(algorithm={"rollout_length": tokens})

    several = of_branches(longest.trainable.planned)
    line = longest_rollout(several, on_gpus(several, 8), model).line()
    assert line.startswith(f"longest rollout: {longest.trainable.planned:,} tokens in branches of up to 128; by the")
    assert check_longest(several, on_gpus(several, 8), model) == []
    too_many = of_branches(longest.trainable.most + 1)
    with pytest.raises(InputError, match=r"^algorithm\.rollout_length: the longest rollout of several branches has"):
        check_longest(too_many, on_gpus(too_many, 8), model)
    assert model.profile is not None
    assert fitting_micro_batch(of_branches(8192), model.profile, model.size, 1, 0.1 * GIB) == 8192
    assert of_branches(200_000).micro_batch_tokens == 200_000


def test_a_rank_without_enough_memory_gets_the_nearest_key(tmp_path: Path, model: PlannedModel) -> None:
    fitting = run_of(tmp_path, ranks=2, zero_stage=1, gradient_checkpointing=False)
    longest = longest_rollout(fitting, on_gpus(fitting, 8, 3), model).trainable
    assert longest
    config = run_of(tmp_path, longest=longest.planned + 1, ranks=2, zero_stage=1, gradient_checkpointing=False)
    (warning,) = check_longest(config, on_gpus(config, 8, 3), model)
    assert f"a rank has memory to train {longest.planned:,} by the plan" in warning
    assert warning.endswith("or set learner.gradient_checkpointing: true")
    changed = run_of(tmp_path, longest=longest.planned + 1, ranks=2, zero_stage=1, gradient_checkpointing=True)
    assert check_longest(changed, on_gpus(changed, 8, 3), model) == []


def test_a_micro_batch_that_no_gpu_holds_is_refused_with_the_nearest_that_fits(
    tmp_path: Path, model: PlannedModel
) -> None:
    def checked(tokens: int) -> list[str]:
        config = run_of(tmp_path, longest=4096, micro_batch_tokens=tokens, gradient_checkpointing=False)
        return check_longest(config, on_gpus(config, 12), model)

    config = run_of(tmp_path, longest=4096, gradient_checkpointing=False)
    free = free_for_ranks(config, on_gpus(config, 12))
    assert model.profile and free
    bound = micro_batch_bound(config, model.profile, model.size, 1, *free)
    assert 4096 < bound.planned < bound.most < 65_536  # a mini-batch has so many tokens
    assert checked(bound.planned) == []
    (warning,) = checked(bound.planned + 1)
    assert f"a rank has memory for {bound.planned:,} by the plan. Set it to at most {bound.planned}" in warning
    with pytest.raises(InputError, match=r"^learner\.micro_batch_tokens: .*learner\.gradient_checkpointing: true"):
        checked(bound.most + 1)


def test_the_default_micro_batch_is_filled_to_the_gpu_that_the_learner_gets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_tiny_model(tmp_path / "model")
    keys = {
        "name": "filled",
        "model": {"path": str(tmp_path / "model")},
        "data": {"prompts": "p.jsonl"},
        "reward": {"functions": [{"path": "r.py"}]},
        "algorithm": {"rollout_batch_size": 64, "prompt_length": 32, "response_length": 224},
        "run": {"total_steps": 1},
    }
    assert user_config(keys, tmp_path).for_device().learner.micro_batch_tokens == 2048
    pretend_gpu_machine(monkeypatch, tmp_path / "machine", 2)
    filled = user_config(keys, tmp_path).for_device()
    assert filled.learner.micro_batch_tokens == 256 * filled.algorithm.num_rollouts // filled.algorithm.num_mini_batches
    # The start refuses a GPU that other programs fill, with its reason.
    pretend_gpu_machine(monkeypatch, tmp_path / "filled", 1, used_gib=[80])
    assert user_config(keys, tmp_path).for_device().learner.micro_batch_tokens == 2048


def test_a_small_model_has_mebibytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiny one, with 119 k parameters; it is counted where no cache has it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    make_tiny_model(tmp_path / "model")
    config = make_run(tmp_path, tmp_path / "model", generation={"kv_cache_gb": 1})
    counted = read_planned_model(config)
    assert counted and counted.profile
    generator, learner = memory_table(config, NO_GPUS, process_names(config, SERVICES), counted).splitlines()[1:3]
    weights = policy_bytes(config, counted.size.num_parameters) / 2**20
    assert generator.split()[:6] == ["generation-0", f"{weights:.2g}", "MiB", "-", "-", "1.0"]
    assert learner.count(" MiB") == 3 and "?" not in learner
