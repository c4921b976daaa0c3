"""Plans of published models on cards: they fit, divide the work, and a refusal names the missing memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.plans.published_models import published_models
from gspo.cli.plan.rates import rates_of
from gspo.cli.plan.rollout_lengths import RolloutLengths
from gspo.cli.plan.search import Plan, Shortfall, search, shortest, split_cards, trained_size_of
from gspo.cli.plan.times import Machine, parallel_cards
from gspo.common.config.schema import Config
from gspo.common.host.gpu_kinds import GPU_KINDS
from gspo.common.planning.memory import CONTEXT_BYTES, rank_memory, reserved_bytes
from tests.support.training.rollout_rows import make_config

QWEN3_8B = published_models()["Qwen3-8B"]
H100 = GPU_KINDS["NVIDIA H100 80GB HBM3"]
MACHINE = Machine(H100, H100.memory_bytes, rates_of(H100))
GIB = 2**30


def config_of(context: int = 8192, **sections: Any) -> Config:
    lengths = {"prompt_length": 1024, "response_length": context - 1024}
    return make_config(Path("model"), algorithm=lengths, **sections)


def searched(num_cards: int, config: Config | None = None, machine: Machine = MACHINE) -> Plan | Shortfall | None:
    config = config or config_of()
    return search(config, QWEN3_8B, num_cards, RolloutLengths.of(config), machine)


@pytest.mark.parametrize("num_cards", [1, 2, 3, 4, 8, 16, 24])
def test_a_plan_fits_the_cards_and_divides_the_work(num_cards: int) -> None:
    plan = searched(num_cards)
    assert isinstance(plan, Plan)
    learner, algorithm = plan.config.learner, plan.config.algorithm
    assert plan.num_cards <= num_cards
    assert plan.rank.peak + reserved_bytes(MACHINE.memory_bytes) <= MACHINE.memory_bytes
    assert plan.generator.tokens >= algorithm.prompt_length + algorithm.response_length
    assert algorithm.num_rollouts % (algorithm.num_mini_batches * plan.ranks // learner.sequence_ranks) == 0
    assert learner.micro_batch_tokens and learner.micro_batch_tokens >= 8192
    assert learner.ranks == (plan.ranks if plan.ranks <= 8 else 0)
    assert 0 < plan.fast.step_s <= plan.slow.step_s


def test_no_ranks_share_lines_of_a_model_that_cannot() -> None:
    """32 B with 32k tokens on eight cards fits where ranks share lines."""
    config, profile = config_of(32768), published_models()["Qwen3-32B"]
    plan = search(config, profile, 8, RolloutLengths.of(config), MACHINE)
    assert isinstance(plan, Plan) and plan.config.learner.sequence_ranks > 1
    alone = search(config, replace(profile, shares_lines=False), 8, RolloutLengths.of(config), MACHINE)
    assert isinstance(alone, Plan | Shortfall) and alone.config.learner.sequence_ranks == 1


def test_more_cards_are_not_slower() -> None:
    steps = [plan.slow.step_s for num in (1, 2, 4, 8, 16) if isinstance(plan := searched(num), Plan)]
    assert len(steps) == 5
    assert steps == sorted(steps, reverse=True)


def test_one_card_is_shared() -> None:
    plan = searched(1)
    assert isinstance(plan, Plan)
    share = plan.config.generation.engine["gpu_memory_utilization"]
    assert share * MACHINE.memory_bytes + plan.rank.peak + reserved_bytes(MACHINE.memory_bytes) <= MACHINE.memory_bytes
    # One card cannot sample and train at a time.
    assert plan.fast.step_s >= plan.learner.all.low + plan.generation.all.low


def test_one_card_in_shifts_holds_the_larger_side() -> None:
    """Of 40 GiB, on which LoRA of 8 B parameters and its engine do not fit at a time."""
    small = replace(MACHINE, memory_bytes=40 * GIB)
    lora = {"lora": {"rank": 16}}
    assert isinstance(searched(1, config_of(learner=lora), small), Shortfall)
    plan = searched(1, config_of(learner=lora, staleness={"max_lag": 0}), small)
    assert isinstance(plan, Plan)
    assert plan.config.placement == "shared"
    assert "gpu_memory_utilization" not in plan.config.generation.engine
    assert (plan.num_cards, plan.ranks, plan.replicas) == (1, 1, 1)
    assert plan.rank.peak + reserved_bytes(small.memory_bytes) + CONTEXT_BYTES <= small.memory_bytes
    generator = plan.generator.weights + plan.generator.working + plan.generator.kv_cache
    assert generator + plan.rank.peak > small.memory_bytes
    slowest = MACHINE.rates["to_host_bytes_s"].low
    assert plan.shift.high == pytest.approx(2 * plan.rank.states / slowest)
    work = plan.learner.all + plan.generation.all + plan.shift + plan.update.all
    assert (plan.fast.step_s, plan.slow.step_s) == pytest.approx((work.low, work.high))


def test_shifts_use_every_card_for_both() -> None:
    plan = searched(8, config_of(staleness={"max_lag": 0}))
    assert isinstance(plan, Plan)
    assert plan.config.placement == "shared"
    assert plan.ranks == plan.replicas * parallel_cards(plan.config) == plan.num_cards == 8
    lagging = searched(8)
    assert isinstance(lagging, Plan) and lagging.config.placement == "split"


def test_nothing_fits_on_small_cards() -> None:
    small = replace(MACHINE, memory_bytes=24 * GIB)
    shortfall = searched(2, machine=small)
    assert isinstance(shortfall, Shortfall)
    assert shortfall.place == "a rank's card"
    assert shortfall.has_bytes == 24 * GIB
    peak = rank_memory(
        shortfall.config, trained_size_of(shortfall.config, QWEN3_8B), shortfall.ranks, profile=QWEN3_8B
    ).peak
    assert shortfall.missing_bytes == pytest.approx(peak + reserved_bytes(24 * GIB) - 24 * GIB)


def test_a_host_with_too_little_memory_gets_no_offload() -> None:
    """8 B parameters on one rank of a large card: offloaded where the host has memory, else not at all."""
    large = replace(MACHINE, memory_bytes=141 * GIB)
    plan = searched(1, machine=large)
    assert isinstance(plan, Plan) and plan.config.learner.offload != "none"
    assert plan.host.ranks >= plan.rank.offloaded > 0
    assert plan.host.published == pytest.approx(3 * 2 * QWEN3_8B.num_parameters)
    assert plan.host.staged == pytest.approx(2 * 2 * QWEN3_8B.num_parameters)
    assert isinstance(searched(1, machine=replace(large, host_bytes=plan.host.total)), Plan)
    shortfall = searched(1, machine=replace(large, host_bytes=plan.host.total / 4))
    assert isinstance(shortfall, Shortfall)


def test_only_the_host_lacks_memory() -> None:
    shortfall = searched(8, machine=replace(MACHINE, host_bytes=20 * GIB))
    assert isinstance(shortfall, Shortfall)
    assert (shortfall.place, shortfall.has_bytes) == ("a host", 20 * GIB)
    assert {*shortfall.parts} == {"ranks", "published", "staged", "processes"}


def test_what_cards_share_stays_within_a_host() -> None:
    plan = searched(16, config_of(32_768), replace(MACHINE, cards_per_host=2))
    assert isinstance(plan, Plan)
    assert plan.ranks % 2 == 0 and plan.config.learner.ranks in (0, 2)
    assert plan.config.learner.sequence_ranks <= 2 and parallel_cards(plan.config) <= 2


def test_work_that_no_split_divides_has_no_plan() -> None:
    config = make_config(
        Path("model"),
        algorithm={"rollout_batch_size": 1, "num_return_sequences_in_group": 3, "num_mini_batches": 2},
    )
    assert searched(2, config) is None


def split(config: Config, num_cards: int, **numbers: int) -> tuple[int, int] | None:
    """(generators, ranks) of an 8 B model."""
    plans = split_cards(config, QWEN3_8B, num_cards, MACHINE, **numbers)
    return (shortest(plans).replicas, shortest(plans).ranks) if plans else None


def on_gpus(engine: Mapping[str, float] | None = None, **learner: object) -> Config:
    keys = {"dtype": "bfloat16", "gradient_checkpointing": True, "micro_batch_tokens": 8192, **learner}
    return config_of(learner=keys, generation={"dtype": "bfloat16", "engine": engine or {}})


def test_cards_are_split_by_memory_and_work() -> None:
    eight = split(on_gpus(zero_stage=3), 8)
    # The optimizer's states of 8 B parameters need several ranks.
    assert eight is not None and eight[1] > 2 and sum(eight) == 8
    assert split(on_gpus(zero_stage=3), 8, replicas=4) == (4, 4)
    assert split(on_gpus(zero_stage=3), 8, ranks=4) == (4, 4)
    assert split(on_gpus(zero_stage=3), 1) is None and split(on_gpus(zero_stage=0), 8) is None


def test_an_engine_share_of_the_user_takes_nothing_from_the_learners_cards() -> None:
    assert split(on_gpus({"gpu_memory_utilization": 0.9}, zero_stage=3), 8) == split(on_gpus(zero_stage=3), 8)


def test_splits_need_whole_generators() -> None:
    assert split(on_gpus({"tensor_parallel_size": 4}, zero_stage=3), 8) == (1, 4)
