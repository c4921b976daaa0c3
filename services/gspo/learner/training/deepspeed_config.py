"""DeepSpeed's configuration: our own keys, with the user's section `learner.deepspeed` merged into them.

It imports no DeepSpeed, so that a configuration can be checked in milliseconds.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gspo.common.config.learner import LearnerConfig
from gspo.common.config.schema import Config
from gspo.common.errors import InputError, in_yaml
from gspo.learner.training.deepspeed_keys import refuse_without_effect

# DeepSpeed's key -> our own key in its place. A value that agrees with ours is accepted.
_OWN_KEYS = {
    "train_batch_size": "the batch is algorithm.rollout_batch_size groups",
    "train_micro_batch_size_per_gpu": "set learner.micro_batch_tokens",
    "gradient_accumulation_steps": "set learner.micro_batch_tokens and algorithm.num_mini_batches",
    "managed_gradient_accumulation": "the trainer decides where an optimizer step ends",
    "optimizer": "set learner.learning_rate, weight_decay and adam_betas",
    "scheduler": "set learner.schedule and learner.warmup_steps",
    "gradient_clipping": "set learner.max_grad_norm",
    "fp16": "set learner.dtype",
    "bf16": "set learner.dtype",
    "torch_autocast": "set learner.dtype",
    "data_types": "gradients add up in float32",
    "zero_force_ds_cpu_optimizer": "the optimizer is torch's AdamW",
    "zero_optimization.stage": "set learner.zero_stage",
    "zero_optimization.cpu_offload": "set learner.offload",
    "zero_optimization.cpu_offload_param": "set learner.offload",
}
_AUTO = "auto"
_DEVICES = ("none", "cpu")
_ADAM_EPS = 1e-8


def engine_config(config: Config) -> dict[str, Any]:
    """DeepSpeed's configuration of this run.

    Raises:
        InputError: `learner.deepspeed` cannot be read as JSON, contradicts one of our keys, holds a key without an
            effect, or asks for an offload that its ZeRO stage does not have.
    """
    learner = config.learner
    section = _without_auto(_user_section(learner))
    refuse_without_effect(section, _OWN_KEYS, learner.zero_stage)
    for key, instead in _OWN_KEYS.items():
        value = _at(section, key)
        if value is not None and not _agrees(key, value, learner):
            raise InputError(
                f"learner.deepspeed.{key}", f"{in_yaml(value)} contradicts our own keys", f"Leave it out; {instead}"
            )
    _refuse_offload(section, learner)
    ours = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        # At stage 0 the trainer clips: it has to see the norm before the step, and needs it only once.
        "gradient_clipping": learner.max_grad_norm if learner.zero_stage else 0.0,
        "zero_optimization": {"stage": learner.zero_stage, **_offload(learner)},
        "zero_force_ds_cpu_optimizer": False,
    }
    # Our own keys were compared above; their values are those in `ours`.
    return _merged(ours, {key: value for key, value in section.items() if key not in _OWN_KEYS})


def _user_section(learner: LearnerConfig) -> Mapping[str, Any]:
    if not isinstance(learner.deepspeed, Path):
        return learner.deepspeed
    path = learner.deepspeed
    try:
        section = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(
            "learner.deepspeed", f"{path} cannot be read as JSON ({error})", "Correct the file or its path"
        ) from error
    if not isinstance(section, dict):
        raise InputError("learner.deepspeed", f"{path} holds no JSON object", "Write DeepSpeed's keys into it")
    return section


def _without_auto(section: Mapping[str, Any]) -> dict[str, Any]:
    """Without the values "auto", which other programs fill in."""
    return {
        key: _without_auto(value) if isinstance(value, Mapping) else value
        for key, value in section.items()
        if value != _AUTO
    }


def _agrees(key: str, value: Any, learner: LearnerConfig) -> bool:
    """Whether the value of one of _OWN_KEYS is that of our own configuration."""
    bfloat16 = learner.dtype == "bfloat16"
    match key:
        case "gradient_clipping":
            return bool(value == learner.max_grad_norm)
        case "zero_optimization.stage":
            return bool(value == learner.zero_stage)
        case "bf16":
            return isinstance(value, Mapping) and value.get("enabled", bfloat16) is bfloat16 and len(value) <= 1
        case "fp16":
            return isinstance(value, Mapping) and value.get("enabled", False) is False
        case "optimizer":
            return _is_our_optimizer(value, learner)
        case "zero_force_ds_cpu_optimizer":
            return value is False
        case "train_micro_batch_size_per_gpu" | "gradient_accumulation_steps":
            return bool(value == 1)
    return False


def _is_our_optimizer(section: Any, learner: LearnerConfig) -> bool:
    if not isinstance(section, Mapping) or section.get("type") != "AdamW":
        return False
    ours = {
        "lr": learner.learning_rate,
        "betas": list(learner.adam_betas),
        "weight_decay": learner.weight_decay,
        "eps": _ADAM_EPS,
    }
    parameters = section.get("params", {})
    return isinstance(parameters, Mapping) and all(
        key in ours and ours[key] == value for key, value in parameters.items()
    )


def _offload(learner: LearnerConfig) -> dict[str, Any]:
    to_host = {"device": "cpu"}
    match learner.offload:
        case "optimizer":
            return {"offload_optimizer": to_host}
        case "all":
            return {"offload_optimizer": to_host, "offload_param": to_host}
    return {}


def _refuse_offload(section: Mapping[str, Any], learner: LearnerConfig) -> None:
    """Refuse an offload that contradicts ours, has no such device, or that the ZeRO stage does not have."""
    for name, least in (("offload_optimizer", 1), ("offload_param", 3)):
        key = f"learner.deepspeed.zero_optimization.{name}"
        offload = _at(section, f"zero_optimization.{name}")
        device, ours = _at(section, f"zero_optimization.{name}.device"), _offload(learner).get(name)
        if device is None:
            continue
        if ours and device != ours["device"]:
            raise InputError(
                f"{key}.device", f"{in_yaml(device)} contradicts learner.offload: {learner.offload}", "Leave it out"
            )
        if device not in _DEVICES or offload.get("ratio", 1.0) != 1.0 or offload.get("super_offload"):
            raise InputError(
                key,
                f"{in_yaml(offload)} is not supported under ZeRO {learner.zero_stage}: torch's AdamW updates whole "
                "states, in memory",
                "Set learner.offload to optimizer or all, and leave it out here",
            )
        if device != "none" and learner.zero_stage < least:
            raise InputError(
                key,
                f"ZeRO {learner.zero_stage} has no such offload, {'stages 1 to' if least < 3 else 'only stage'} 3 "
                f"{'have' if least < 3 else 'has'}",
                f"Set learner.zero_stage: {least}, or leave it out",
            )


def reference_config() -> dict[str, Any]:
    """DeepSpeed's configuration of the frozen reference model under ZeRO 3, which spreads it over the ranks."""
    return {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}


def _at(mapping: Mapping[str, Any], dotted: str) -> Any:
    value: Any = mapping
    for part in dotted.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _merged(ours: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(ours)
    for key, value in others.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = _merged(merged[key], value) if both else value
    return merged
