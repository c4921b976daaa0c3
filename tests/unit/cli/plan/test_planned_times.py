"""The seconds of a plan follow from the rates of its GPU, and choose nothing."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.plans.published_models import published_models
from gspo.cli.plan.choice import Choice, PlannedMachine, plan_choice
from gspo.cli.plan.planned_times import PlannedTimes, times_of
from gspo.cli.plan.rates import Rate, rates_of
from gspo.cli.plan.rollout_lengths import RolloutLengths
from gspo.common.host.gpu_kinds import GPU_KINDS
from gspo.common.planning.model_profile import ModelProfile
from tests.support.training.rollout_rows import make_config

QWEN3_8B = published_models()["Qwen3-8B"]
H200 = GPU_KINDS["NVIDIA H200"]
CONFIG = make_config(Path("model"), algorithm={"prompt_length": 1024, "response_length": 7168})
LENGTHS = RolloutLengths.of(CONFIG)


def choice_of(num_gpus: int = 8, profile: ModelProfile = QWEN3_8B, **sections: Any) -> Choice:
    machine = PlannedMachine(num_gpus, H200.memory_bytes, 8, math.inf)
    choice = plan_choice(CONFIG.with_keys(**sections), profile, machine)
    assert choice is not None and not choice.shortages
    return choice


def times(choice: Choice, profile: ModelProfile = QWEN3_8B, **rates: float) -> PlannedTimes:
    measured = {name: Rate(value, value, "measured", measured=True) for name, value in rates.items()}
    return times_of(choice, profile, LENGTHS, H200, {**rates_of(H200), **measured})


def with_learner(choice: Choice, **keys: object) -> Choice:
    return replace(choice, config=choice.config.with_keys(learner=keys))


def test_a_pass_of_decoding_takes_a_time_beside_its_reading() -> None:
    slow, quick = (times(choice_of(), decode_passes_s=passes) for passes in (100, 1000))
    assert slow.token.low - quick.token.low == pytest.approx(0.009)
    assert slow.token.high - quick.token.high == pytest.approx(0.009)
    assert slow.generation.low > quick.generation.low


def test_a_teacher_reads_every_token_forward() -> None:
    """A teacher of the policy's size costs what recomputed old log-probs cost."""
    choice = choice_of()
    recomputing = replace(choice, config=choice.config.with_keys(algorithm={"old_logprobs": "recompute"}))
    alone, recomputed = (times(it, train_flops_share=0.5).products for it in (choice, recomputing))
    taught = times(choice, replace(QWEN3_8B, teacher=QWEN3_8B), train_flops_share=0.5).products
    assert alone.low < taught.low == pytest.approx(recomputed.low)


def test_offload_copies_for_each_micro_batch() -> None:
    choice = with_learner(choice_of(2), ranks=1)

    def copies(offload: str, tokens: int = 8192) -> float:
        changed = with_learner(choice, offload=offload, micro_batch_tokens=tokens, sequence_ranks=1)
        return times(changed, to_host_bytes_s=10e9).offload.low

    tokens = CONFIG.algorithm.num_rollouts * (LENGTHS.prompt + LENGTHS.mean())
    passes, a_copy = tokens / 8192, 4 * QWEN3_8B.num_parameters / 10e9
    optimizer = 5 * CONFIG.algorithm.num_mini_batches
    assert copies("optimizer") == pytest.approx((2 * passes + optimizer) * a_copy)
    assert copies("all") == pytest.approx((4 * passes + optimizer) * a_copy)
    assert copies("optimizer", 16_384) == pytest.approx((passes + optimizer) * a_copy)
    assert copies("none") == 0


def test_changes_are_packed_on_the_cores_that_a_rank_has() -> None:
    choice, rates = choice_of(), rates_of(H200)
    slow, quick, fastest = (times_of(choice, QWEN3_8B, LENGTHS, H200, rates, cores).send for cores in (0.5, 2, 64))
    seconds = 2 * QWEN3_8B.num_parameters / choice.ranks / rates["pack_bytes_s"].low
    assert slow.high - quick.high == pytest.approx(seconds / 2)
    assert quick.high - fastest.high == pytest.approx(seconds / 4)
    assert fastest == times_of(choice, QWEN3_8B, LENGTHS, H200, rates).send


def test_a_mixture_trains_at_a_rate_of_its_own() -> None:
    mixture = published_models()["Qwen3-30B-A3B"]
    assert mixture.is_mixture and not any(published_models()[name].is_mixture for name in ("Qwen3-0.6B", "Qwen3-32B"))
    choice = choice_of(profile=mixture)
    slow, quick = (times(choice, mixture, mixture_flops_share=share).products for share in (0.1, 0.2))
    assert slow.low == pytest.approx(2 * quick.low)


def test_a_single_gpu_cannot_sample_and_train_at_a_time() -> None:
    both = times(choice_of(1))
    assert both.fast.step_s >= both.products.low + both.generation.low


def test_shifts_move_the_states_there_and_back() -> None:
    choice = choice_of(1, staleness={"max_lag": 0})
    assert choice.config.placement == "shared"
    quick, slow = (times(choice, to_host_bytes_s=rate) for rate in (10e9, 5e9))
    assert quick.shift.high == pytest.approx(2 * choice.rank.states / 10e9)
    # Generators and learner alternate, so a step takes all of it.
    copies = quick.shift + quick.make + quick.offload
    assert slow.fast.step_s - quick.fast.step_s == pytest.approx(copies.low)
    assert times(choice_of()).shift.high == 0


@pytest.mark.parametrize(("num_gpus", "num_hosts"), [(8, 1), (64, 4)])
def test_an_update_sends_a_share_of_a_policy_to_each_host_of_generators(num_gpus: int, num_hosts: int) -> None:
    choice = choice_of(num_gpus, generation={"engine": {"tensor_parallel_size": 1}})
    low, high, whole = times(choice).sent_bytes
    assert whole == 2 * QWEN3_8B.num_parameters * num_hosts
    assert choice.replicas > num_hosts
    assert (low / whole, high / whole) == pytest.approx((0.023, 0.091))
