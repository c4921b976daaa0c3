"""Searches the configurations of a model on some cards for the one that fits and has the shortest step.

Pure functions: they read no file and look at no machine.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from math import log, sqrt

from gspo.cli.plan.rollout_lengths import RolloutLengths
from gspo.cli.plan.staleness import SteadyState, steady_state
from gspo.cli.plan.times import (
    GenerationTimes,
    LearnerTimes,
    Machine,
    Seconds,
    UpdateTimes,
    generation_times,
    learner_times,
    parallel_cards,
    shift_times,
    update_times,
)
from gspo.common.config.schema import Config
from gspo.common.host.machine import SHARE_ARGUMENT
from gspo.common.model.trained_parameters import TrainedSize
from gspo.common.planning.host_memory import HostMemory, fullest_host
from gspo.common.planning.longest import engine_share, kept_by_generators, share_beside
from gspo.common.planning.memory import (
    GeneratorMemory,
    RankMemory,
    generator_memory,
    kv_bytes,
    rank_memory,
    reserved_bytes,
)
from gspo.common.planning.model_profile import ModelProfile

# The most generators of a configuration, and the least share of a card that an engine is tried with.
_MOST_REPLICAS, _LEAST_SHARE = 64, 0.05
_PARALLEL = (1, 2, 4, 8)
# ZeRO stage and offload of a single rank and of several, in the order of the time that they cost.
STAGES_ALONE = ((0, "none"), (2, "optimizer"), (3, "all"))
STAGES = ((0, "none"), (1, "none"), (2, "none"), (3, "none"), (2, "optimizer"), (3, "optimizer"), (3, "all"))
# Micro-batches as multiples of the longest rollout, and tokens that no micro-batch has more of: larger ones save
# little.
_MULTIPLES, _MOST_TOKENS = (8, 4, 2, 1), 65_536
_HOST = "a host"
_TENSOR_PARALLEL = "tensor_parallel_size"


@dataclass(frozen=True)
class Plan:
    """A configuration with its costs.

    Attributes:
        config: With every key that the plan chose.
        ranks: Of the learner; `config.learner.ranks` is 0 if they are on several hosts.
        on_same_cards: Whether generators and ranks use the same cards, in shifts or at a time.
        rank: Memory of each rank.
        generator: Memory of a generator on each of its cards.
        host: Memory of the fullest host.
        shift: Seconds of a step in which shared cards change hands.
        fast, slow: The run at the fast and at the slow end of all rates.
    """

    config: Config
    ranks: int
    on_same_cards: bool
    rank: RankMemory
    generator: GeneratorMemory
    host: HostMemory
    learner: LearnerTimes
    generation: GenerationTimes
    update: UpdateTimes
    shift: Seconds
    fast: SteadyState
    slow: SteadyState

    @property
    def replicas(self) -> int:
        """Generators."""
        return self.config.generation.replicas

    @property
    def num_cards(self) -> int:
        """Cards of all processes, a shared one counted once."""
        used = self.replicas * parallel_cards(self.config)
        return max(used, self.ranks) if self.on_same_cards else used + self.ranks


@dataclass(frozen=True)
class Shortfall:
    """The nearest of the configurations that do not fit.

    Attributes:
        place: Of the missing memory: "a rank's card", "a generator's card" or "a host".
        parts: Name -> bytes that it needs.
        has_bytes: Of it.
        config: With the keys that come nearest.
    """

    place: str
    parts: Mapping[str, float]
    has_bytes: float
    config: Config
    ranks: int

    @property
    def missing_bytes(self) -> float:
        """That it needs beyond what it has."""
        return sum(self.parts.values()) - self.has_bytes


def split_cards(
    config: Config,
    profile: ModelProfile,
    num_cards: int,
    machine: Machine,
    *,
    replicas: int | None = None,
    ranks: int | None = None,
) -> list[Plan]:
    """The splits of so many cards of one host that fit, with all other keys of the configuration as they are.

    Args:
        replicas, ranks: Numbers of generators and of ranks that stay; each leaves the other the rest of the cards.
    """
    parallel, lengths = parallel_cards(config), RolloutLengths.of(config)
    plans = []
    for number in _possible_ranks(config, num_cards, parallel, replicas) if ranks is None else (ranks,):
        generators = replicas or max(1, (num_cards - number) // parallel)
        chosen = config.with_keys(learner={"ranks": number}, generation={"replicas": generators})
        if chosen.divides_over_ranks(number):
            plans.append(costs(chosen, profile, num_cards, number, lengths, machine))
    return [plan for plan in plans if isinstance(plan, Plan)]


def shortest(plans: Iterable[Plan]) -> Plan:
    """The plan with the shortest step; of those equal to a hundredth the first."""
    return min(plans, key=_hundredths)


def _possible_ranks(config: Config, num_cards: int, parallel: int, replicas: int | None) -> Iterable[int]:
    """Numbers of ranks beside the generators: on one card one; beside a given number of generators the most."""
    if num_cards == 1:
        return (1,)
    if replicas is not None:
        return (dividing_ranks(config, num_cards - replicas * parallel),)
    return range(1, num_cards - parallel + 1)


def dividing_ranks(config: Config, most: int) -> int:
    """The largest number of ranks, up to `most` and at least one, that have equal parts of a mini-batch."""
    return next((number for number in range(most, 0, -1) if config.divides_over_ranks(number)), max(1, most))


def search(
    config: Config, profile: ModelProfile, num_cards: int, lengths: RolloutLengths, machine: Machine
) -> Plan | Shortfall | None:
    """The plan with the shortest step on so many cards; if nothing fits, the nearest.

    None if no number of ranks divides the rollouts of an optimizer step.

    It chooses ranks, generators and their cards, ZeRO stage, offload, micro-batch and sequence ranks; with a max_lag of
    0 also cards in shifts (`placement: shared`). Gradient checkpointing and bfloat16 are on.
    """
    best: Plan | None = None
    nearest: Shortfall | None = None
    for choices, ranks in _candidates(config, profile, num_cards, machine):
        for equal in choices:
            costed = [costs(chosen, profile, num_cards, ranks, lengths, machine) for chosen in equal]
            fitting = [plan for plan in costed if isinstance(plan, Plan)]
            best = min([*fitting, *([best] if best else [])], key=_order, default=None)
            if fitting:
                break
            shortfalls = [shortfall for shortfall in costed if isinstance(shortfall, Shortfall)]
            nearest = min([*shortfalls, *([nearest] if nearest else [])], key=_missing, default=None)
    return best or nearest


def _order(plan: Plan) -> tuple[int, float]:
    """Plans by their step, to a hundredth; of equal ones first that whose processes have less work."""
    work = plan.learner.all + plan.generation.all
    return _hundredths(plan), work.low + work.high


def _hundredths(plan: Plan) -> int:
    """The logarithm of its step, in hundredths."""
    return round(100 * log(_step_s(plan)))


def _missing(shortfall: Shortfall) -> tuple[bool, float]:
    """Nearest is what the cards have memory for."""
    return shortfall.place != _HOST, shortfall.missing_bytes


def costs(
    config: Config, profile: ModelProfile, num_cards: int, ranks: int, lengths: RolloutLengths, machine: Machine
) -> Plan | Shortfall:
    """The plan of one configuration on so many cards, or what it lacks."""
    size, in_shifts = trained_size_of(config, profile), config.placement == "shared"
    on_same_cards = in_shifts or num_cards == 1
    share, replicas, parallel = engine_share(config), config.generation.replicas, parallel_cards(config)
    rank = rank_memory(config, size, ranks, profile=profile)
    generator = generator_memory(config, profile, machine.memory_bytes, share=share, tensor_parallel=parallel)
    host = fullest_host(config, size, ranks, num_cards, machine.cards_per_host)
    kept = kept_by_generators(config, machine.memory_bytes, int(on_same_cards))
    cache = config.algorithm.longest_branch * kv_bytes(config, profile, parallel)
    for place, parts, has_bytes in _needs(rank, kept, generator, cache, host, share, machine):
        if sum(parts.values()) > has_bytes:
            return Shortfall(place, parts, has_bytes, config, ranks)
    learner = learner_times(config, profile, size, lengths, ranks, machine)
    generation = generation_times(config, profile, lengths, replicas, share, machine)
    update = update_times(config, profile, replicas, machine)
    shift = shift_times(rank, machine) if in_shifts else Seconds(0.0, 0.0)
    sampling = generation.all
    if on_same_cards and config.staleness.max_lag:  # without a lag the two alternate in any case
        sampling = sampling + learner.all
    fast, slow = (
        steady_state(
            config,
            lengths,
            token_s=getattr(generation.token, end),
            generation_s=getattr(sampling, end),
            learner_s=getattr(learner.all + update.make + shift, end),
            update_s=getattr(update.pack + update.send + update.stage + update.load, end),
            window=end == "high",
        )
        for end in ("low", "high")
    )
    return Plan(config, ranks, on_same_cards, rank, generator, host, learner, generation, update, shift, fast, slow)


def _needs(
    rank: RankMemory,
    kept: float,
    generator: GeneratorMemory,
    cache: float,
    host: HostMemory,
    share: float,
    machine: Machine,
) -> Iterator[tuple[str, Mapping[str, float], float]]:
    """(place, bytes that it needs by part, bytes that it has) of a rank's card, a generator's and the fullest host.

    Args:
        kept: Bytes that a generator keeps of a rank's card.
        cache: Bytes of the longest rollout's keys and values on each card.
        share: Of a card, for vLLM.
    """
    total = machine.memory_bytes
    parts = rank.parts_at_peak()
    yield "a rank's card", {**parts, "generator": kept, "CUDA and pieces": reserved_bytes(total)}, total
    parts = {"weights": generator.weights, "activations": generator.working, "cache of the longest rollout": cache}
    yield "a generator's card", parts, share * total
    yield _HOST, vars(host), machine.host_bytes


def trained_size_of(config: Config, profile: ModelProfile) -> TrainedSize:
    """The size of a profiled model and its teacher; adapters (LoRA) are those of all linear layers."""
    rank, teacher = config.learner.lora.rank, profile.teacher
    size = TrainedSize(profile.num_parameters, rank * profile.num_adapted if rank else profile.num_parameters)
    if teacher is None:
        return size
    return replace(size, num_teacher=teacher.num_parameters, num_teacher_rounded=teacher.num_rounded)


def _step_s(plan: Plan) -> float:
    return sqrt(plan.fast.step_s * plan.slow.step_s)


def _candidates(
    config: Config, profile: ModelProfile, num_cards: int, machine: Machine
) -> Iterator[tuple[Iterator[list[Config]], int]]:
    """For every split of the cards, and for shifts on all of them, the learner's choices and its ranks."""
    on_gpus = config.with_keys(
        learner={"dtype": "bfloat16", "gradient_checkpointing": True}, generation={"dtype": "bfloat16"}
    )
    if not config.staleness.max_lag and num_cards <= machine.cards_per_host:
        for parallel in _PARALLEL:
            if not num_cards % parallel and not profile.num_heads % parallel:
                chosen = _generators(on_gpus, parallel, num_cards // parallel)
                in_shifts = chosen.model_copy(update={"placement": "shared"})
                yield _learners(in_shifts, profile, num_cards, machine.cards_per_host), num_cards
    if num_cards == 1:
        yield _sharing(on_gpus, profile, machine), 1
        return
    for parallel in _PARALLEL:
        if parallel >= num_cards or parallel > machine.cards_per_host or profile.num_heads % parallel:
            continue
        for ranks in range(1, num_cards - parallel + 1):
            # Beyond one host the learner has whole ones.
            if num_cards > machine.cards_per_host and ranks % machine.cards_per_host:
                continue
            replicas = min(_MOST_REPLICAS, (num_cards - ranks) // parallel)
            chosen = _generators(on_gpus, parallel, replicas)
            yield _learners(chosen, profile, ranks, machine.cards_per_host), ranks


def _generators(config: Config, parallel: int, replicas: int) -> Config:
    """With so many generators, each on so many cards."""
    engine = {**config.generation.engine, **({_TENSOR_PARALLEL: parallel} if parallel > 1 else {})}
    return config.with_keys(generation={"replicas": replicas, "engine": engine})


def _sharing(config: Config, profile: ModelProfile, machine: Machine) -> Iterator[list[Config]]:
    """The choices for one card: the engine's share is what the learner leaves."""
    total = machine.memory_bytes
    for equal in _learners(config, profile, 1, machine.cards_per_host):
        sharing = []
        for chosen in equal:
            rank = rank_memory(chosen, trained_size_of(chosen, profile), 1, profile=profile)
            share = max(_LEAST_SHARE, share_beside(rank.peak, total))
            engine = {**chosen.generation.engine, SHARE_ARGUMENT: share}
            sharing.append(chosen.with_keys(generation={"replicas": 1, "engine": engine}))
        yield sharing


def _learners(config: Config, profile: ModelProfile, ranks: int, cards_per_host: int) -> Iterator[list[Config]]:
    """Lists of the learner's configurations: a later one is needed only if no earlier one fits."""
    longest = config.algorithm.longest_rollout
    sizes = [longest * multiple for multiple in _MULTIPLES if multiple == 1 or longest * multiple <= _MOST_TOKENS]
    stages = STAGES if ranks > 1 else STAGES_ALONE
    for shared in (1, 2, 4, 8):
        if shared > cards_per_host or ranks % shared or not profile.can_share(shared):
            continue
        equal = []
        for (stage, offload), tokens in product(stages, sizes):
            keys = {
                "ranks": ranks if ranks <= cards_per_host else 0,
                "zero_stage": stage,
                "torch_compile": profile.compiles_under(stage),
                "offload": offload,
                "sequence_ranks": shared,
                "micro_batch_tokens": tokens,
            }
            equal.append(config.with_keys(learner=keys))
        yield [chosen for chosen in equal if chosen.divides_over_ranks(ranks)]
