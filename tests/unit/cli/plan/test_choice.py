"""Choices for published models on GPUs: they fit, divide the work, follow the rules, and name every missing memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.plans.published_models import published_models
from gspo.cli.plan.choice import Choice, PlannedMachine, choices, first_fitting, plan_choice, trained_size_of
from gspo.common.config.schema import Config
from gspo.common.planning.memory import CONTEXT_BYTES, rank_memory, reserved_bytes
from tests.support.training.rollout_rows import make_config

QWEN3_8B = published_models()["Qwen3-8B"]
GIB = 2**30


def machine_of(num_gpus: int, *, gib: float = 80, per_host: int = 8, host_gib: float = 2048) -> PlannedMachine:
    return PlannedMachine(num_gpus, gib * GIB, per_host, host_gib * GIB)


def config_of(context: int = 8192, **sections: Any) -> Config:
    lengths = {"prompt_length": 1024, "response_length": context - 1024}
    return make_config(Path("model"), algorithm=lengths, **sections)


def chosen(machine: PlannedMachine, config: Config | None = None, model: str = "Qwen3-8B") -> Choice:
    choice = plan_choice(config or config_of(), published_models()[model], machine)
    assert choice is not None
    return choice


def fitting(machine: PlannedMachine, config: Config | None = None, model: str = "Qwen3-8B") -> Choice:
    choice = chosen(machine, config, model)
    assert not choice.shortages
    return choice


@pytest.mark.parametrize("num_gpus", [1, 2, 3, 4, 8, 16, 24])
def test_a_choice_fits_the_gpus_and_divides_the_work(num_gpus: int) -> None:
    choice = fitting(machine_of(num_gpus))
    learner, algorithm = choice.config.learner, choice.config.algorithm
    if not choice.on_same_gpus:
        assert choice.replicas * choice.parallel + choice.ranks <= num_gpus
    assert choice.rank.peak + reserved_bytes(80 * GIB) <= 80 * GIB
    assert choice.generator.tokens >= algorithm.prompt_length + algorithm.response_length
    assert algorithm.num_rollouts % (algorithm.num_mini_batches * choice.ranks // learner.sequence_ranks) == 0
    assert learner.micro_batch_tokens and learner.micro_batch_tokens >= 8192


@pytest.mark.parametrize(
    ("model", "num_gpus", "context", "expected"),
    [
        # (ranks, generators, GPUs of each, ZeRO stage, offload, ranks that share a line). Half of the GPUs train.
        ("Qwen3-0.6B", 4, 4096, (2, 2, 1, 0, "none", 1)),
        ("Qwen3-8B", 8, 8192, (4, 4, 1, 3, "none", 1)),
        # Of 8 B parameters no ZeRO stage fits one rank, and the other GPU generates.
        ("Qwen3-8B", 2, 8192, (1, 1, 1, 2, "optimizer", 1)),
        # Beside the weights of 32 B the cache does not take eight longest rollouts.
        ("Qwen3-32B", 8, 8192, (4, 2, 2, 3, "optimizer", 1)),
        ("Qwen3-32B", 8, 40_960, (4, 2, 2, 3, "all", 2)),
        # Whole hosts train.
        ("Qwen3-235B-A22B", 64, 16_384, (32, 4, 8, 3, "all", 1)),
    ],
)
def test_the_rules_choose(model: str, num_gpus: int, context: int, expected: tuple[object, ...]) -> None:
    choice = fitting(machine_of(num_gpus), config_of(context), model)
    learner = choice.config.learner
    saving = (learner.zero_stage, learner.offload, learner.sequence_ranks)
    assert (choice.ranks, choice.replicas, choice.parallel, *saving) == expected


def test_235_b_fit_64_gpus_of_141_gb_with_hosts_of_2_tib() -> None:
    """Each rank keeps the versions of the layers that it owns: no host has whole policies beside its states."""
    choice = fitting(machine_of(64, gib=131), config_of(16_384), "Qwen3-235B-A22B")
    assert (choice.ranks, choice.config.learner.offload) == (32, "optimizer")
    assert choice.host.published < 3 * 470e9 / 3


@pytest.mark.parametrize(("gib", "checkpoints"), [(80, False), (24, True)])
def test_activations_are_kept_where_a_micro_batch_of_8192_tokens_fits_with_them(gib: int, checkpoints: bool) -> None:
    choice = fitting(machine_of(4, gib=gib), model="Qwen3-0.6B")
    profile, free = published_models()["Qwen3-0.6B"], gib * GIB - reserved_bytes(gib * GIB)
    kept = choice.config.with_keys(learner={"gradient_checkpointing": False, "micro_batch_tokens": 8192})
    fits = rank_memory(kept, trained_size_of(kept, profile), choice.ranks, profile=profile).peak <= free
    assert choice.config.learner.gradient_checkpointing is (not fits) is checkpoints
    assert choice.rank.peak <= free


def test_ranks_take_more_gpus_before_they_offload() -> None:
    """States of 8 B parameters, without offload, need five GPUs of 48 GiB, and eight divide the rollouts."""
    choice = fitting(machine_of(12, gib=48, per_host=12))
    assert (choice.ranks, choice.config.learner.offload) == (8, "none")
    assert choice.config.learner.zero_stage == 3


def test_ranks_share_lines_before_they_offload() -> None:
    """8 B with 40k tokens on eight GPUs: one rank a line fits with the optimizer's states on the host alone."""
    learner = fitting(machine_of(8), config_of(40_960)).config.learner
    assert (learner.sequence_ranks, learner.offload) == (2, "none")
    alone = plan_choice(config_of(40_960), replace(QWEN3_8B, shares_lines=False), machine_of(8))
    assert alone is not None and (alone.config.learner.offload, alone.shortages) == ("optimizer", ())


def test_generators_are_larger_where_the_host_lacks_memory_for_so_many_policies() -> None:
    roomy = fitting(machine_of(8))
    choice = fitting(machine_of(8, host_gib=120))
    assert (roomy.replicas, roomy.parallel) == (4, 1)
    assert choice.replicas < roomy.replicas and choice.parallel > 1
    assert choice.host.total <= 120 * GIB < roomy.host.total


def test_larger_groups_leave_generators_as_they_are() -> None:
    config = config_of(32_768)
    larger = config.with_keys(algorithm={"num_return_sequences_in_group": 64})
    of_both = [fitting(machine_of(8), each) for each in (config, larger)]
    assert [(choice.replicas, choice.parallel) for choice in of_both] == [(4, 1), (4, 1)]


def test_no_ranks_share_lines_of_a_model_that_cannot() -> None:
    """32 B with 40k tokens on eight GPUs fits where ranks share lines."""
    config, profile = config_of(40_960), published_models()["Qwen3-32B"]
    assert fitting(machine_of(8), config, "Qwen3-32B").config.learner.sequence_ranks > 1
    alone = plan_choice(config, replace(profile, shares_lines=False), machine_of(8))
    assert alone is not None and alone.config.learner.sequence_ranks == 1


def test_a_single_gpu_is_shared() -> None:
    choice = fitting(machine_of(1))
    engine = choice.config.generation.engine
    share, kept = engine["gpu_memory_utilization"], reserved_bytes(80 * GIB)
    assert share * 80 * GIB + choice.rank.peak + kept <= 80 * GIB
    # vLLM would count the learner's memory as its own.
    assert engine["kv_cache_memory_bytes"] == int(choice.generator.kv_cache) >> 20 << 20


def test_a_single_gpu_in_shifts_holds_the_larger_side() -> None:
    """A GPU of 40 GiB, on which LoRA of 8 B parameters and its engine do not fit at a time."""
    small, lora = machine_of(1, gib=40), {"lora": {"rank": 16}}
    assert chosen(small, config_of(learner=lora)).shortages
    choice = fitting(small, config_of(learner=lora, staleness={"max_lag": 0}))
    assert choice.config.placement == "shared"
    assert "gpu_memory_utilization" not in choice.config.generation.engine
    assert (choice.on_same_gpus, choice.ranks, choice.replicas) == (True, 1, 1)
    assert choice.rank.peak + reserved_bytes(40 * GIB) + CONTEXT_BYTES <= 40 * GIB
    generator = choice.generator.weights + choice.generator.working + choice.generator.kv_cache
    assert generator + choice.rank.peak > 40 * GIB


def test_shifts_use_every_gpu_for_both() -> None:
    choice = fitting(machine_of(8), config_of(staleness={"max_lag": 0}))
    assert choice.config.placement == "shared"
    assert choice.ranks == choice.replicas * choice.parallel == 8
    assert fitting(machine_of(8)).config.placement == "split"


def test_a_small_gpu_lacks_memory_of_a_rank() -> None:
    choice = chosen(machine_of(2, gib=24))
    short = next(short for short in choice.shortages if short.place == "a rank's GPU")
    assert short.has_bytes == 24 * GIB
    peak = rank_memory(choice.config, trained_size_of(choice.config, QWEN3_8B), choice.ranks, profile=QWEN3_8B).peak
    assert short.missing_bytes == pytest.approx(peak + reserved_bytes(24 * GIB) - 24 * GIB)


def test_a_host_with_too_little_memory_gets_no_offload() -> None:
    """8 B parameters on a single rank of a large GPU: offloaded where the host has memory, else not at all."""
    choice = fitting(machine_of(1, gib=141))
    assert choice.config.learner.offload != "none"
    assert choice.host.ranks >= choice.rank.offloaded > 0
    assert choice.host.published == pytest.approx(3 * 2 * QWEN3_8B.num_parameters)
    assert choice.host.staged == pytest.approx(2 * 2 * QWEN3_8B.num_parameters)
    assert not chosen(machine_of(1, gib=141, host_gib=choice.host.total / GIB)).shortages
    assert chosen(machine_of(1, gib=141, host_gib=choice.host.total / GIB / 4)).shortages


def test_only_the_host_lacks_memory() -> None:
    (short,) = chosen(machine_of(8, host_gib=20)).shortages
    assert (short.place, short.has_bytes) == ("a host", 20 * GIB)
    assert {*short.parts} == {"ranks", "published", "staged", "processes"}


def test_every_obstacle_of_the_nearest_choice_is_named() -> None:
    """235 B on eight GPUs: a rank fits with all offloaded, the engine's weights and the offloaded states do not."""
    choice = chosen(machine_of(8), model="Qwen3-235B-A22B")
    assert [short.place for short in choice.shortages] == ["a generator's GPU", "a host"]
    assert (choice.config.learner.offload, choice.parallel) == ("all", 4)


def test_what_gpus_share_stays_within_a_host() -> None:
    choice = fitting(machine_of(16, per_host=2), config_of(32_768))
    assert choice.ranks % 2 == 0
    assert choice.config.learner.sequence_ranks <= 2 and choice.parallel <= 2


def test_work_that_no_split_divides_has_no_choice() -> None:
    config = make_config(
        Path("model"),
        algorithm={"rollout_batch_size": 1, "num_return_sequences_in_group": 3, "num_mini_batches": 2},
    )
    assert plan_choice(config, QWEN3_8B, machine_of(2)) is None


def split(config: Config, num_gpus: int, **numbers: int) -> tuple[int, int] | None:
    """(generators, ranks) of an 8 B model, with all other keys as they are; None if none fits."""
    size = trained_size_of(config, QWEN3_8B)
    choice = first_fitting(choices(config, QWEN3_8B, size, machine_of(num_gpus), [{}], **numbers))
    assert choice is not None
    return None if choice.shortages else (choice.replicas, choice.ranks)


def on_gpus(engine: Mapping[str, float] | None = None, **learner: object) -> Config:
    keys = {"dtype": "bfloat16", "gradient_checkpointing": True, "micro_batch_tokens": 8192, **learner}
    return config_of(learner=keys, generation={"dtype": "bfloat16", "engine": engine or {}})


def test_a_number_of_the_user_stays() -> None:
    assert split(on_gpus(zero_stage=3), 8) == (4, 4)
    assert split(on_gpus(zero_stage=3), 8, replicas=4) == (4, 4)
    assert split(on_gpus(zero_stage=3), 8, ranks=4) == (4, 4)
    assert split(on_gpus(zero_stage=3), 8, ranks=2) is None
    assert split(on_gpus(zero_stage=3), 1) is None and split(on_gpus(zero_stage=0), 8) is None


def test_an_engine_share_of_the_user_takes_nothing_from_the_learners_gpus() -> None:
    assert split(on_gpus({"gpu_memory_utilization": 0.9}, zero_stage=3), 8) == split(on_gpus(zero_stage=3), 8)


def test_splits_need_whole_generators() -> None:
    assert split(on_gpus({"tensor_parallel_size": 4}, zero_stage=3), 8) == (1, 4)
