"""The keys of DeepSpeed that `learner.deepspeed` may hold: those with an effect in this learner.

DeepSpeed itself ignores unknown keys, and keys of features that are off; here they are refused. deepspeed_config.py
compares the keys that our own configuration has too.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from gspo.common.errors import InputError, in_yaml

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
    "sequence_parallel_size": "no rank takes a part of a sequence: a rollout fits into learner.micro_batch_tokens",
    "tensor_parallel": "no layer is split over the ranks; learner.zero_stage 3 spreads weights",
    "autotp_size": "no layer is split over the ranks; learner.zero_stage 3 spreads weights",
    "expert_parallel": "no expert has a rank of its own; learner.zero_stage 3 spreads weights",
    "use_data_before_expert_parallelism": "no expert has a rank of its own",
    "pipeline": "the model is not cut into stages",
    "gradient_allreduce_op": "the loss is scaled for the mean over the ranks",
    "sparse_gradients": "embeddings have dense gradients",
    "activation_checkpointing": "the model checkpoints its own activations; set learner.gradient_checkpointing",
    "aio": "AdamW works in memory; offload to NVMe is not supported",
    "compile": "nothing is compiled",
    "checkpoint": "the learner writes and verifies checkpoints itself",
    "datastates_ckpt": "the learner writes and verifies checkpoints itself",
    "tensorboard": "figures come from the step log; set tracking.tensorboard",
    "wandb": "figures come from the step log; set tracking.wandb",
    "csv_monitor": "figures come from the step log, log/metrics.jsonl",
    "comet": "figures come from the step log; set tracking",
    "zero_allow_untested_optimizer": "the optimizer is torch's AdamW, which needs no permission",
    "seq_parallel_communication_data_type": "no rank takes a part of a sequence",
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
    "zero_optimization.elastic_checkpoint": "a checkpoint under ZeRO is for the number of ranks that wrote it",
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


def refuse_without_effect(section: Mapping[str, Any], compared: Mapping[str, str], zero_stage: int) -> None:
    """Refuse keys that would change nothing.

    Args:
        section: DeepSpeed's configuration as the user wrote it.
        compared: Dotted keys that our own configuration has too, which the caller compares.

    Raises:
        InputError: The first such key, with the reason.
    """
    for key in section:
        if key not in _ALLOWED and key not in compared:
            _refuse(key, section[key], _ALLOWED | {name for name in compared if "." not in name})
    zero = section.get("zero_optimization", {})
    if not isinstance(zero, Mapping):
        raise InputError(
            "learner.deepspeed.zero_optimization", f"{in_yaml(zero)} is no mapping", "Give its keys, or none"
        )
    for name, value in zero.items():
        key = f"zero_optimization.{name}"
        if key in compared:
            continue
        if name not in _ZERO:
            _refuse(key, value, {f"zero_optimization.{known}" for known in _ZERO})
        # An offload that the stage does not have has a refusal of its own.
        if zero_stage not in _ZERO[name] and not name.startswith("offload_"):
            stages = " or ".join(map(str, _ZERO[name]))
            raise InputError(
                f"learner.deepspeed.{key}",
                f"{in_yaml(value)} has no effect with learner.zero_stage {zero_stage}, only with {stages}",
                "Leave it out, or set learner.zero_stage",
            )


def _refuse(key: str, value: Any, known: set[str]) -> None:
    where = f"learner.deepspeed.{key}"
    if key in _REFUSED:
        raise InputError(where, f"{in_yaml(value)} would have no effect: {_REFUSED[key]}", "Leave it out")
    near = difflib.get_close_matches(key, known, n=1)
    fix = f"Did you mean '{near[0].rpartition('.')[2]}'?" if near else "Leave it out"
    raise InputError(where, f"{in_yaml(value)}: DeepSpeed has no such key with an effect here", fix)
