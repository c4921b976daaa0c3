"""A request of `gspo plan`, and its plan."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gspo.cli.plan.choice import Choice, PlannedMachine, plan_choice
from gspo.cli.plan.planned_times import PlannedTimes, times_of
from gspo.cli.plan.rates import Rate
from gspo.cli.plan.rollout_lengths import MEAN_SHARE, RolloutLengths
from gspo.common.config.loading import parse_config
from gspo.common.config.presets import fitting_clip
from gspo.common.config.schema import Config
from gspo.common.host.gpu_kinds import GpuKind
from gspo.common.host.machine import GIB
from gspo.common.model.files import config_folder
from gspo.common.planning.host_memory import HOST_SHARE
from gspo.common.planning.model_profile import ModelProfile

# Tokens of the longest prompt, unless the context is short.
_PROMPT_LENGTH, _PROMPT_SHARE = 2048, 4
LONGEST_CONTEXT = 8192
PROMPTS, REWARD = "prompts.jsonl", "reward.py"


@dataclass(frozen=True)
class PlanRequest:
    """The arguments of `gspo plan`.

    Attributes:
        model: As config_folder takes it.
        gpus_per_host: At most; more GPUs are on several hosts.
        host_gib: GiB of each host's own memory; None is assumed (host_memory.py).
        host_cores: Processor cores of each host; None: enough.
        context: Tokens of the longest rollout, prompt and answer; 0: LONGEST_CONTEXT, or what the models read if less.
        teacher: A frozen model that the learner loads beside the policy, as `model`.
        mean_answer, mean_prompt: Tokens; None is assumed (rollout_lengths.py).
        results: File of `make gpu-test`, with measured rates.
    """

    model: str
    num_gpus: int
    gpu: str | None = None
    gpu_gb: float | None = None
    gpus_per_host: int = 8
    host_gib: float | None = None
    host_cores: int | None = None
    context: int = 0
    groups: int = 64
    group_size: int = 8
    max_lag: int = 1
    on_stale: str = "wait"
    lora_rank: int = 0
    teacher: str | None = None
    mean_answer: float | None = None
    mean_prompt: float | None = None
    results: Path | None = None
    trust_remote_code: bool = False


@dataclass(frozen=True)
class Planned:
    """A plan and everything that it follows from."""

    request: PlanRequest
    profile: ModelProfile
    gpu: GpuKind
    rates: Mapping[str, Rate]
    machine: PlannedMachine
    lengths: RolloutLengths
    choice: Choice
    times: PlannedTimes


def machine_of(request: PlanRequest, gpu: GpuKind) -> PlannedMachine:
    gpu_bytes = gpu.memory_bytes if request.gpu is None or request.gpu_gb is None else request.gpu_gb * GIB
    host_bytes = HOST_SHARE * gpu_bytes * min(request.num_gpus, request.gpus_per_host)
    if request.host_gib is not None:
        host_bytes = request.host_gib * GIB
    return PlannedMachine(request.num_gpus, gpu_bytes, request.gpus_per_host, host_bytes)


def choice_of(request: PlanRequest, profile: ModelProfile, gpu: GpuKind) -> Choice | None:
    """The choice of a request; the nearest where nothing fits, None where nothing divides."""
    return plan_choice(base_config(request), profile, machine_of(request, gpu))


def planned_choice(
    request: PlanRequest, profile: ModelProfile, gpu: GpuKind, rates: Mapping[str, Rate], choice: Choice
) -> Planned:
    """A choice that fits, with the times that rates give."""
    lengths = RolloutLengths.of(choice.config, prompt=request.mean_prompt, mean=request.mean_answer)
    rank_cores = (request.host_cores or math.inf) / min(choice.ranks, request.gpus_per_host)
    times = times_of(choice, profile, lengths, gpu, rates, rank_cores)
    return Planned(request, profile, gpu, rates, machine_of(request, gpu), lengths, choice, times)


def base_config(request: PlanRequest) -> Config:
    """The configuration of a request before the search."""
    model, teacher = _path(request.model), request.teacher and _path(request.teacher)
    prompt_length = min(_PROMPT_LENGTH, request.context // _PROMPT_SHARE)
    response_length = request.context - prompt_length
    clip_low, clip_high = fitting_clip(round(request.mean_answer or MEAN_SHARE * response_length))
    return parse_config(
        {
            "name": re.sub(r"[^A-Za-z0-9._-]", "-", Path(model).name).strip("._-")[:64] or "run",
            "model": {"path": model, "trust_remote_code": request.trust_remote_code},
            "data": {"prompts": PROMPTS},
            "reward": {"functions": [{"path": REWARD}]},
            "algorithm": {
                "rollout_batch_size": request.groups,
                "num_return_sequences_in_group": request.group_size,
                "prompt_length": prompt_length,
                "response_length": response_length,
                "pg_clip_low": clip_low,
                "pg_clip_high": clip_high,
            },
            "staleness": {"max_lag": request.max_lag, "on_stale": request.on_stale},
            "learner": {"lora": {"rank": request.lora_rank}},
            "run": {"total_steps": 100},
            **teacher_keys(teacher, trust_remote_code=request.trust_remote_code),
        },
        base=Path.cwd(),
        source="gspo plan",
    )


def _path(place: str) -> str:
    """The value of model.path: a whole path, or a name on a hub."""
    return str(config_folder(place).resolve()) if Path(place).exists() else place


def teacher_keys(path: str | None, *, trust_remote_code: bool) -> dict[str, Any]:
    """The section `teacher` of a plan; none without one."""
    return {} if path is None else {"teacher": {"path": path, "trust_remote_code": trust_remote_code}}
