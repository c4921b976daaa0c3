"""Defaults that follow from a machine's cards and the model: their split, what saves memory, and what fills them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from gspo.cli.plan.rates import rates_of
from gspo.cli.plan.times import Machine, parallel_cards
from gspo.cli.processes.placement import place
from gspo.cli.processes.planned_memory import PlannedModel, free_for_ranks, rank_of, read_planned_model
from gspo.cli.processes.programs import process_names
from gspo.common.config.loading import key_value
from gspo.common.config.schema import Config
from gspo.common.errors import InputError
from gspo.common.host.compilers import missing_compiler
from gspo.common.host.gpu_kinds import GPU_KINDS
from gspo.common.host.machine import CACHE_ARGUMENT, PARALLEL_ARGUMENTS, SHARE_ARGUMENT, Gpu, free_memory
from gspo.common.planning.longest import engine_share, fitting_micro_batch, servable_bound, share_beside
from gspo.common.planning.memory import generator_memory
from gspo.common.planning.model_profile import ModelProfile
from gspo.common.streams.keys import SERVICES

REPLICAS, RANKS, MICRO_BATCH = "generation.replicas", "learner.ranks", "learner.micro_batch_tokens"
STAGE, OFFLOAD = "learner.zero_stage", "learner.offload"
ENGINE = "generation.engine"
# Engine arguments with such a default; the mapping itself is the user's.
ENGINE_ARGUMENTS = (PARALLEL_ARGUMENTS[0], SHARE_ARGUMENT, CACHE_ARGUMENT)
COMPILE = "learner.torch_compile"
COMPUTED = (REPLICAS, RANKS, MICRO_BATCH, STAGE, OFFLOAD, COMPILE)
_MIB = 1 << 20
# Of a card that rates.py does not list, the flop/s for each byte/s are taken from this one.
_USUAL_CARD = "NVIDIA H100 80GB HBM3"


def gpu_defaults(config: Config, left_out: Collection[str], gpus: Sequence[Gpu]) -> dict[str, Any]:
    """Values of COMPUTED and of engine arguments.

    Args:
        config: With the user's values, and the defaults of other keys.
        left_out: Keys that the user leaves to the device; all others stay.

    Returns:
        No values if the size of a card or of the model is not known, or if the user starts the learner.
    """
    sizes = [gpu.total_bytes for gpu in gpus if gpu.total_bytes is not None]
    if not gpus or len(sizes) < len(gpus) or not config.learner.ranks:
        return {}
    model = read_planned_model(config)
    if model is None or model.profile is None:
        return {}
    values: dict[str, Any] = {}
    # NCCL connects no slices of cards, so a divided card is shared out by its user.
    # Under `placement: shared` the split is of time, not of cards.
    if config.placement == "split" and not any("MIG" in gpu.name for gpu in gpus):
        values = _split(config, model, model.profile, left_out, gpus, float(min(sizes)))
    if COMPILE in left_out and COMPILE not in values:
        values[COMPILE] = _compiles(_with(config, values), model.profile)
    if MICRO_BATCH in left_out:
        values |= _micro_batch(_with(config, values), model, model.profile, gpus)
    return values


def _split(
    config: Config,
    model: PlannedModel,
    profile: ModelProfile,
    left_out: Collection[str],
    gpus: Sequence[Gpu],
    card_bytes: float,
) -> dict[str, Any]:
    """Generators, ranks, how they save memory, and the engine's arguments; what the user gives stays.

    Of all ways to save memory and of all splits that fit, those with the shortest step, as in `gspo plan`. If none
    fits, about half of the cards for each side: the start refuses them and names the missing memory.
    """
    from gspo.cli.plan.search import dividing_ranks, shortest, split_cards  # here: numpy, which only GPUs need

    num_cards, machine = len(gpus), _machine(gpus, card_bytes)
    replicas = None if REPLICAS in left_out else config.generation.replicas
    ranks = None if RANKS in left_out else config.learner.ranks
    plans = []
    for saving in _ways_to_save(config, left_out, num_cards):
        chosen = _with(config, saving)
        if COMPILE in left_out:
            chosen = _with(chosen, {COMPILE: _compiles(chosen, profile)})
        chosen = _with(chosen, _engine(chosen, model, profile, gpus, card_bytes))
        plans += split_cards(chosen, profile, num_cards, machine, replicas=replicas, ranks=ranks)
    if plans:
        chosen = shortest(plans).config
    else:
        chosen = _with(config, _engine(config, model, profile, gpus, card_bytes))
        parallel = parallel_cards(chosen)
        replicas = replicas or max(1, (num_cards - ranks if ranks else num_cards // 2) // parallel)
        ranks = ranks or dividing_ranks(config, num_cards - replicas * parallel)
        chosen = chosen.with_keys(generation={"replicas": replicas}, learner={"ranks": ranks})
    values = {key: key_value(chosen, key) for key in COMPUTED if key in left_out and key != MICRO_BATCH}
    return values | ({ENGINE: chosen.generation.engine} if chosen.generation.engine != config.generation.engine else {})


def _machine(gpus: Sequence[Gpu], card_bytes: float) -> Machine:
    """This machine; of a card that is not known, the rates follow from a usual one."""
    card = GPU_KINDS.get(gpus[0].product) or replace(
        GPU_KINDS[_USUAL_CARD], name=gpus[0].product, memory_bytes=card_bytes
    )
    return Machine(card, card_bytes, rates_of(card), cards_per_host=len(gpus), host_bytes=free_memory())


def _ways_to_save(config: Config, left_out: Collection[str], num_cards: int) -> list[dict[str, Any]]:
    """ZeRO stages and offload, the fastest first; only the user's where they or other keys of DeepSpeed are given."""
    from gspo.cli.plan.search import STAGES, STAGES_ALONE

    stages = STAGES if num_cards > 1 else STAGES_ALONE
    open_keys = [key for key in (STAGE, OFFLOAD) if key in left_out and not config.learner.deepspeed]
    of_user = {key: key_value(config, key) for key in (STAGE, OFFLOAD) if key not in open_keys}
    ways = [{STAGE: stage, OFFLOAD: offload} for stage, offload in stages]
    return [{key: way[key] for key in open_keys} for way in ways if of_user.items() <= way.items()] or [{}]


def _engine(
    config: Config, model: PlannedModel, profile: ModelProfile, gpus: Sequence[Gpu], card_bytes: float
) -> dict[str, Any]:
    """The engine with as many cards as the model needs; on a single card with the share that the learner leaves.

    Beside the learner vLLM also gets the bytes of its cache. It would count the learner's as its own.
    """
    engine, longest = config.generation.engine, config.algorithm.longest_branch
    if len(gpus) == 1:
        share = engine_share(config)
        if SHARE_ARGUMENT not in engine:
            if config.generation.replicas > 1:
                return {}
            used = rank_of(config, model, on_gpu=True).peak + gpus[0].used_bytes
            share = min(share_beside(used, card_bytes), share)
        bound = servable_bound(config, profile, card_bytes, share=share, num_cards=1)
        if share <= 0 or bound.planned < longest or CACHE_ARGUMENT in engine:
            return {}
        memory = generator_memory(config, profile, card_bytes, share=share, tensor_parallel=1)
        cache = int(memory.kv_cache) // _MIB * _MIB
        return {ENGINE: {**engine, SHARE_ARGUMENT: share, CACHE_ARGUMENT: cache}}
    if any(name in engine for name in PARALLEL_ARGUMENTS):
        return {}
    for parallel in (1, 2, 4, 8):
        if parallel >= len(gpus) or profile.num_heads % parallel:
            continue
        bound = servable_bound(config, profile, card_bytes, share=engine_share(config), num_cards=parallel)
        if bound.planned >= longest:
            return {ENGINE: {**engine, PARALLEL_ARGUMENTS[0]: parallel}} if parallel > 1 else {}
    return {}


def _compiles(config: Config, profile: ModelProfile) -> bool:
    """Whether torch can compile the layers of this model here."""
    can_compile = profile.compiles_under(config.learner.zero_stage) and not missing_compiler(on_gpu=True)
    return can_compile and config.learner.dtype == "bfloat16"


def _micro_batch(config: Config, model: PlannedModel, profile: ModelProfile, gpus: Sequence[Gpu]) -> dict[str, Any]:
    """As many tokens as fit on the learner's cards."""
    try:
        free = free_for_ranks(config, place(config, process_names(config, SERVICES), gpus))
    except InputError:  # the start places them again, and shows the reason
        return {}
    if free is None:
        return {}
    return {MICRO_BATCH: fitting_micro_batch(config, profile, model.size, config.learner.ranks, free[0])}


def _with(config: Config, values: dict[str, Any]) -> Config:
    """The configuration with other values of its sections `generation` and `learner`."""
    changed: dict[str, dict[str, Any]] = {"generation": {}, "learner": {}}
    for name, value in values.items():
        section, _, key = name.partition(".")
        changed[section][key] = value
    return config.with_keys(**changed)
