"""Advice on the seconds of a step and of a weight update, as ranges, from a model's counts and the rates of a GPU.

Nothing here chooses a configuration. Exchange between GPUs and between hosts is not counted: none was measured.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from gspo.cli.plan.choice import Choice, trained_size_of
from gspo.cli.plan.rates import Rate
from gspo.cli.plan.rollout_lengths import RolloutLengths
from gspo.cli.plan.staleness import SteadyState, steady_state
from gspo.common.config.schema import Config
from gspo.common.host.gpu_kinds import GpuKind
from gspo.common.planning.memory import FLOAT32_BYTES, kv_bytes, policy_bytes
from gspo.common.planning.model_profile import ModelProfile

# Measured on a CPU at a learning rate of 1e-6 to 1e-5 (docs/benchmarks.md): packed changes, of all bytes.
CHANGED_SHARE = Rate(0.023, 0.091, "packed changes at learning rates of 1e-6 to 1e-5, 2026-11-22")
# The threads that pack changes, at most (learner/push/weight_updates.py).
_PACKING = 4


@dataclass(frozen=True)
class SecondsRange:
    """A range of time: `low` at the fast end of the rates, `high` at the slow end."""

    low: float
    high: float

    def __add__(self, other: SecondsRange) -> SecondsRange:
        return SecondsRange(self.low + other.low, self.high + other.high)

    def __mul__(self, factor: float) -> SecondsRange:
        return SecondsRange(self.low * factor, self.high * factor)


def seconds(amount: float, rate: Rate, factor: float = 1.0) -> SecondsRange:
    """The time for an amount at `rate * factor` a second."""
    return SecondsRange(amount / (rate.high * factor), amount / (rate.low * factor))


@dataclass(frozen=True)
class PlannedTimes:
    """Seconds of a choice.

    Attributes:
        products: Forward and backward passes of every token on all ranks, and the optimizer.
        offload: Gradients of each micro-batch, and weights, between GPU and host; 0 without offload.
        shift: States of shared GPUs to host memory and back.
        concurrency: Rollouts that a generator samples at a time: as many as its cache and
            `generation.max_rollouts` allow.
        token: From one token of a rollout to its next.
        generation: All generators for the tokens of one step, prompts included.
        make: The copy of a version to host memory, which the learner waits for at worst.
        send: The search for changes, their way to all generators, and the new policy there, while they sample.
        load: The pause of an engine.
        sent_bytes: Bytes of an update to all hosts of generators: (changes at the lowest share, at the highest, whole
            policies).
        fast, slow: The run at the fast and at the slow end of all rates.
    """

    products: SecondsRange
    offload: SecondsRange
    shift: SecondsRange
    concurrency: int
    token: SecondsRange
    generation: SecondsRange
    make: SecondsRange
    send: SecondsRange
    load: SecondsRange
    sent_bytes: tuple[float, float, float]
    fast: SteadyState
    slow: SteadyState

    @property
    def update(self) -> SecondsRange:
        """From the end of training until the last generator serves the version."""
        return self.make + self.send + self.load


def times_of(
    choice: Choice,
    profile: ModelProfile,
    lengths: RolloutLengths,
    gpu: GpuKind,
    rates: Mapping[str, Rate],
    rank_cores: float = math.inf,
) -> PlannedTimes:
    """The seconds of a choice.

    Args:
        rank_cores: Processor cores that a rank has for itself.
    """
    config, policy = choice.config, policy_bytes(choice.config, profile.num_parameters)
    share = rates["mixture_flops_share" if profile.is_mixture else "train_flops_share"]
    products = seconds(training_flops(config, profile, lengths), share, gpu.flops * choice.ranks)
    offload, shift = _host_copies(choice, profile, lengths, rates), SecondsRange(0.0, 0.0)
    if config.placement == "shared":
        shift = seconds(2 * choice.rank.states, rates["to_host_bytes_s"])
    concurrency, token, generation = _sampling(choice, profile, lengths, gpu, rates)
    low, high = (share * policy * choice.generator_hosts for share in (CHANGED_SHARE.low, CHANGED_SHARE.high))
    # Each rank copies and packs the layers that it owns.
    own = policy / choice.ranks
    threads = min(_PACKING, max(1.0, rank_cores))
    send = seconds(own, rates["pack_bytes_s"], threads) + seconds(policy, rates["stage_bytes_s"])
    send += SecondsRange(low / rates["wire_bytes_s"].high, high / rates["wire_bytes_s"].low)
    make, load = seconds(own, rates["to_host_bytes_s"]), seconds(policy / choice.parallel, rates["load_bytes_s"])
    training = products + offload
    sampling = generation
    if choice.on_same_gpus and config.staleness.max_lag:  # without a lag the two alternate in any case
        sampling = sampling + training
    fast, slow = (
        steady_state(
            config,
            lengths,
            token_s=getattr(token, end),
            generation_s=getattr(sampling, end),
            learner_s=getattr(training + make + shift, end),
            update_s=getattr(send + load, end),
            window=end == "high",
        )
        for end in ("low", "high")
    )
    sent = (low, high, policy * choice.generator_hosts)
    return PlannedTimes(products, offload, shift, concurrency, token, generation, make, send, load, sent, fast, slow)


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


def _host_copies(
    choice: Choice, profile: ModelProfile, lengths: RolloutLengths, rates: Mapping[str, Rate]
) -> SecondsRange:
    """The time of copies between GPU and host under offload.

    A rank adds its part of each micro-batch's gradients to the sum in host memory, which comes to the GPU and goes
    back (DeepSpeed 0.19.8, stage3.py, partition_grads). With all offloaded, its part of the weights comes twice. AdamW
    on the host takes about as long as five such copies of a step's weights.
    """
    config, algorithm = choice.config, choice.config.algorithm
    if config.learner.offload == "none":
        return SecondsRange(0.0, 0.0)
    tokens = algorithm.num_rollouts * (lengths.prompt + lengths.mean()) * algorithm.ppo_epochs
    passes = tokens * config.learner.sequence_ranks / (choice.ranks * config.micro_batch_tokens)
    size, passes = trained_size_of(config, profile), max(algorithm.updates_per_step, passes)
    copied = passes * (2 * size.num_trained + (2 * size.num_parameters if config.learner.offload == "all" else 0))
    copied += 5 * algorithm.updates_per_step * size.num_trained
    return seconds(FLOAT32_BYTES * copied / choice.ranks, rates["to_host_bytes_s"])


def _sampling(
    choice: Choice, profile: ModelProfile, lengths: RolloutLengths, gpu: GpuKind, rates: Mapping[str, Rate]
) -> tuple[int, SecondsRange, SecondsRange]:
    """(rollouts of a generator at a time, seconds of a token, seconds of all generators for a step).

    A pass reads every weight once and the cache of every rollout, and multiplies by every weight once for each. Beside
    that it takes a time of its own.
    """
    config, parallel = choice.config, choice.parallel
    kept, rollouts = lengths.prompt + lengths.mean(), config.algorithm.num_rollouts
    most = min(config.generation.max_rollouts, -(-rollouts // choice.replicas))
    concurrency = max(1, min(most, int(choice.generator.tokens / kept)))
    read = policy_bytes(config, profile.num_parameters) / parallel
    read += concurrency * kept * kv_bytes(config, profile, parallel)
    reading = seconds(read, rates["decode_bytes_share"], gpu.memory_bytes_s)
    flops = profile.flops.forward(round(kept), 1) - profile.flops.forward(round(kept) - 1, 0)
    products = seconds(flops * concurrency / parallel, rates["prefill_flops_share"], gpu.flops)
    token = SecondsRange(max(reading.low, products.low), max(reading.high, products.high))
    token += seconds(1, rates["decode_passes_s"])
    prompts = profile.flops.forward(round(lengths.prompt), 0) * config.algorithm.rollout_batch_size
    prefill = seconds(prompts / (parallel * choice.replicas), rates["prefill_flops_share"], gpu.flops)
    passes = rollouts * lengths.mean() / (concurrency * choice.replicas)
    return concurrency, token, token * passes + prefill
