"""DeepSpeed's configuration: our own keys, with the user's section `learner.deepspeed` merged into them.

DeepSpeed itself ignores unknown keys, and keys of features that are off; here they are refused. This imports no
DeepSpeed, so that a configuration can be checked in milliseconds.
"""

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gspo.common.config.engines import LearnerConfig
from gspo.common.config.schema import Config
from gspo.common.errors import InputError, in_yaml
from gspo.common.plain_json import read_json_file

# DeepSpeed's key -> our own key in its place. A value that agrees with ours is accepted.
_OWN_KEYS = {
    "train_batch_size": "the batch is algorithm.rollout_batch_size groups",
    "train_micro_batch_size_per_gpu": "set learner.micro_batch_tokens",
    "gradient_accumulation_steps": "set learner.micro_batch_tokens and algorithm.num_mini_batches",
    "managed_gradient_accumulation": "the trainer decides where an optimizer step ends",
    "optimizer": "set learner.learning_rate, weight_decay, adam_betas and adam_eps",
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
# Top-level keys that act.
_ALLOWED = {
    "zero_optimization",
    "communication_data_type",
    "prescale_gradients",
    "gradient_predivide_factor",
    "steps_per_print",
    "wall_clock_breakdown",
    "memory_breakdown",
    "dump_state",
    "log_level",
    "disable_python_gc",
    "flops_profiler",
    "comms_logger",
}
# Keys of zero_optimization that act, by the ZeRO stages in which they do.
_ANY, _FLAT, _SPREAD = (1, 2, 3), (1, 2), (3,)
_ZERO = {
    "offload_optimizer": _ANY,
    "offload_param": _SPREAD,
    "contiguous_gradients": _ANY,
    "reduce_scatter": _ANY,
    "reduce_bucket_size": _ANY,
    "overlap_comm": _ANY,
    "allgather_bucket_size": _FLAT,
    "use_multi_rank_bucket_allreduce": _FLAT,
    "ignore_unused_parameters": _FLAT,
    "round_robin_gradients": (2,),
    "parameter_alignment": _FLAT,
    "sub_group_size": _SPREAD,
    "stage3_prefetch_bucket_size": _SPREAD,
    "stage3_param_persistence_threshold": _SPREAD,
    "stage3_model_persistence_threshold": _SPREAD,
    "stage3_max_live_parameters": _SPREAD,
    "stage3_max_reuse_distance": _SPREAD,
    "stage3_module_granularity_threshold": _SPREAD,
    "stage3_use_all_reduce_for_fetch_params": _SPREAD,
    "stage3_allgather_sequential": _SPREAD,
    "zero_hpz_partition_size": _SPREAD,
    "zero_quantized_weights": _SPREAD,
    "zero_quantized_nontrainable_weights": _SPREAD,
    "zero_quantized_gradients": _SPREAD,
    "log_trace_cache_warnings": _SPREAD,
    "enable_sanity_checks": _SPREAD,
    "leaf_module": _SPREAD,
}
# Why a known key is refused.
_REFUSED = {
    "sequence_parallel_size": "ranks share packed lines by our own exchange; set learner.sequence_ranks",
    "tensor_parallel": "no layer is split over the ranks; learner.zero_stage 3 spreads weights",
    "autotp_size": "no layer is split over the ranks; learner.zero_stage 3 spreads weights",
    "expert_parallel": "no expert has a rank of its own; learner.zero_stage 3 spreads weights",
    "use_data_before_expert_parallelism": "no expert has a rank of its own",
    "pipeline": "the model is not cut into stages",
    "gradient_allreduce_op": "the loss is scaled for the mean over the ranks",
    "sparse_gradients": "embeddings have dense gradients",
    "activation_checkpointing": "the model checkpoints its own activations; set learner.gradient_checkpointing",
    "aio": "AdamW works in memory; offload to NVMe is not supported",
    "compile": "set learner.torch_compile",
    "checkpoint": "the learner writes and verifies checkpoints itself",
    "datastates_ckpt": "the learner writes and verifies checkpoints itself",
    "tensorboard": "figures come from the step log; set tracking.tensorboard",
    "wandb": "figures come from the step log; set tracking.wandb",
    "csv_monitor": "figures come from the step log, log/metrics.jsonl",
    "comet": "figures come from the step log; set tracking",
    "zero_allow_untested_optimizer": "the optimizer is torch's AdamW, which needs no permission",
    "seq_parallel_communication_data_type": "ranks exchange heads in learner.dtype",
    "dataloader_drop_last": "batches come from the rollouts, not from a data loader",
    "data_efficiency": "batches come from the rollouts, not from a data loader",
    "curriculum_learning": "batches come from the rollouts, not from a data loader",
    "hybrid_engine": "vLLM generates",
    "elasticity": "the number of ranks is learner.ranks",
    "autotuning": "the learner is not started by DeepSpeed's tuner",
    "weight_quantization": "the policy is trained in float32 weights",
    "compression_training": "the policy is trained whole",
    "progressive_layer_drop": "the policy is trained whole",
    "zero_optimization.compute_grad_norm": "every step reports its gradient norm",
    "zero_optimization.elastic_checkpoint": "any number of ranks resumes any checkpoint",
    "zero_optimization.load_from_fp32_weights": "a checkpoint is loaded with its float32 weights",
    "zero_optimization.zenflow": "the optimizer is torch's AdamW",
    "zero_optimization.save_muon_momentum_buffer_in_memory": "the optimizer is torch's AdamW",
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": "the policy is gathered weight by weight, always",
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": "the policy is gathered weight by weight, always",
    "zero_optimization.memory_efficient_linear": "it acts in DeepSpeed's own model construction, which is not used",
    "zero_optimization.override_module_apply": "it acts in DeepSpeed's own model construction, which is not used",
    "zero_optimization.pipeline_loading_checkpoint": "the model is not cut into stages",
    "zero_optimization.allgather_partitions": "DeepSpeed reads it nowhere",
    "zero_optimization.legacy_stage1": "DeepSpeed reads it nowhere",
    "zero_optimization.cpu_offload_use_pin_memory": "set pin_memory in offload_optimizer or offload_param",
}
_AUTO = "auto"
_DEVICES = ("none", "cpu")


def engine_config(config: Config) -> dict[str, Any]:
    """DeepSpeed's configuration of this run.

    Raises:
        InputError: `learner.deepspeed` cannot be read as JSON, contradicts one of our keys, holds a key without an
            effect, or asks for an offload that its ZeRO stage does not have.
    """
    learner = config.learner
    section = _without_auto(_user_section(learner))
    _refuse_without_effect(section, learner.zero_stage)
    _refuse_contradictions(section, learner)
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
        section = read_json_file(path)
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


def _refuse_without_effect(section: Mapping[str, Any], zero_stage: int) -> None:
    """Refuse keys that would change nothing."""
    zero = section.get("zero_optimization", {})
    if not isinstance(zero, Mapping):
        raise InputError(
            "learner.deepspeed.zero_optimization", f"{in_yaml(zero)} is no mapping", "Give its keys, or none"
        )
    stages = {f"zero_optimization.{name}": stages for name, stages in _ZERO.items()}
    for key, value in {**section, **{f"zero_optimization.{name}": value for name, value in zero.items()}}.items():
        where, text = f"learner.deepspeed.{key}", in_yaml(value)
        if key in _ALLOWED or key in _OWN_KEYS:
            continue
        if key in _REFUSED:
            raise InputError(where, f"{text} would have no effect: {_REFUSED[key]}", "Leave it out")
        if key not in stages:
            near = difflib.get_close_matches(key, [*_ALLOWED, *_OWN_KEYS, *stages], n=1)
            fix = f"Did you mean '{near[0].rpartition('.')[2]}'?" if near else "Leave it out"
            raise InputError(where, f"{text}: DeepSpeed has no such key with an effect here", fix)
        offloads_nothing = isinstance(value, Mapping) and value.get("device") == "none"
        if zero_stage not in stages[key] and not offloads_nothing:
            acting = " or ".join(map(str, stages[key]))
            raise InputError(
                where,
                f"{text} has no effect with learner.zero_stage {zero_stage}, only with {acting}",
                "Leave it out, or set learner.zero_stage",
            )


def _refuse_contradictions(section: Mapping[str, Any], learner: LearnerConfig) -> None:
    """Refuse the keys that our own configuration has too, but for values that repeat ours."""
    fp16 = section.get("fp16")
    ours = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "optimizer": {
            "type": "AdamW",
            "params": {
                "lr": learner.learning_rate,
                "betas": list(learner.adam_betas),
                "weight_decay": learner.weight_decay,
                "eps": learner.adam_eps,
            },
        },
        "gradient_clipping": learner.max_grad_norm,
        # Files of other programs keep the loss scale of an fp16 that is off.
        "fp16": {**fp16, "enabled": False} if isinstance(fp16, Mapping) else None,
        "bf16": {"enabled": learner.dtype == "bfloat16"},
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization.stage": learner.zero_stage,
    }
    for key, instead in _OWN_KEYS.items():
        value = _at(section, key)
        if value is not None and not (key in ours and _repeats(value, ours[key])):
            raise InputError(
                f"learner.deepspeed.{key}", f"{in_yaml(value)} contradicts our own keys", f"Leave it out; {instead}"
            )


def _repeats(value: Any, ours: Any) -> bool:
    """Whether a value, or each part of a mapping, is ours."""
    if isinstance(value, Mapping) and isinstance(ours, Mapping):
        return all(key in ours and _repeats(part, ours[key]) for key, part in value.items())
    return bool(value == ours)


def _offload(learner: LearnerConfig) -> dict[str, Any]:
    kinds = {"none": (), "optimizer": ("offload_optimizer",), "all": ("offload_optimizer", "offload_param")}
    return {kind: {"device": "cpu"} for kind in kinds[learner.offload]}


def _refuse_offload(section: Mapping[str, Any], learner: LearnerConfig) -> None:
    """Refuse an offload that contradicts ours, or that torch's AdamW does not have."""
    for name in ("offload_optimizer", "offload_param"):
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
