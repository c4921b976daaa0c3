"""The planned memory of every process of a run: on its GPUs, or in host memory if there are none."""

import math
from dataclasses import dataclass, replace

from gspo.cli.processes.placement import Placement, aligned
from gspo.common.config.schema import Config
from gspo.common.errors import InputError
from gspo.common.host.machine import GIB, Gpu, free_memory
from gspo.common.model.files import model_folder, read_model_files
from gspo.common.model.teacher_files import teacher_folder
from gspo.common.model.trained_parameters import TrainedSize, trained_size
from gspo.common.planning.host_memory import PROCESSES_GIB
from gspo.common.planning.longest import engine_share, kept_by_generators
from gspo.common.planning.memory import (
    RankMemory,
    generator_memory,
    policy_bytes,
    published_bytes,
    rank_memory,
    reserved_bytes,
    snapshot_bytes,
)
from gspo.common.planning.model_profile import ModelProfile, profile_model
from gspo.common.streams.keys import GENERATION, LEARNER

# The least that one decimal of a GiB shows.
_LEAST_GIB = 0.05
_MIB = 1 << 20


@dataclass(frozen=True)
class PlannedModel:
    """The sizes of a run's model that its memory follows from.

    Attributes:
        profile: None if the model cannot be profiled: its activations are not known then.
    """

    size: TrainedSize
    profile: ModelProfile | None


def read_planned_model(config: Config) -> PlannedModel | None:
    """The sizes of the run's model; None if its files cannot be read, which the services' checks explain.

    It fetches a model of a hub, and profiles one that was not profiled before: seconds, in a process with torch.
    """
    try:
        folder = model_folder(config.model)
        size = trained_size(config, read_model_files(folder, allow_pickle=config.model.allow_pickle))
    except InputError:
        return None
    try:
        profile = profile_model(folder, trust_remote_code=config.model.trust_remote_code)
        if config.teacher.path is not None:
            trusted = config.teacher.trust_remote_code
            profile = replace(profile, teacher=profile_model(teacher_folder(config), trust_remote_code=trusted))
        return PlannedModel(size, profile)
    except InputError:
        return PlannedModel(size, None)


@dataclass(frozen=True)
class ProcessMemory:
    """Planned bytes of one process, on each of its GPUs or in host memory.

    Attributes:
        weights: With a frozen reference and a teacher.
        gradients: With DeepSpeed's buffers.
        activations: With logits, and of a generator all else that vLLM works with; None if they are not known.
        spare: That no process is planned to use, where least is left; None if the size is not known.
    """

    weights: float
    gradients: float = 0.0
    optimizer: float = 0.0
    kv_cache: float = 0.0
    activations: float | None = 0.0
    spare: float | None = None

    def cells(self) -> tuple[str, ...]:
        """GiB, for the columns of COLUMNS: "-" is nothing, "?" an unknown size."""
        parts = (self.weights, self.gradients, self.optimizer, self.kv_cache, self.activations, self.spare)
        return tuple("?" if part is None else _in_gib(part) if part else "-" for part in parts)


def _in_gib(size: float) -> str:
    """A number of GiB, or of MiB with their name where GiB would show as 0."""
    return f"{size / GIB:.1f}" if abs(size) >= _LEAST_GIB * GIB else f"{size / _MIB:.2g} MiB"


COLUMNS = ("weights", "gradients", "optimizer", "KV cache", "activations", "free")


def memory_table(config: Config, placement: Placement, processes: list[str], model: PlannedModel) -> str:
    """A line for each process: its GPUs, and its planned GiB on each of them; in host memory if there are none."""
    planned = planned_memory(config, placement, processes, model)
    places = {row[0]: row[1:] for row in placement.rows()}
    rows = [("process", *(("GPU", "shared with") if places else ()), *COLUMNS)]
    rows += [(name, *places.get(name, ()), *memory.cells()) for name, memory in planned.items()]
    rows += [(name, *place) for name, place in places.items() if name not in planned]
    where = "on each GPU" if places else "of host memory"
    shifts = ". Generators and learner use them in shifts: placement is shared" if placement.in_shifts else ""
    return f"{aligned(rows)}\n(planned GiB {where}{shifts})"


def planned_memory(
    config: Config, placement: Placement, processes: list[str], model: PlannedModel
) -> dict[str, ProcessMemory]:
    """The memory of every generator, and of each rank of the learner, by the name of its process."""
    if not placement.gpus:
        return _in_host_memory(config, processes, model)
    planned = {}
    for name, gpus in placement.gpus.items():
        spares = (_spare(config, placement, gpu, model) for gpu in gpus)
        spare = min(spares, key=lambda size: -math.inf if size is None else size)
        if name.startswith(GENERATION):
            planned[name] = _generator(config, gpus, model, spare)
        else:
            planned[name] = _rank(rank_of(config, model, on_gpu=True), model, spare)
    return planned


def rank_of(config: Config, model: PlannedModel, *, on_gpu: bool) -> RankMemory:
    return rank_memory(config, model.size, config.learner.ranks, profile=model.profile, on_gpu=on_gpu)


def free_for_ranks(config: Config, placement: Placement) -> tuple[float, float] | None:
    """(bytes that the tensors of a rank may take, bytes in reserve) of the fullest of the learner's GPUs.

    Returns:
        None if a size is not known, or if no rank is placed.
    """
    gpus = next((gpus for name, gpus in placement.gpus.items() if name.startswith(LEARNER)), ())
    free = []
    for gpu in gpus:
        if gpu.total_bytes is None:
            return None
        reserve = reserved_bytes(gpu.total_bytes)
        others = kept_by_generators(config, gpu.total_bytes, len(placement.generators_on(gpu))) + gpu.used_bytes
        free.append((gpu.total_bytes - others - reserve, reserve))
    return min(free, default=None)


def _spare(config: Config, placement: Placement, gpu: Gpu, model: PlannedModel) -> float | None:
    """Bytes of a GPU beside generators, the learner with its reserve, and other programs; negative if they are more."""
    if gpu.total_bytes is None:
        return None
    kept = kept_by_generators(config, gpu.total_bytes, len(placement.generators_on(gpu)))
    free = gpu.total_bytes - kept - gpu.used_bytes
    if any(name.startswith(LEARNER) and gpu in gpus for name, gpus in placement.gpus.items()):
        free -= rank_of(config, model, on_gpu=True).peak + reserved_bytes(gpu.total_bytes)
    return free


def _generator(config: Config, gpus: tuple[Gpu, ...], model: PlannedModel, spare: float | None) -> ProcessMemory:
    weights = policy_bytes(config, model.size.num_parameters) / len(gpus)
    sizes = [gpu.total_bytes for gpu in gpus if gpu.total_bytes is not None]
    if not sizes or model.profile is None:
        return ProcessMemory(weights, activations=None, spare=spare)
    memory = generator_memory(config, model.profile, min(sizes), share=engine_share(config), tensor_parallel=len(gpus))
    return ProcessMemory(weights, kv_cache=max(0.0, memory.kv_cache), activations=memory.working, spare=spare)


def _rank(memory: RankMemory, model: PlannedModel, spare: float | None) -> ProcessMemory:
    return ProcessMemory(
        memory.weights + memory.reference + memory.teacher,
        memory.gradients + memory.buckets,
        memory.optimizer,
        activations=memory.activations + memory.output_layer if model.profile else None,
        spare=spare,
    )


def _in_host_memory(config: Config, processes: list[str], model: PlannedModel) -> dict[str, ProcessMemory]:
    """All ranks of the learner together, with the policies that it keeps for pushes."""
    ranks, num_parameters = config.learner.ranks, model.size.num_parameters
    rank = rank_of(config, model, on_gpu=False)
    kept = snapshot_bytes(config, model.size) + published_bytes(config, num_parameters, ranks, ranks)
    learner = ProcessMemory(
        (rank.weights + rank.reference + rank.teacher) * ranks + rank.offloaded * ranks + kept,
        (rank.gradients + max(rank.buckets, rank.update)) * ranks,
        rank.optimizer * ranks,
        activations=(rank.activations + rank.output_layer) * ranks if model.profile else None,
    )
    generator = ProcessMemory(policy_bytes(config, num_parameters), kv_cache=config.generation.kv_cache_gb * GIB)
    planned = {
        name: generator if name.startswith(GENERATION) else learner
        for name in processes
        if name.startswith((GENERATION, LEARNER))
    }
    taken = PROCESSES_GIB * GIB + sum(
        memory.weights + memory.gradients + memory.optimizer + memory.kv_cache + (memory.activations or 0.0)
        for memory in planned.values()
    )
    return {name: replace(memory, spare=free_memory() - taken) for name, memory in planned.items()}
