"""Makes the plan of a model on GPUs: a configuration and its costs, or a refusal by the shortages of the nearest."""

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from gspo.cli.plan.plan_request import (
    LONGEST_CONTEXT,
    PROMPTS,
    REWARD,
    Planned,
    PlanRequest,
    base_config,
    choice_of,
    planned_choice,
    teacher_keys,
)
from gspo.cli.plan.rates import find_kind, rates_of
from gspo.cli.plan.refusal import does_not_fit
from gspo.common.config.loading import parse_config
from gspo.common.config.schema import Config
from gspo.common.errors import InputError
from gspo.common.host.machine import visible_gpus
from gspo.common.model.files import config_folder, read_model_config, refuse_quantized
from gspo.common.planning.model_profile import ModelProfile, profile_model

_K = 1024
_LEAST_CONTEXT = 8


def make_plan(request: PlanRequest, note: Callable[[str], None] = lambda _: None) -> Planned:
    """Find the plan of a request.

    Args:
        note: Called with a sentence before a count, which takes seconds.

    Raises:
        InputError: The model or the GPU is unknown, the context too long, or nothing fits: then with everything that
            the nearest configuration lacks, and with changes that fit.
    """
    gpu = find_kind(request.gpu, request.gpu_gb)
    rates = rates_of(gpu, request.results)
    folder = config_folder(request.model)
    refuse_quantized(request.model, read_model_config(folder))
    count = partial(profile_model, trust_remote_code=request.trust_remote_code, note=note)
    profile = count(folder)
    if request.teacher is not None:
        profile = replace(profile, teacher=count(config_folder(request.teacher)))
    request = replace(request, context=context_of(request, profile))
    check_means(request)
    choice = choice_of(request, profile, gpu)
    if choice is None or choice.shortages:
        raise does_not_fit(request, profile, gpu, choice)
    return planned_choice(request, profile, gpu, rates, choice)


def context_of(request: PlanRequest, profile: ModelProfile) -> int:
    """Tokens of the longest rollout: those of the request, which each model must read, or the default.

    Raises:
        InputError: One of the models reads less than the request.
    """
    models = {"the model": profile.max_positions}
    if profile.teacher is not None:
        models["the teacher"] = profile.teacher.max_positions
    readable = {name: positions for name, positions in models.items() if positions}
    if not request.context:
        return min((LONGEST_CONTEXT, *readable.values()))
    for name, positions in readable.items():
        if positions < request.context:
            raise InputError(
                "--context",
                f"{request.context} tokens, and {name} reads at most {positions} (max_position_embeddings)",
                f"Set it to at most {positions}",
            )
    return request.context


def check_means(request: PlanRequest) -> None:
    """Refuse means above the longest prompt or answer.

    Raises:
        InputError: Names the argument.
    """
    longest = base_config(replace(request, mean_answer=None)).algorithm
    for argument, mean, most in (
        ("--prompt-tokens", request.mean_prompt, longest.prompt_length),
        ("--answer-tokens", request.mean_answer, longest.response_length),
    ):
        if mean is not None and mean > most:
            rule = f"{mean:g} is more than the longest has in a context of {request.context}: {most} tokens"
            raise InputError(argument, rule, "Lower it, or raise --context")


def gpus_here() -> tuple[str | None, int]:
    """The kind of the GPUs that a process started here sees, and their number; (None, 0) if there is none.

    Raises:
        InputError: They are of several kinds, or CUDA_VISIBLE_DEVICES is wrong.
    """
    kinds = [gpu.product for gpu in visible_gpus()]
    if len({*kinds}) > 1:
        rule = f"is not given, and this machine has several kinds of GPUs: {', '.join(sorted({*kinds}))}"
        raise InputError("--card", rule, "Name the kind of the plan, and the number by --gpus")
    return (kinds[0], len(kinds)) if kinds else (None, 0)


def parse_tokens(text: str) -> int:
    """A number of tokens, such as 8192 or 8k.

    Raises:
        InputError: The text is another.
    """
    matched = re.fullmatch(r"(\d+)([kK]?)", text.strip())
    tokens = int(matched[1]) * (_K if matched[2] else 1) if matched else 0
    if tokens < _LEAST_CONTEXT:
        rule = f"{text!r} does not count tokens of a prompt and its answer"
        raise InputError("--context", rule, "Give a number such as 32768 or 32k")
    return tokens


def write_plan(planned: Planned, path: Path) -> None:
    """Write a configuration with the keys of a plan, and read it again as `gspo run` does.

    Raises:
        InputError: The file exists, or its folder does not.
    """
    if path.exists():
        raise InputError(str(path), "exists already", "Name another file; nothing is overwritten")
    if not path.parent.is_dir():
        raise InputError(str(path.parent), "is not a folder", "Create it, or name another file")
    keys = plan_keys(planned.choice.config)
    parse_config(dict(keys), base=path.parent, source=str(path))
    heading = f"# Written by gspo plan for {planned.request.num_gpus} x {planned.gpu.name}. Set data and reward.\n"
    path.write_text(heading + yaml.safe_dump(keys, sort_keys=False))


def plan_keys(config: Config) -> dict[str, Any]:
    """The keys of a plan's configuration: other than the defaults, chosen by the plan, or for the user to judge."""
    learner, generation, algorithm = config.learner, config.generation, config.algorithm
    lora = {"lora": {"rank": learner.lora.rank}} if learner.lora.rank else {}
    sizes = ("rollout_batch_size", "num_return_sequences_in_group", "prompt_length", "response_length")
    updates = ("num_mini_batches", "pg_clip_low", "pg_clip_high")
    chosen = (
        "learning_rate",
        "dtype",
        "gradient_checkpointing",
        "torch_compile",
        "micro_batch_tokens",
        "zero_stage",
        "offload",
        "ranks",
    )
    return {
        "name": config.name,
        "model": {"path": config.model.path, "trust_remote_code": config.model.trust_remote_code},
        "placement": config.placement,
        "data": {"prompts": PROMPTS},
        "reward": {"functions": [{"path": REWARD}]},
        "algorithm": {name: getattr(algorithm, name) for name in (*sizes, *updates)},
        "staleness": {"max_lag": config.staleness.max_lag, "on_stale": config.staleness.on_stale},
        "generation": {"dtype": generation.dtype, "replicas": generation.replicas, "engine": dict(generation.engine)},
        "learner": {name: getattr(learner, name) for name in (*chosen, "sequence_ranks")} | lora,
        "run": {"total_steps": config.run.total_steps},
        **teacher_keys(config.teacher.path, trust_remote_code=config.teacher.trust_remote_code),
    }
