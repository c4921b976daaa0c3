"""The default split of a machine's GPUs: generators, ranks and the engine's arguments that a user leaves out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.plans.published_models import published_models
from gspo.cli.plan.choice import PlannedMachine, plan_choice
from gspo.cli.processes.placement import place
from gspo.cli.processes.planned_memory import PlannedModel, planned_memory
from gspo.cli.processes.programs import process_names
from gspo.cli.rundir import gpu_defaults
from gspo.cli.rundir.user_config import UserConfig, user_config
from gspo.common.config.schema import Config
from gspo.common.host.machine import gpus_of_engine, visible_gpus
from gspo.common.model.trained_parameters import TrainedSize
from gspo.common.planning.memory import kv_bytes
from gspo.common.streams.keys import SERVICES
from tests.support.gpu_machine import GIB, pretend_gpu_machine
from tests.support.small_planned_model import small_planned_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> PlannedModel:
    return small_planned_model(tmp_path_factory.mktemp("small"), max_positions=32768)


@pytest.fixture(autouse=True)
def counted_model(model: PlannedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same on a machine whose own memory is short."""
    monkeypatch.setattr(gpu_defaults, "read_planned_model", lambda _config, **_: model)
    monkeypatch.setattr(gpu_defaults, "free_memory", lambda: 2048 * GIB)


def published(name: str, monkeypatch: pytest.MonkeyPatch, *, host_gib: int) -> PlannedModel:
    """A published model instead of the small one, on a host with so much free memory."""
    counted = published_models()[name]
    model = PlannedModel(TrainedSize(counted.num_parameters, counted.num_parameters), counted)
    monkeypatch.setattr(gpu_defaults, "read_planned_model", lambda _config, **_: model)
    monkeypatch.setattr(gpu_defaults, "free_memory", lambda: host_gib * GIB)
    return model


def user(raw_config: dict[str, Any], folder: Path, **sections: dict[str, Any]) -> UserConfig:
    return user_config({**raw_config, **sections}, folder)


def split_of(config: Config) -> tuple[int, int]:
    return config.generation.replicas, config.learner.ranks


def test_every_gpu_has_work_and_ranks_have_equal_parts(
    tmp_path: Path, raw_config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in (2, 4, 8):
        pretend_gpu_machine(monkeypatch, tmp_path / f"machine-{number}", number)
        config = user(raw_config, tmp_path).for_device()
        replicas, ranks = split_of(config)
        assert min(replicas, ranks) >= 1 and number - 1 <= replicas + ranks <= number
        algorithm = config.algorithm
        assert algorithm.num_rollouts % (algorithm.num_mini_batches * ranks) == 0
        placement = place(config, process_names(config, SERVICES), visible_gpus())
        assert all(row[2] in ("nobody", "") for row in placement.rows())


@pytest.mark.parametrize(
    ("name", "numbers", "learner", "saving"),
    [
        ("Qwen3-0.6B", (2, 4, 8), {}, (0, "none")),
        ("Qwen3-8B", (8,), {}, (3, "none")),
        ("Qwen3-8B", (2, 4, 8), {"zero_stage": 3, "offload": "all"}, (3, "all")),
        ("Qwen3-32B", (8,), {}, (3, "optimizer")),
    ],
)
def test_the_split_is_that_of_a_plan_and_all_of_it_fits(
    tmp_path: Path,
    raw_config: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    numbers: tuple[int, ...],
    learner: dict[str, Any],
    saving: tuple[int, str],
) -> None:
    """On GPUs with 80 GB, by the rules that `gspo plan` has too; half of them train, and all are used."""
    model = published(name, monkeypatch, host_gib=2048)
    assert model.profile is not None
    user_keys = user(raw_config, tmp_path, learner=learner)
    for number in numbers:
        pretend_gpu_machine(monkeypatch, tmp_path / f"machine-{number}", number)
        config = user_keys.for_device()
        assert (config.learner.zero_stage, config.learner.offload) == saving
        parallel = gpus_of_engine(config.generation.engine)
        assert (config.generation.replicas * parallel, config.learner.ranks) == (number // 2, number // 2)
        names = process_names(config, SERVICES)
        planned = planned_memory(config, place(config, names, visible_gpus()), names, model)
        assert all(memory.spare is not None and memory.spare >= 0 for memory in planned.values())
        if not learner:
            machine = PlannedMachine(number, 80 * GIB, number, 2048 * GIB)
            choice = plan_choice(config, model.profile, machine)
            assert choice is not None and (choice.replicas, choice.ranks) == split_of(config)


@pytest.mark.parametrize(
    ("learner", "expected"),
    [
        ({}, (2, "optimizer")),
        ({"zero_stage": 3}, (3, "all")),
        ({"zero_stage": 0}, (0, "none")),  # nothing fits: the start names the missing memory
        ({"deepspeed": {"zero_optimization": {"overlap_comm": True}}}, (0, "none")),
    ],
)
def test_memory_is_saved_as_far_as_needed_and_as_the_user_allows(
    tmp_path: Path,
    raw_config: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    learner: dict[str, Any],
    expected: tuple[int, str],
) -> None:
    published("Qwen3-8B", monkeypatch, host_gib=512)
    pretend_gpu_machine(monkeypatch, tmp_path / "machine", 1)
    config = user(raw_config, tmp_path, learner=learner).for_device()
    assert (config.learner.zero_stage, config.learner.offload) == expected


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({"generation": {"replicas": 2}}, (2, 4)),  # of six GPUs, four have equal parts of a mini-batch
        ({"learner": {"ranks": 2}}, (6, 2)),
        ({"learner": {"ranks": 2}, "generation": {"engine": {"tensor_parallel_size": 2}}}, (3, 2)),
        ({"generation": {"replicas": 1}, "learner": {"ranks": 1}}, (1, 1)),
    ],
)
def test_a_given_number_stays_and_the_rest_follows(
    tmp_path: Path,
    raw_config: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    sections: dict[str, Any],
    expected: tuple[int, int],
) -> None:
    pretend_gpu_machine(monkeypatch, tmp_path / "machine", 8)
    assert split_of(user(raw_config, tmp_path, **sections).for_device()) == expected


def test_a_single_gpu_is_shared_so_that_both_fit(
    tmp_path: Path, raw_config: dict[str, Any], model: PlannedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_gpu_machine(monkeypatch, tmp_path / "machine", 1, gib=24)
    user_keys = user(raw_config, tmp_path)
    config = user_keys.for_device()
    share = config.generation.engine["gpu_memory_utilization"]
    assert (split_of(config), 0 < share < 0.92) == ((1, 1), True)
    names = process_names(config, SERVICES)
    planned = planned_memory(config, place(config, names, visible_gpus()), names, model)
    assert all(memory.spare is not None and memory.spare >= 0 for memory in planned.values())
    cache = config.generation.engine["kv_cache_memory_bytes"]
    assert 0 < cache < share * 24 * GIB
    engine = f"{{gpu_memory_utilization: {share}, kv_cache_memory_bytes: {cache}}}"
    assert f"generation.engine: {engine}" in user_keys.note(config)
    # A resume keeps it, on any machine; a value of the user's own stays.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert user_keys.for_run(config) == config
    own = user(raw_config, tmp_path, generation={"engine": {"gpu_memory_utilization": 0.3}})
    assert own.for_run(config).generation.engine["gpu_memory_utilization"] == 0.3


def test_a_cache_holds_all_rollouts_at_their_longest_and_the_learner_has_the_rest(
    tmp_path: Path, raw_config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """More cache than that would stay empty, while the learner trained in small pieces."""
    model = published("Qwen3-0.6B", monkeypatch, host_gib=512)
    assert model.profile is not None
    pretend_gpu_machine(monkeypatch, tmp_path / "machine", 1, gib=139)
    algorithm = {"prompt_length": 128, "response_length": 512, "rollout_batch_size": 32}
    algorithm["num_return_sequences_in_group"] = 8
    for most in (256, 64):
        config = user(raw_config, tmp_path, algorithm=algorithm, generation={"max_rollouts": most}).for_device()
        needed = most * config.algorithm.longest_branch * kv_bytes(config, model.profile)
        assert needed <= config.generation.engine["kv_cache_memory_bytes"] <= needed + 0.01 * 139 * GIB + (1 << 20)
        assert config.micro_batch_tokens >= 8192 and not config.learner.gradient_checkpointing


def test_a_share_of_the_user_has_its_cache(
    tmp_path: Path, raw_config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM would count the learner's memory as its own if it measured the free memory."""
    pretend_gpu_machine(monkeypatch, tmp_path / "machine", 1, gib=24)

    def engine(keys: dict[str, Any]) -> dict[str, Any]:
        chosen = user(raw_config, tmp_path, generation={"engine": keys}).for_device()
        return dict(chosen.generation.engine)

    half, quarter = engine({"gpu_memory_utilization": 0.5}), engine({"gpu_memory_utilization": 0.25})
    assert half["kv_cache_memory_bytes"] - quarter["kv_cache_memory_bytes"] == pytest.approx(6 * GIB, abs=1 << 20)
    assert engine({"gpu_memory_utilization": 0.5, "kv_cache_memory_bytes": 5}) == {
        "gpu_memory_utilization": 0.5,
        "kv_cache_memory_bytes": 5,
    }


def test_dense_models_in_bfloat16_are_compiled_where_a_compiler_is(
    tmp_path: Path, raw_config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_gpu_machine(monkeypatch, tmp_path / "machine", 2, gib=80)

    def compiles(**learner: Any) -> bool:
        return user(raw_config, tmp_path, learner=learner).for_device().learner.torch_compile

    monkeypatch.setenv("CC", "sh")
    assert compiles()
    assert not compiles(torch_compile=False)
    assert not compiles(zero_stage=3)
    assert not compiles(dtype="float32")
    monkeypatch.setenv("CC", "no-such-compiler")
    assert not compiles()
    monkeypatch.setenv("CC", "sh")
    published("Qwen3-30B-A3B", monkeypatch, host_gib=2000)
    assert not compiles()


def test_activations_are_kept_where_the_micro_batch_of_the_user_fits_with_them(
    tmp_path: Path, raw_config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_gpu_machine(monkeypatch, tmp_path / "machine", 2, gib=80)
    published("Qwen3-0.6B", monkeypatch, host_gib=2000)

    def checkpoints(**learner: Any) -> bool:
        return user(raw_config, tmp_path, learner=learner).for_device().learner.gradient_checkpointing

    assert not checkpoints()
    assert not checkpoints(micro_batch_tokens=16_384)
    assert checkpoints(micro_batch_tokens=1 << 20)
    assert checkpoints(gradient_checkpointing=True)


def test_a_model_that_needs_several_gpus_gets_them(
    tmp_path: Path, raw_config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_gpu_machine(monkeypatch, tmp_path / "machine", 4, gib=3)
    long = {"prompt_length": 1024, "response_length": 23552}
    config = user(raw_config, tmp_path, algorithm=long, generation={"max_rollouts": 16}).for_device()
    assert config.generation.engine == {"tensor_parallel_size": 2}
    assert split_of(config)[0] == 1


def test_slices_of_a_gpu_are_left_to_their_user(
    tmp_path: Path, raw_config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_gpu_machine(monkeypatch, tmp_path / "machine", 1, slices={0: ["3g.40gb", "3g.40gb", "1g.10gb"]})
    assert split_of(user(raw_config, tmp_path).for_device()) == (1, 1)
