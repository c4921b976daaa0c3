"""Seconds of each part of a step and of a weight update, as ranges, from a model's counts and the rates of a card."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gspo.cli.plan.rates import Rate
from gspo.common.config.schema import Config
from gspo.common.host.gpu_kinds import GpuKind
from gspo.common.model.trained_parameters import TrainedSize
from gspo.common.planning.memory import DTYPE_BYTES, FLOAT32_BYTES, RankMemory, generator_memory, kv_bytes, policy_bytes
from gspo.common.planning.model_profile import ModelProfile

if TYPE_CHECKING:
    # It imports numpy, which a start without GPUs does not need.
    from gspo.cli.plan.rollout_lengths import RolloutLengths

# Measured on a CPU at a learning rate of 1e-6 to 1e-5 (docs/benchmarks.md): packed changes, of all bytes.
CHANGED_SHARE = Rate(0.023, 0.091, "packed changes at learning rates of 1e-6 to 1e-5, 2026-11-22")
# The threads that pack changes (learner/push/policy_weights.py).
_PACKING = 4
# AdamW reads weight, gradient and two moments, and writes three of them.
ADAM_TOUCHES = 7
# A dense product of two float32 values and their sum.
_BACKWARD_PASSES, _DIVIDED_WEIGHTS, _DIVIDED_GRADIENTS = 2, 3, 2


@dataclass(frozen=True)
class Seconds:
    """A range of time: `low` at the fast end of the rates, `high` at the slow end."""

    low: float
    high: float

    def __add__(self, other: Seconds) -> Seconds:
        return Seconds(self.low + other.low, self.high + other.high)

    def __mul__(self, factor: float) -> Seconds:
        return Seconds(self.low * factor, self.high * factor)


def seconds(amount: float, rate: Rate, factor: float = 1.0) -> Seconds:
    """The time for an amount at `rate * factor` a second."""
    return Seconds(amount / (rate.high * factor), amount / (rate.low * factor))


@dataclass(frozen=True)
class Machine:
    """The cards of a plan and what they reach.

    Attributes:
        memory_bytes: Of each card.
        rates: By the names of rates.ASSUMED.
        cards_per_host: At most.
        host_bytes: Of each host's own memory.
    """

    card: GpuKind
    memory_bytes: float
    rates: Mapping[str, Rate]
    cards_per_host: int = 8
    host_bytes: float = math.inf


@dataclass(frozen=True)
class LearnerTimes:
    """Seconds of one step on all ranks.

    Attributes:
        products: Forward and backward passes of every token, and repeated ones under gradient checkpointing.
        exchange: Gathered weights and reduced gradients, if they are hidden behind no product.
        heads: The exchange of ranks that share a line, before and after each attention.
        host: Under offload, gradients of each micro-batch, and weights, between card and host.
        optimizer: AdamW on every card, or in host memory under offload.
    """

    products: Seconds
    exchange: Seconds
    heads: Seconds
    host: Seconds
    optimizer: Seconds

    @property
    def all(self) -> Seconds:
        """Exchange, copies of the host and products overlap at best, and follow each other at worst."""
        low = max(self.products.low, self.exchange.low, self.host.low)
        return Seconds(low, self.products.high + self.exchange.high + self.host.high) + self.heads + self.optimizer


def learner_times(
    config: Config, profile: ModelProfile, size: TrainedSize, lengths: RolloutLengths, ranks: int, machine: Machine
) -> LearnerTimes:
    """The learner's times of a step with so many ranks."""
    flops = training_flops(config, profile, lengths)
    share = machine.rates["mixture_flops_share" if profile.is_mixture else "train_flops_share"]
    passes = _micro_batches(config, lengths, ranks)
    return LearnerTimes(
        products=seconds(flops, share, machine.card.flops * ranks),
        exchange=_exchange(config, profile, size, passes, ranks, machine),
        heads=_exchanged_heads(config, profile, lengths, ranks, machine),
        host=_host_copies(config, size, passes, ranks, machine),
        optimizer=_optimizer(config, size, ranks, machine),
    )


def training_flops(config: Config, profile: ModelProfile, lengths: RolloutLengths) -> float:
    """Operations of one step: 2 for each parameter and token forward, 4 backward, and attention (planning/flops.py).

    Gradient checkpointing repeats the layers' forward pass. Old log-probs and a reference add one forward pass each, a
    teacher that the learner loads one of its own.
    """
    model, algorithm = profile.flops_under(config.learner.lora.rank), config.algorithm
    extra = (algorithm.old_logprobs == "recompute") + bool(algorithm.needs_reference)
    total = 0.0
    answers = lengths.groups()
    for answer in answers.reshape(-1)[:: answers.shape[1]].tolist():
        length, predicted = round(lengths.prompt + answer), round(answer)
        repeated = model.forward(length, 0) if config.learner.gradient_checkpointing else 0.0
        passes = model.forward(length, predicted) + model.backward(length, predicted) + repeated
        total += passes * algorithm.ppo_epochs + extra * model.forward(length, predicted)
        if profile.teacher is not None:
            total += profile.teacher.flops.forward(length, predicted)
    return total / len(answers) * algorithm.num_rollouts


def _micro_batches(config: Config, lengths: RolloutLengths, ranks: int) -> int:
    """Micro-batches of each rank in a step."""
    tokens = config.algorithm.num_rollouts * (lengths.prompt + lengths.mean()) * config.algorithm.ppo_epochs
    groups = ranks // config.learner.sequence_ranks
    return max(config.algorithm.updates_per_step, math.ceil(tokens / (groups * config.micro_batch_tokens)))


def _collective(num_bytes: float, ranks: int, machine: Machine) -> Seconds:
    """The time in which each rank gets all of these bytes, of which it has its part, or the sum of its part.

    In rings every rank receives (ranks - 1) / ranks of them, and all cards of a host together (hosts - 1) / hosts over
    the network (https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md); the slower of the two counts.
    """
    within = seconds(num_bytes * (ranks - 1) / ranks, machine.rates["gather_bytes_s"])
    hosts = math.ceil(ranks / machine.cards_per_host)
    if hosts == 1:
        return within
    from_others = num_bytes * (hosts - 1) / hosts / machine.cards_per_host
    between = seconds(from_others, machine.rates["network_bytes_s"])
    return Seconds(max(within.low, between.low), max(within.high, between.high))


def _exchange(
    config: Config, profile: ModelProfile, size: TrainedSize, passes: int, ranks: int, machine: Machine
) -> Seconds:
    """The time of gathered weights and reduced gradients.

    Under ZeRO 3 each micro-batch gathers the weights for its forward and its backward pass and reduces the gradients;
    under ZeRO 2 it reduces them. Else each optimizer step does, and under ZeRO 1 and 2 it gathers the new weights.
    A teacher's weights are gathered for its forward pass under ZeRO 3.
    """
    stage, updates = config.learner.zero_stage, config.algorithm.updates_per_step
    gradients = FLOAT32_BYTES * size.num_trained
    if stage >= _DIVIDED_WEIGHTS:
        gathered = _BACKWARD_PASSES * gathered_bytes(config, profile)
        gathered += gathered_bytes(config, profile.teacher) if profile.teacher is not None else 0
        amount = passes * (gathered + gradients)
    elif stage >= _DIVIDED_GRADIENTS:
        amount = passes * gradients + updates * gradients
    else:
        amount = updates * 2 * gradients
    return _collective(amount, ranks, machine)


def _exchanged_heads(
    config: Config, profile: ModelProfile, lengths: RolloutLengths, ranks: int, machine: Machine
) -> Seconds:
    """The time in which ranks that share a line exchange positions for heads (learner/ranks/sequence_ranks.py).

    Queries, keys, values and the attention's output go to the other ranks in the forward pass, and again in its
    repetition under gradient checkpointing. In the backward pass their gradients go back.
    """
    shared, algorithm = config.learner.sequence_ranks, config.algorithm
    if shared == 1:
        return Seconds(0.0, 0.0)
    extra = (algorithm.old_logprobs == "recompute") + bool(algorithm.needs_reference)
    passes = (2 + config.learner.gradient_checkpointing) * algorithm.ppo_epochs + extra
    a_token = passes * _heads_of_token(profile, shared)
    a_token += _heads_of_token(profile.teacher, shared) if profile.teacher is not None else 0
    tokens = algorithm.num_rollouts * (lengths.prompt + lengths.mean()) / ranks
    return _collective(tokens * a_token * DTYPE_BYTES[config.learner.dtype], shared, machine)


def _heads_of_token(profile: ModelProfile, shared: int) -> float:
    """Elements of queries, keys, values and the attention's output that one token of a shared line has."""
    return 2 * sum(profile.flops.attention.values()) + profile.num_kv * max(1, shared / profile.num_kv_heads)


def _host_copies(config: Config, size: TrainedSize, passes: int, ranks: int, machine: Machine) -> Seconds:
    """The time of copies between card and host under offload.

    A rank adds its part of each micro-batch's gradients to the sum in host memory, which comes to the card and goes
    back (DeepSpeed 0.19.8, stage3.py, partition_grads). With all offloaded, its part of the weights comes twice.
    """
    if config.learner.offload == "none":
        return Seconds(0.0, 0.0)
    copied = 2 * size.num_trained + (_BACKWARD_PASSES * size.num_parameters if config.learner.offload == "all" else 0)
    return seconds(passes * FLOAT32_BYTES * copied / ranks, machine.rates["to_host_bytes_s"])


def gathered_bytes(config: Config, profile: ModelProfile) -> int:
    """Bytes of a whole model as the ranks gather it for a pass under ZeRO 3.

    Linear layers and experts come in the dtype of the products, other weights in float32.
    """
    in_float32 = profile.num_parameters - profile.num_rounded
    return DTYPE_BYTES[config.learner.dtype] * profile.num_rounded + FLOAT32_BYTES * in_float32


def _optimizer(config: Config, size: TrainedSize, ranks: int, machine: Machine) -> Seconds:
    part = size.num_trained / (ranks if config.learner.zero_stage else 1) * FLOAT32_BYTES
    part *= config.algorithm.updates_per_step
    if config.learner.offload == "none":
        return seconds(ADAM_TOUCHES * part, machine.rates["optimizer_bytes_share"], machine.card.memory_bytes_s)
    # Gradients to the host and weights back; there AdamW takes about the time of three more such copies.
    return seconds(5 * part, machine.rates["to_host_bytes_s"])


@dataclass(frozen=True)
class GenerationTimes:
    """Sampling on all generators.

    Attributes:
        concurrency: Rollouts that one generator samples at a time: as many as its cache holds and
            `generation.max_rollouts` allows.
        token: Seconds from one token of a rollout to its next.
        all: Seconds of all generators for the tokens of one step, prompts included.
    """

    concurrency: int
    token: Seconds
    all: Seconds


def generation_times(
    config: Config, profile: ModelProfile, lengths: RolloutLengths, replicas: int, share: float, machine: Machine
) -> GenerationTimes:
    """The times of so many generators that take this share of each of their cards.

    A pass reads every weight once and the cache of every rollout, and multiplies by every weight once for each. Beside
    that it takes a time of its own.
    """
    parallel = parallel_cards(config)
    memory = generator_memory(config, profile, machine.memory_bytes, share=share, tensor_parallel=parallel)
    kept = lengths.prompt + lengths.mean()
    rollouts = config.algorithm.num_rollouts
    concurrency = max(1, min(config.generation.max_rollouts, int(memory.tokens / kept), -(-rollouts // replicas)))
    read = policy_bytes(config, profile.num_parameters) / parallel
    read += concurrency * kept * kv_bytes(config, profile, parallel)
    card, rates = machine.card, machine.rates
    reading = seconds(read, rates["decode_bytes_share"], card.memory_bytes_s)
    flops = profile.flops.forward(round(kept), 1) - profile.flops.forward(round(kept) - 1, 0)
    products = seconds(flops * concurrency / parallel, rates["prefill_flops_share"], card.flops)
    token = Seconds(max(reading.low, products.low), max(reading.high, products.high))
    token += seconds(1, rates["decode_passes_s"])
    token += _sums_of_cards(config, profile, concurrency, machine)
    prompts = profile.flops.forward(round(lengths.prompt), 0) * config.algorithm.rollout_batch_size
    prefill = seconds(prompts / (parallel * replicas), rates["prefill_flops_share"], card.flops)
    return GenerationTimes(concurrency, token, token * (rollouts * lengths.mean() / (concurrency * replicas)) + prefill)


def _sums_of_cards(config: Config, profile: ModelProfile, num_tokens: int, machine: Machine) -> Seconds:
    """The time in which the cards of a generator add up what they computed for so many tokens, twice a layer."""
    parallel, num_sums = parallel_cards(config), 2 * profile.num_layers
    if parallel == 1:
        return Seconds(0.0, 0.0)
    # Each sum is a reduced part and a gathered whole.
    num_bytes = 2 * num_sums * num_tokens * profile.width * DTYPE_BYTES[config.generation.dtype]
    return seconds(num_sums, machine.rates["small_sums_s"]) + _collective(num_bytes, parallel, machine)


def parallel_cards(config: Config) -> int:
    """Cards of one generator."""
    return int(config.generation.engine.get("tensor_parallel_size", 1))


@dataclass(frozen=True)
class UpdateTimes:
    """A weight update to every generator.

    Attributes:
        sent_bytes: Over the network: (changes at the lowest share, at the highest share, whole policies).
        make: The copy to host memory, which the learner waits for at worst.
        pack: The search for changes, once.
        send: Changes to all generators.
        stage: Copy, changes and digest at a generator, while it samples.
        load: The engine's pause.
    """

    sent_bytes: tuple[float, float, float]
    make: Seconds
    pack: Seconds
    send: Seconds
    stage: Seconds
    load: Seconds

    @property
    def all(self) -> Seconds:
        """From the end of training until the last generator serves the version."""
        return self.make + self.pack + self.send + self.stage + self.load


def update_times(config: Config, profile: ModelProfile, replicas: int, machine: Machine) -> UpdateTimes:
    """The time of a version to so many generators, by changes to the version before."""
    policy, rates = policy_bytes(config, profile.num_parameters), machine.rates
    changed = (CHANGED_SHARE.low * policy * replicas, CHANGED_SHARE.high * policy * replicas)
    wire = rates["wire_bytes_s"]
    return UpdateTimes(
        sent_bytes=(*changed, policy * replicas),
        make=seconds(policy, rates["to_host_bytes_s"]),
        pack=seconds(policy, rates["pack_bytes_s"], _PACKING),
        send=Seconds(changed[0] / wire.high, changed[1] / wire.low),
        stage=seconds(policy, rates["stage_bytes_s"]),
        load=seconds(policy / parallel_cards(config), rates["load_bytes_s"]),
    )


def shift_times(rank: RankMemory, machine: Machine) -> Seconds:
    """The time in which shared cards change hands once each way: a rank's states go to host memory and back."""
    return seconds(2 * rank.states, machine.rates["to_host_bytes_s"])
