"""The engine arguments of vLLM that a user may pass through `generation.engine`, and the reason against each other.

Only names are checked here, without importing vLLM, which takes seconds and much memory. vLLM checks the values.
"""

from collections.abc import Mapping
from typing import Any

from gspo.common.errors import ConfigError, nearest

# Engine arguments that follow from other keys or that the correctness of a run rests on, with the way to go instead.
OWN_ARGS: Mapping[str, str] = {
    "model": "set `model.path`",
    "tokenizer": "the tokenizer of `model.path` is used",
    "dtype": "set `generation.dtype`",
    "seed": "set `seed`",
    "max_model_len": "it is algorithm.prompt_length + response_length",
    "logprobs_mode": "training needs the log-probs of the distribution that was sampled from",
    "max_logprobs": "it follows from the largest `sampling.top_k`",
    "weight_transfer_config": "the weights come from the learner",
    "enable_prefix_caching": "the prompts of a group share their prefix",
    "language_model_only": "only text is trained, so an engine has no vision tower",
    "max_num_seqs": "set `generation.max_rollouts`",
    "disable_log_stats": "the service counts itself, see /metrics",
    "enable_log_requests": "requests are logged by rollout id",
    "trust_remote_code": "set `model.trust_remote_code`",
    "load_format": "models are read from safetensors only",
    "generation_config": "sampling is set by the run's own keys",
    "override_generation_config": "sampling is set by the run's own keys",
    "data_parallel_size": "set `generation.replicas`, each an engine with weights of its own",
    "runner": "the engine generates",
    "skip_tokenizer_init": "stop strings need the tokenizer",
}

# Reason -> arguments that would have no effect here, or spoil what a run rests on.
_REFUSED_BY_REASON: Mapping[str, str] = {
    "set `generation.draft_tokens` for drafts from the request's own tokens; no other method was tested": (
        "speculative_config spec_method spec_model spec_tokens"
    ),
    "pushed weights lie in the memory of one host, so an engine cannot span several": (
        "nnodes node_rank master_addr master_port ray_workers_use_nsight distributed_timeout_seconds"
    ),
    "set `generation.replicas`, each an engine with weights of its own": (
        "data_parallel_address data_parallel_backend data_parallel_external_lb data_parallel_hybrid_lb "
        "data_parallel_multi_port_external_lb data_parallel_rank data_parallel_rpc_port data_parallel_size_local "
        "data_parallel_start_rank disable_nccl_for_dp_synchronization dp_sync_interval enable_elastic_ep "
        "elastic_ep_max_dp_size _api_process_count _api_process_rank"
    ),
    "it would change the distribution that is sampled from, or the model, and the learner would not know": (
        "logits_processors watermark watermark_config hf_overrides disable_sliding_window"
    ),
    "the learner pushes whole weights, in which adapters are merged": (
        "enable_lora max_loras max_lora_rank max_cpu_loras max_lora_cls_labels lora_dtype lora_target_modules "
        "fully_sharded_loras specialize_active_lora enable_moe_shared_loras enable_mixed_moe_lora_format "
        "enable_tower_connector_lora default_mm_loras"
    ),
    "prompts and answers are tokens of text": (
        "allowed_local_media_path allowed_media_domains diffusion_config disable_chunked_mm_input enable_mm_embeds "
        "enable_mm_processor_stats enable_prompt_embeds interleave_mm_strings io_processor_plugin limit_mm_per_prompt "
        "media_io_kwargs mm_device_do_normalize mm_encoder_attn_backend mm_encoder_attn_dtype "
        "mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_margin mm_encoder_fp8_scale_save_path mm_encoder_only "
        "mm_encoder_tp_mode mm_hasher_algorithm mm_ipc_gpu_memory_gb mm_processor_cache_gb mm_processor_cache_type "
        "mm_processor_device mm_processor_kwargs mm_shm_cache_max_object_size_mb mm_tensor_ipc renderer_num_workers "
        "video_pruning_method video_pruning_rate"
    ),
    "requests come as tokens from this service, and no HTTP API of vLLM is served": (
        "reasoning_config reasoning_parser reasoning_parser_plugin served_model_name structured_outputs_config "
        "tokens_only stream_interval enable_trace_replay convert pooler_config"
    ),
    "nothing reads what it returns": ("aux_output_config enable_return_routed_experts return_sampling_mask"),
    "it names what a model hub has, or how a folder is read, and `model.path` is a folder": (
        "code_revision revision tokenizer_revision tokenizer_mode hf_token hf_config_path config_format download_dir "
        "ignore_patterns model_weights model_loader_extra_config pt_load_map_location"
    ),
    "KV that is kept outside the engine would outlive the weights that it was made under": (
        "kv_transfer_config kv_events_config kv_offloading_backend kv_offloading_size ec_manager_config "
        "ec_transfer_config"
    ),
    "weights are loaded into vLLM's own workers, each in its place": (
        "worker_cls worker_extension_cls scheduler_cls enable_eplb eplb_config"
    ),
    "the engine sleeps under `placement: shared` alone, and then gives back all that it can": (
        "enable_sleep_mode enable_nccl_comm_suspend sleep_mode_backend sleep_mode_offload_cudagraph "
        "sleep_preserve_parameter_names"
    ),
    "an engine that fails is started again by the supervisor": (
        "enable_fault_tolerance fault_tolerance_config shutdown_timeout watchdog_config"
    ),
    "not every version of vLLM that gspo supports has it": "monokernel",
    "set `generation.max_rollouts`": "max_num_active_seqs max_num_queued_reqs max_num_queued_tokens",
    "every request has the same priority": "scheduling_policy",
    "vLLM's own metrics, traces and profiles are not collected": (
        "aggregate_engine_logging collect_detailed_traces cudagraph_metrics custom_histogram_buckets "
        "enable_logging_iteration_details enable_mfu_metrics kv_cache_metrics kv_cache_metrics_sample "
        "otlp_traces_endpoint per_request_spec_decode_metrics profiler_config show_hidden_metrics_for_version"
    ),
    "`gspo run` gives each generator its GPUs, CUDA_VISIBLE_DEVICES where you start it": "device_ids",
}
REFUSED_ARGS: Mapping[str, str] = {
    name: reason for reason, names in _REFUSED_BY_REASON.items() for name in names.split()
}

ALLOWED_ARGS = frozenset(
    """
    additional_config all2all_backend allow_deprecated_quantization async_scheduling attention_backend attention_config
    block_size compilation_config cp_kv_cache_interleave_size cpu_distributed_timeout_seconds cpu_offload_gb
    cpu_offload_params cudagraph_capture_sizes dbo_decode_token_threshold dbo_prefill_token_threshold dcp_comm_backend
    dcp_kv_cache_interleave_size dcp_q_replicate decode_context_parallel_size disable_cascade_attn
    disable_custom_all_reduce disable_hybrid_kv_cache_manager distributed_executor_backend
    enable_batch_sharded_sampling enable_chunked_prefill enable_cumem_allocator enable_dbo enable_ep_weight_filter
    enable_expert_parallel enable_flashinfer_autotune enable_hc_sp enable_layerwise_nvtx_tracing
    enable_mamba_cache_stochastic_rounding enable_mamba_shared_prefix_checkpoint enable_shm_tensor_arena enforce_eager
    engram_config expert_placement_strategy fail_on_environ_validation gdn_prefill_backend gpu_memory_utilization
    ir_op_priority jit_monitor_mode jit_monitor_verbose kda_decode_backend kda_prefill_backend kernel_config
    kv_cache_dtype kv_cache_dtype_skip_layers kv_cache_memory_bytes kv_sharing_fast_prefill linear_backend
    log_config_file log_level logging_config long_prefill_token_threshold long_prefill_token_threshold_adaptive
    mamba_backend mamba_block_size mamba_cache_dtype mamba_cache_mode mamba_cache_philox_rounds mamba_config
    mamba_ssm_cache_dtype mamba_ssu_algorithm max_cudagraph_capture_size max_num_batched_tokens
    max_num_scheduled_tokens max_parallel_loading_workers model_class_overrides model_impl moe_backend
    num_gpu_blocks_override numa_bind numa_bind_cpus numa_bind_nodes offload_backend offload_group_size
    offload_num_in_group offload_params offload_prefetch_step optimization_level performance_mode
    pipeline_parallel_size prefill_context_parallel_size prefill_schedule_interval prefix_cache_retention_interval
    prefix_caching_hash_algo prefix_match_unit quantization quantization_config replayssm_buffer_len
    safetensors_load_strategy safetensors_prefetch_block_size safetensors_prefetch_num_threads
    scheduler_reserve_full_isl skip_mm_profiling sparse_indexer_topk_backend swa_bounded_replay tensor_parallel_size
    ubatch_size use_fp64_gumbel use_replayssm use_tqdm_on_load
    """.split()  # noqa: SIM905 - a list of names, one a line, would be a page
)
# Executors whose processes share the host's memory, where pushed weights lie.
_EXECUTORS = ("mp", "uni")


def check_engine_args(engine: Mapping[str, Any]) -> None:
    """Check the keys of `generation.engine`.

    Raises:
        ConfigError: vLLM does not know a key, or it is not the user's to set.
    """
    for name, value in engine.items():
        key = f"generation.engine.{name}"
        if name in OWN_ARGS:
            raise ConfigError(
                key, value, f"is set by the generation service itself: {OWN_ARGS[name]}", "Remove the key"
            )
        if name in REFUSED_ARGS:
            raise ConfigError(key, value, f"is refused: {REFUSED_ARGS[name]}", "Remove the key")
        if name not in ALLOWED_ARGS:
            rule = "is not an engine argument of vLLM in the version that gspo supports"
            raise ConfigError(key, value, rule, nearest(name, ALLOWED_ARGS))
        if name == "distributed_executor_backend" and value not in _EXECUTORS:
            raise ConfigError(
                key,
                value,
                "is refused: pushed weights lie in the memory of one host",
                f"Set {' or '.join(_EXECUTORS)}, or remove the key",
            )
