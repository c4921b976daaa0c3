"""Defaults that follow from a machine's GPUs and the model: their split, what saves memory, and what fills them."""

from collections.abc import Collection, Sequence
from typing import Any

from gspo.cli.plan.choice import PlannedMachine, choices, first_fitting, ways_to_save
from gspo.cli.processes.placement import place
from gspo.cli.processes.planned_memory import PlannedModel, free_for_ranks, read_planned_model
from gspo.cli.processes.programs import process_names
from gspo.common.config.loading import key_value
from gspo.common.config.schema import Config
from gspo.common.errors import InputError
from gspo.common.host.compilers import missing_compiler
from gspo.common.host.machine import CACHE_ARGUMENT, PARALLEL_ARGUMENTS, SHARE_ARGUMENT, Gpu, free_memory
from gspo.common.planning.longest import fitting_micro_batch, needs_checkpointing
from gspo.common.planning.model_profile import ModelProfile
from gspo.common.streams.keys import SERVICES

REPLICAS, RANKS, MICRO_BATCH = "generation.replicas", "learner.ranks", "learner.micro_batch_tokens"
STAGE, OFFLOAD = "learner.zero_stage", "learner.offload"
ENGINE = "generation.engine"
# Engine arguments with such a default; the mapping itself is the user's.
ENGINE_ARGUMENTS = (PARALLEL_ARGUMENTS[0], SHARE_ARGUMENT, CACHE_ARGUMENT)
COMPILE = "learner.torch_compile"
CHECKPOINTING = "learner.gradient_checkpointing"
COMPUTED = (REPLICAS, RANKS, MICRO_BATCH, STAGE, OFFLOAD, COMPILE, CHECKPOINTING)
# Of these, what fits on the GPUs beside all others.
_FILLED = (MICRO_BATCH, CHECKPOINTING)


def gpu_defaults(config: Config, left_out: Collection[str], gpus: Sequence[Gpu]) -> dict[str, Any]:
    """Values of COMPUTED and of engine arguments.

    Args:
        config: With the user's values, and the defaults of other keys.
        left_out: Keys that the user leaves to the device; all others stay.

    Returns:
        No values if the size of a GPU or of the model is not known.
    """
    sizes = [gpu.total_bytes for gpu in gpus if gpu.total_bytes is not None]
    if not gpus or len(sizes) < len(gpus):
        return {}
    model = read_planned_model(config)
    if model is None or model.profile is None:
        return {}
    values: dict[str, Any] = {}
    # NCCL connects no slices of GPUs, so a divided GPU is shared out by its user.
    # Under `placement: shared` the split is of time, not of GPUs.
    if config.placement == "split" and not any("MIG" in gpu.name for gpu in gpus):
        values = _split(config, model, model.profile, left_out, gpus, float(min(sizes)))
    if COMPILE in left_out and COMPILE not in values:
        values[COMPILE] = _compiles(_with(config, values), model.profile)
    return values | _filled(_with(config, values), model, model.profile, left_out, gpus)


def _split(
    config: Config,
    model: PlannedModel,
    profile: ModelProfile,
    left_out: Collection[str],
    gpus: Sequence[Gpu],
    gpu_bytes: float,
) -> dict[str, Any]:
    """Generators, ranks, how they save memory, and the engine's arguments; what the user gives stays.

    If nothing fits, they are of the nearest choice: the start refuses it and names the missing memory.
    """
    machine = PlannedMachine(
        len(gpus), gpu_bytes, len(gpus), free_memory(), used_bytes=max(gpu.used_bytes for gpu in gpus)
    )
    savings = []
    for way in _ways_to_save(config, left_out, len(gpus)):
        compiles = _compiles(config.with_keys(learner=way), profile)
        savings.append(way | ({"torch_compile": compiles} if COMPILE in left_out else {}))
    choice = first_fitting(
        choices(
            config,
            profile,
            model.size,
            machine,
            savings,
            replicas=None if REPLICAS in left_out else config.generation.replicas,
            ranks=None if RANKS in left_out else config.learner.ranks,
        )
    )
    if choice is None:
        return {}
    values = {key: key_value(choice.config, key) for key in COMPUTED if key in left_out and key not in _FILLED}
    engine = choice.config.generation.engine
    # On a single GPU without enough memory, the share of a learner that does not fit says nothing.
    fits = not choice.shortages or len(gpus) > 1
    return values | ({ENGINE: engine} if fits and engine != config.generation.engine else {})


def _ways_to_save(config: Config, left_out: Collection[str], num_gpus: int) -> list[dict[str, Any]]:
    """ZeRO stages and offload, the fastest first; only the user's where they or other keys of DeepSpeed are given."""
    left_open = [key for key in (STAGE, OFFLOAD) if key in left_out and not config.learner.deepspeed]
    names = {key: key.partition(".")[2] for key in (STAGE, OFFLOAD)}
    of_user = {names[key]: key_value(config, key) for key in names if key not in left_open}
    ways = [way for way in ways_to_save(num_gpus) if of_user.items() <= way.items()]
    return [{names[key]: way[names[key]] for key in left_open} for way in ways] or [{}]


def _compiles(config: Config, profile: ModelProfile) -> bool:
    """Whether torch can compile the layers of this model here."""
    can_compile = profile.compiles_under(config.learner.zero_stage) and not missing_compiler(on_gpu=True)
    return can_compile and config.learner.dtype == "bfloat16"


def _filled(
    config: Config, model: PlannedModel, profile: ModelProfile, left_out: Collection[str], gpus: Sequence[Gpu]
) -> dict[str, Any]:
    """As many tokens as fit on the learner's GPUs, and whether activations can be kept there."""
    try:
        free = free_for_ranks(config, place(config, process_names(config, SERVICES), gpus))
    except InputError:  # the start places them again, and shows the reason
        return {}
    if free is None:
        return {}
    values, place_of_ranks = dict[str, Any](), (profile, model.size, config.learner.ranks, free[0])
    if CHECKPOINTING in left_out:
        tokens = None if MICRO_BATCH in left_out else config.micro_batch_tokens
        values[CHECKPOINTING] = needs_checkpointing(config, *place_of_ranks, tokens)
    if MICRO_BATCH in left_out:
        values[MICRO_BATCH] = fitting_micro_batch(_with(config, values), *place_of_ranks)
    return values


def _with(config: Config, values: dict[str, Any]) -> Config:
    """The configuration with other values of its sections `generation` and `learner`."""
    changed: dict[str, dict[str, Any]] = {"generation": {}, "learner": {}}
    for name, value in values.items():
        section, _, key = name.partition(".")
        changed[section][key] = value
    return config.with_keys(**changed)
