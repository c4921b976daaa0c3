"""Seconds of a plan follow from the rates of its card."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.plans.published_models import published_models
from gspo.cli.plan.rates import Rate, rates_of
from gspo.cli.plan.rollout_lengths import RolloutLengths
from gspo.cli.plan.search import trained_size_of
from gspo.cli.plan.times import Machine, generation_times, learner_times
from gspo.common.host.gpu_kinds import GPU_KINDS
from tests.support.training.rollout_rows import make_config

QWEN3_8B = published_models()["Qwen3-8B"]
H200 = GPU_KINDS["NVIDIA H200"]
CONFIG = make_config(Path("model"), algorithm={"prompt_length": 1024, "response_length": 7168})
LENGTHS = RolloutLengths.of(CONFIG)


def machine(**rates: float) -> Machine:
    measured = {name: Rate(value, value, "measured", measured=True) for name, value in rates.items()}
    return Machine(H200, H200.memory_bytes, {**rates_of(H200), **measured})


def test_a_pass_of_decoding_takes_a_time_beside_its_reading() -> None:
    slow, quick = (
        generation_times(CONFIG, QWEN3_8B, LENGTHS, 1, 0.9, machine(decode_passes_s=passes)) for passes in (100, 1000)
    )
    assert slow.token.low - quick.token.low == pytest.approx(0.009)
    assert slow.token.high - quick.token.high == pytest.approx(0.009)
    assert slow.all.low > quick.all.low


def test_an_optimizer_step_reads_and_writes_at_the_measured_rate() -> None:
    size = trained_size_of(CONFIG, QWEN3_8B)
    half = machine(optimizer_bytes_share=0.5)
    times = learner_times(CONFIG, QWEN3_8B, size, LENGTHS, 1, half).optimizer
    seconds = CONFIG.algorithm.num_mini_batches * 7 * 4 * QWEN3_8B.num_parameters / (0.5 * H200.memory_bytes_s)
    assert (times.low, times.high) == pytest.approx((seconds, seconds))
    offloaded = CONFIG.with_keys(learner={"zero_stage": 1, "offload": "optimizer"})
    slower = learner_times(offloaded, QWEN3_8B, size, LENGTHS, 1, half).optimizer
    assert slower.low > times.high


@pytest.mark.parametrize(
    ("dtype", "gathered"),
    [
        # Of 8,190,735,360 parameters, 6,945,767,424 are in linear layers.
        ("bfloat16", 2 * 6_945_767_424 + 4 * 1_244_967_936),
        ("float32", 4 * 8_190_735_360),
    ],
)
def test_ranks_exchange_weights_in_the_dtype_of_the_products(dtype: str, gathered: int) -> None:
    """One micro-batch: weights for both passes, float32 gradients; of a ring of four ranks three quarters of them."""
    keys = {"zero_stage": 3, "dtype": dtype, "micro_batch_tokens": 1 << 20}
    config = make_config(Path("model"), learner=keys, algorithm={"num_mini_batches": 1})
    size, lengths = trained_size_of(config, QWEN3_8B), RolloutLengths.of(config)
    times = learner_times(config, QWEN3_8B, size, lengths, 4, machine(gather_bytes_s=1e9)).exchange
    assert times.low == times.high == pytest.approx(3 / 4 * (2 * gathered + 4 * 8_190_735_360) / 1e9)


def test_ranks_of_several_hosts_exchange_over_the_network() -> None:
    size, config = trained_size_of(CONFIG, QWEN3_8B), CONFIG.with_keys(learner={"zero_stage": 3, "dtype": "bfloat16"})
    cards = machine(network_bytes_s=1e9, gather_bytes_s=100e9)
    within, between = (
        learner_times(config, QWEN3_8B, size, LENGTHS, 8, replace(cards, cards_per_host=number)).exchange
        for number in (8, 4)
    )
    # Half of everything comes from the other host, through the network of 4 cards, not 7 / 8 from the others' links.
    assert between.low / within.low == pytest.approx((1 / 2 / 4 / 1e9) / (7 / 8 / 100e9))


def test_ranks_that_share_a_line_exchange_its_heads() -> None:
    size, cards = trained_size_of(CONFIG, QWEN3_8B), machine(gather_bytes_s=100e9)
    config = CONFIG.with_keys(learner={"zero_stage": 3, "dtype": "bfloat16", "gradient_checkpointing": True})
    alone, shared = (
        learner_times(config.with_keys(learner={"sequence_ranks": number}), QWEN3_8B, size, LENGTHS, 4, cards)
        for number in (1, 4)
    )
    assert (alone.heads.low, alone.heads.high) == (0, 0)
    # 36 layers, 32 heads of 128 for queries and output, 8 for keys and values. Three passes. 3 of 4 parts leave.
    a_token = 36 * 128 * (2 * 32 + 2 * 8) * 2 * 3 * 3 / 4
    tokens = config.algorithm.num_rollouts * (LENGTHS.prompt + LENGTHS.mean()) / 4
    assert shared.heads.low == pytest.approx(a_token * tokens / 100e9)
    # All ranks train the same line, so each has more micro-batches, and gathers every weight for each of them.
    assert shared.exchange.low > 3 * alone.exchange.low


def test_a_teacher_reads_every_token_forward_and_is_gathered() -> None:
    """A teacher of the policy's size costs what recomputed old log-probs cost. Under ZeRO 3 its weights come for each
    micro-batch, once.
    """
    cards = machine(train_flops_share=0.5, gather_bytes_s=1e9)
    keys = {"zero_stage": 3, "dtype": "bfloat16", "micro_batch_tokens": 8192, "sequence_ranks": 2}
    config = CONFIG.with_keys(learner=keys)
    recomputing = config.with_keys(algorithm={"old_logprobs": "recompute"})
    alone, taught, recomputed = (
        learner_times(config, profile, trained_size_of(config, profile), LENGTHS, 4, cards)
        for config, profile in (
            (config, QWEN3_8B),
            (config, replace(QWEN3_8B, teacher=QWEN3_8B)),
            (recomputing, QWEN3_8B),
        )
    )
    assert alone.products.low < taught.products.low == pytest.approx(recomputed.products.low)
    assert alone.heads.low < taught.heads.low == pytest.approx(recomputed.heads.low)
    larger = published_models()["Qwen3-32B"]
    profile = replace(QWEN3_8B, teacher=larger)
    size = trained_size_of(config, profile)
    assert (size.num_teacher, size.num_teacher_rounded) == (larger.num_parameters, larger.num_rounded)
    both = learner_times(config, profile, size, LENGTHS, 4, cards)
    assert both.products.low > 3 * taught.products.low - 2 * alone.products.low
    gathered = 2 * larger.num_rounded + 4 * (larger.num_parameters - larger.num_rounded)
    tokens = config.algorithm.num_rollouts * (LENGTHS.prompt + LENGTHS.mean())
    passes = math.ceil(tokens / (2 * 8192))
    assert both.exchange.low - alone.exchange.low == pytest.approx(3 / 4 * passes * gathered / 1e9)


def test_offload_copies_for_each_micro_batch() -> None:
    size, cards = trained_size_of(CONFIG, QWEN3_8B), machine(to_host_bytes_s=10e9)
    keys = {"zero_stage": 3, "offload": "optimizer", "micro_batch_tokens": 8192}

    def copies(**changed: object) -> float:
        config = CONFIG.with_keys(learner={**keys, **changed})
        return learner_times(config, QWEN3_8B, size, LENGTHS, 1, cards).host.low

    tokens = CONFIG.algorithm.num_rollouts * (LENGTHS.prompt + LENGTHS.mean())
    assert copies() == pytest.approx(math.ceil(tokens / 8192) * 2 * 4 * QWEN3_8B.num_parameters / 10e9)
    assert copies(offload="all") == pytest.approx(2 * copies())
    assert copies(micro_batch_tokens=32_768) == pytest.approx(copies() / 4, rel=0.05)
    assert copies(offload="none") == 0


def test_cards_of_a_generator_add_up_twice_a_layer() -> None:
    cards = machine(small_sums_s=10e3)
    whole, halves = (
        generation_times(
            CONFIG.with_keys(generation={"engine": {"tensor_parallel_size": number}}), QWEN3_8B, LENGTHS, 1, 0.9, cards
        )
        for number in (1, 2)
    )
    assert halves.token.low > whole.token.low / 2 + 2 * 36 / 10e3


def test_a_mixture_trains_at_a_rate_of_its_own() -> None:
    mixture = published_models()["Qwen3-30B-A3B"]
    assert mixture.is_mixture and not any(published_models()[name].is_mixture for name in ("Qwen3-0.6B", "Qwen3-32B"))
    size = trained_size_of(CONFIG, mixture)
    slow, quick = (
        learner_times(CONFIG, mixture, size, LENGTHS, 1, machine(mixture_flops_share=share)).products
        for share in (0.1, 0.2)
    )
    assert slow.low == pytest.approx(2 * quick.low)
