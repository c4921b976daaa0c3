"""Chooses the GPUs of each side of a run and how the learner saves memory, by memory alone: the first choice that fits.

docs/scale.md states the rules. They look at no machine and read no file.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby
from math import floor
from operator import itemgetter
from typing import Any

from gspo.common.config.schema import Config
from gspo.common.host.machine import CACHE_ARGUMENT, PARALLEL_ARGUMENTS, SHARE_ARGUMENT, gpus_of_engine
from gspo.common.model.trained_parameters import TrainedSize
from gspo.common.planning.host_memory import HostMemory, fullest_host, generators_a_host
from gspo.common.planning.longest import (
    engine_share,
    enough_tokens,
    fitting_micro_batch,
    kept_by_generators,
    needs_checkpointing,
    share_beside,
)
from gspo.common.planning.memory import (
    GeneratorMemory,
    RankMemory,
    generator_memory,
    kv_bytes,
    rank_memory,
    reserved_bytes,
)
from gspo.common.planning.model_profile import ModelProfile

# The least share of a GPU that an engine is tried with.
_LEAST_SHARE = 0.05
_PARALLEL = (1, 2, 4, 8)
_MIB = 1 << 20
# Longest rollouts in the KV cache of a generator, below which it gets more GPUs: it would sample few at a time.
_CACHED_ROLLOUTS = 8
# ZeRO stage and offload of a single rank and of several, in the order of the time that they cost.
_STAGES_ALONE = ((0, "none"), (2, "optimizer"), (3, "all"))
_STAGES = ((0, "none"), (1, "none"), (2, "none"), (3, "none"), (2, "optimizer"), (3, "optimizer"), (3, "all"))
_HOST = "a host"


@dataclass(frozen=True)
class PlannedMachine:
    """The GPUs and the hosts of a run.

    Attributes:
        gpu_bytes: Memory of each GPU.
        host_bytes: Memory of each host beside that of its GPUs.
        used_bytes: By other programs, on each GPU.
    """

    num_gpus: int
    gpu_bytes: float
    gpus_per_host: int
    host_bytes: float
    used_bytes: float = 0.0


@dataclass(frozen=True)
class Shortage:
    """A place without enough memory.

    Attributes:
        place: "a rank's GPU", "a generator's GPU" or "a host".
        parts: Name -> bytes that it needs.
    """

    place: str
    parts: Mapping[str, float]
    has_bytes: float

    @property
    def missing_bytes(self) -> float:
        """Bytes that it needs beyond those that it has."""
        return sum(self.parts.values()) - self.has_bytes


@dataclass(frozen=True)
class Choice:
    """A configuration with its memory.

    Attributes:
        config: With every key that was chosen.
        on_same_gpus: Whether generators and ranks use the same GPUs, in shifts or at a time.
        rank: Memory of each rank.
        generator: Memory of a generator on each of its GPUs.
        host: Memory of the fullest host.
        generator_hosts: Hosts with generators, each of which takes a policy once.
        shortages: Every place without enough memory; none if the choice fits.
    """

    config: Config
    on_same_gpus: bool
    rank: RankMemory
    generator: GeneratorMemory
    host: HostMemory
    generator_hosts: int
    shortages: tuple[Shortage, ...]

    @property
    def ranks(self) -> int:
        """Ranks of the learner, on all hosts."""
        return self.config.learner.ranks

    @property
    def replicas(self) -> int:
        return self.config.generation.replicas

    @property
    def parallel(self) -> int:
        """GPUs of each generator."""
        return gpus_of_engine(self.config.generation.engine)


def first_fitting(choices: Iterable[Choice]) -> Choice | None:
    """The first choice that fits, else the nearest: bytes that GPUs lack count before those of hosts."""
    nearest: Choice | None = None
    for choice in choices:
        if not choice.shortages:
            return choice
        if nearest is None or _lack(choice) < _lack(nearest):
            nearest = choice
    return nearest


def _lack(choice: Choice) -> tuple[float, float]:
    """Bytes that GPUs lack, and those that hosts lack."""
    on_gpus, on_hosts = (
        sum(short.missing_bytes for short in choice.shortages if (short.place == _HOST) is on_host)
        for on_host in (False, True)
    )
    return on_gpus, on_hosts


def ways_to_save(num_gpus: int) -> list[dict[str, Any]]:
    """Keys of `learner`, from the fastest way to save memory to the one that saves the most."""
    stages = _STAGES if num_gpus > 1 else _STAGES_ALONE
    return [{"zero_stage": stage, "offload": offload} for stage, offload in stages]


def plan_choice(config: Config, profile: ModelProfile, machine: PlannedMachine) -> Choice | None:
    """The choice of a plan, with the largest micro-batch that fits: None if no number of ranks divides the rollouts.

    Beside the split it chooses shifts on the same GPUs (`placement: shared`) under a max_lag of 0. Ranks share lines
    before they offload, since GPUs of a host exchange faster than they copy to its memory.
    """
    keys = {"dtype": "bfloat16", "gradient_checkpointing": True, "micro_batch_tokens": None}
    on_gpus = config.with_keys(learner=keys, generation={"dtype": "bfloat16"})
    savings = [
        {**way, "sequence_ranks": shared, "torch_compile": profile.compiles_under(way["zero_stage"])}
        for offloads in (False, True)
        for shared in _PARALLEL
        if shared <= machine.gpus_per_host and profile.can_share(shared)
        for way in ways_to_save(machine.num_gpus)
        if (way["offload"] != "none") is offloads
    ]
    size = trained_size_of(config, profile)
    placements = [on_gpus]
    if not config.staleness.max_lag and machine.num_gpus <= machine.gpus_per_host:
        placements.insert(0, on_gpus.model_copy(update={"placement": "shared"}))
    every = chain.from_iterable(choices(placed, profile, size, machine, savings) for placed in placements)
    choice = first_fitting(every)
    return choice and _filled(choice, profile, size, machine)


def _filled(choice: Choice, profile: ModelProfile, size: TrainedSize, machine: PlannedMachine) -> Choice:
    """The choice with the largest useful micro-batch beside its generator, and with activations kept if they fit."""
    kept = kept_by_generators(choice.config, machine.gpu_bytes, int(choice.on_same_gpus))
    free = machine.gpu_bytes - kept - reserved_bytes(machine.gpu_bytes)
    checkpoints = needs_checkpointing(choice.config, profile, size, choice.ranks, free)
    filled = choice.config.with_keys(learner={"gradient_checkpointing": checkpoints})
    tokens = fitting_micro_batch(filled, profile, size, choice.ranks, free)
    filled = filled.with_keys(learner={"micro_batch_tokens": tokens})
    return _with_memory(filled, profile, size, machine)


def choices(
    config: Config,
    profile: ModelProfile,
    size: TrainedSize,
    machine: PlannedMachine,
    savings: Sequence[Mapping[str, Any]],
    *,
    replicas: int | None = None,
    ranks: int | None = None,
) -> Iterator[Choice]:
    """Every choice, in the order of the rules: more ranks, then larger generators, then the next savings.

    Args:
        savings: Keys of `learner`, the fastest first.
        replicas, ranks: Numbers of generators and of ranks that stay. GPUs of a generator stay if they are configured.
    """
    ways = [config.with_keys(learner=keys) for keys in savings]
    for _, equal in groupby(ways, key=lambda way: (way.learner.sequence_ranks, way.learner.offload == "none")):
        saving = list(equal)
        splits = [
            (number, parallel)
            for parallel in _parallels(config, profile, machine)
            for number in ([ranks] if ranks else _numbers_of_ranks(saving[0], machine, parallel, replicas))
        ]
        for number, parallel in splits if replicas else sorted(splits, key=itemgetter(0)):
            rest = machine.num_gpus if _on_same_gpus(config, machine) else machine.num_gpus - number
            generators = replicas or max(1, rest // parallel)
            for chosen in saving:
                split = _split(chosen, number, generators, parallel)
                beside = _beside_learner(split, profile, size, machine)
                yield _with_memory(beside, profile, size, machine)


def _on_same_gpus(config: Config, machine: PlannedMachine) -> bool:
    return config.placement == "shared" or machine.num_gpus == 1


def _parallels(config: Config, profile: ModelProfile, machine: PlannedMachine) -> list[int]:
    """GPUs of a generator: the fewest with a cache for eight longest rollouts, then more, then fewer."""
    engine, num_gpus = config.generation.engine, machine.num_gpus
    if any(name in engine for name in PARALLEL_ARGUMENTS):
        return [gpus_of_engine(engine)]
    most = num_gpus if _on_same_gpus(config, machine) else num_gpus - 1
    fitting = [
        parallel
        for parallel in _PARALLEL
        if parallel <= min(most, machine.gpus_per_host)
        and not profile.num_heads % parallel
        and not (config.placement == "shared" and num_gpus % parallel)
    ]

    def is_small(parallel: int) -> bool:
        share = engine_share(config)
        memory = generator_memory(config, profile, machine.gpu_bytes, share=share, tensor_parallel=parallel)
        return memory.tokens < _CACHED_ROLLOUTS * config.algorithm.longest_branch

    return sorted(fitting, key=is_small)


def _numbers_of_ranks(config: Config, machine: PlannedMachine, parallel: int, replicas: int | None) -> list[int]:
    """Half of the GPUs, rounded down to a number that divides the rollouts, then more. Several hosts train as a whole.

    Beside a given number of generators the ranks have the rest.
    """
    num_gpus, unit = machine.num_gpus, machine.gpus_per_host if machine.num_gpus > machine.gpus_per_host else 1
    if _on_same_gpus(config, machine):
        return [num_gpus] if config.divides_over_ranks(num_gpus) else []
    most = num_gpus - (replicas or 1) * parallel
    numbers = [number for number in range(unit, most + 1, unit) if config.divides_over_ranks(number)]
    if replicas:
        return numbers[-1:]
    return numbers[max(0, bisect_right(numbers, num_gpus // 2) - 1) :]


def _split(config: Config, ranks: int, replicas: int, parallel: int) -> Config:
    engine = config.generation.engine
    if parallel > 1 and not any(name in engine for name in PARALLEL_ARGUMENTS):
        engine = {**engine, PARALLEL_ARGUMENTS[0]: parallel}
    return config.with_keys(
        learner={"ranks": ranks},
        generation={"replicas": replicas, "engine": engine},
    )


def _beside_learner(config: Config, profile: ModelProfile, size: TrainedSize, machine: PlannedMachine) -> Config:
    """On a single GPU: an engine with the share that the learner leaves, and with the bytes of its cache.

    Without these bytes vLLM would count the learner's memory as its own. The cache has no more than all its rollouts
    fill at their longest: the learner's micro-batch makes better use of the rest.
    """
    engine, gpu_bytes = config.generation.engine, machine.gpu_bytes
    if machine.num_gpus > 1 or config.placement == "shared" or config.generation.replicas > 1:
        return config
    share = engine_share(config)
    if SHARE_ARGUMENT not in engine:
        share = _share_beside_learner(config, profile, size, machine, share)
    cache = generator_memory(config, profile, gpu_bytes, share=share, tensor_parallel=1).kv_cache
    beside = {SHARE_ARGUMENT: share, CACHE_ARGUMENT: int(cache) // _MIB * _MIB}
    return config.with_keys(generation={"engine": {**beside, **engine}})


def _share_beside_learner(
    config: Config, profile: ModelProfile, size: TrainedSize, machine: PlannedMachine, most: float
) -> float:
    """The share that a learner with a good micro-batch leaves; with the smallest one if few rollouts fit beside it."""
    longest, gpu_bytes = config.algorithm.longest_branch, machine.gpu_bytes

    def left_by(learner: Config) -> float:
        used = rank_memory(learner, size, 1, profile=profile).peak + machine.used_bytes
        return max(_LEAST_SHARE, min(most, share_beside(used, gpu_bytes)))

    def memory(share: float) -> GeneratorMemory:
        return generator_memory(config, profile, gpu_bytes, share=share, tensor_parallel=1)

    tokens = config.learner.micro_batch_tokens or enough_tokens(config, 1)
    share = left_by(config.with_keys(learner={"micro_batch_tokens": tokens}))
    if memory(share).tokens < _CACHED_ROLLOUTS * longest:
        share = left_by(config)
    unused = memory(share).kv_cache - config.generation.max_rollouts * longest * kv_bytes(config, profile)
    return max(_LEAST_SHARE, round(share - max(0, floor(100 * unused / gpu_bytes)) / 100, 2))


def _with_memory(config: Config, profile: ModelProfile, size: TrainedSize, machine: PlannedMachine) -> Choice:
    """The choice of a configuration, with the memory that it needs."""
    parallel, on_same_gpus = gpus_of_engine(config.generation.engine), _on_same_gpus(config, machine)
    share, total = engine_share(config), machine.gpu_bytes
    ranks = config.learner.ranks
    rank = rank_memory(config, size, ranks, profile=profile)
    generator = generator_memory(config, profile, total, share=share, tensor_parallel=parallel)
    gpus = (machine.num_gpus, machine.gpus_per_host)
    host = fullest_host(config, size, ranks, *gpus)
    generator_hosts = -(-config.generation.replicas // generators_a_host(config, *gpus))
    kept = kept_by_generators(config, total, int(on_same_gpus))
    cache = config.algorithm.longest_branch * kv_bytes(config, profile, parallel)
    needs = (
        Shortage(
            "a rank's GPU",
            {**rank.parts_at_peak(), "generator": kept, "CUDA and pieces": reserved_bytes(total)},
            total,
        ),
        Shortage(
            "a generator's GPU",
            {"weights": generator.weights, "activations": generator.working, "cache of the longest rollout": cache},
            share * total,
        ),
        Shortage(_HOST, vars(host), machine.host_bytes),
    )
    shortages = tuple(need for need in needs if need.missing_bytes > 0)
    return Choice(config, on_same_gpus, rank, generator, host, generator_hosts, shortages)


def trained_size_of(config: Config, profile: ModelProfile) -> TrainedSize:
    """The size of a profiled model and its teacher, with files in bfloat16; all linear layers have adapters (LoRA)."""
    rank, teacher = config.learner.lora.rank, profile.teacher
    num_trained = rank * profile.num_adapted if rank else profile.num_parameters
    num_bfloat16 = 0 if profile.is_mixture else profile.num_rounded
    size = TrainedSize(profile.num_parameters, num_trained, profile.num_rounded, num_bfloat16)
    if teacher is None:
        return size
    return replace(size, num_teacher=teacher.num_parameters, num_teacher_rounded=teacher.num_rounded)
