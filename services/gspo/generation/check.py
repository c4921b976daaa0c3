"""The generation service's checks before the start. They import vLLM only if the configuration has arguments for it."""

from __future__ import annotations

import asyncio
import math
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from gspo.common.config.schema import Config
from gspo.common.config.sources import Source
from gspo.common.errors import ConfigError, InputError, warn
from gspo.common.host.machine import (
    CACHE_ARGUMENT,
    GIB,
    PARALLEL_ARGUMENTS,
    SHARE_ARGUMENT,
    check_gpus_are_seen,
    free_memory,
    torch_is_for_cpus,
    visible_gpus,
    warn_of_float32,
    warn_of_idle_gpus,
)
from gspo.common.model.files import check_positions, model_folder, read_model_config
from gspo.common.model.tokenizer_trial import check_tokenizer_files
from gspo.environments.mcp.tool_listing import with_listed_tools
from gspo.generation.engine.arguments import check_engine_args
from gspo.generation.engine.tied_heads import tied_heads

if TYPE_CHECKING:
    from gspo.generation.rollout.chat_turns import ChatTurns

# vLLM's InputBatch: an int32 token id and a flag for every token of the longest rollout.
_PLACE_TOKEN_BYTES = 5
# Arguments whose values the placement checks, and a switch: vLLM, which takes up to a minute to import, refuses none.
_PLAIN = {SHARE_ARGUMENT, CACHE_ARGUMENT, "enforce_eager"}

# vLLM has these models of text in modules that also import its code for images.
_NEED_TORCHVISION = {
    *("Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM", "Qwen3_5ForConditionalGeneration"),
    *("Qwen3_5MoeForConditionalGeneration", "Qwen4ExpForCausalLM", "Glm5NextForCausalLM", "HCXVisionV2ForCausalLM"),
    *("MiniMaxM3SparseForCausalLM", "MuseGlimmerForCausalLM", "Gemma3ForConditionalGeneration"),
}


def check(config: Config) -> None:
    """Refuse engine arguments that vLLM does not take, and more tokens, memory or GPUs than there are.

    Raises:
        InputError: Names the key.
    """
    try:
        check_engine_args(config.generation.engine)
    except ConfigError as error:
        raise error.as_input_error() from error
    algorithm = config.algorithm
    if algorithm.num_return_sequences_in_group > config.generation.max_rollouts:
        raise InputError(
            "generation.max_rollouts",
            f"{config.generation.max_rollouts} is less than a group of {algorithm.num_return_sequences_in_group}",
            "Raise it, or lower algorithm.num_return_sequences_in_group",
        )
    _check_places(config)
    check_positions(config, model_folder(config.model))
    _check_gpus(config)
    _check_memory(config)
    _check_code(model_folder(config.model))
    check_tokenizer_files(model_folder(config.model))
    tied_heads(model_folder(config.model), trust_remote_code=config.model.trust_remote_code)
    config = asyncio.run(with_listed_tools(config))
    for source in config.sources:
        if source.environment.used:
            _check_chat_template(config, source)
    if config.generation.engine.keys() - _PLAIN:
        from gspo.generation.engine.startup import check_values  # here: importing vLLM takes seconds

        check_values(config, model_folder(config.model))


def _check_code(folder: Path) -> None:
    """Refuse a model whose code in vLLM needs a missing package. vLLM reports it after a minute or two."""
    kinds = _NEED_TORCHVISION.intersection(read_model_config(folder).get("architectures") or [])
    if kinds and find_spec("torchvision") is None:
        fix = "Install torchvision, in the version that fits torch"
        if torch_is_for_cpus():
            fix = "Take another model, such as Qwen3, or GPUs: vLLM's build for CPUs comes without torchvision"
        rule = f"{folder} is a {min(kinds)}, whose code in vLLM needs the package torchvision, which is not installed"
        raise InputError("model.path", rule, fix)


def _check_places(config: Config) -> None:
    """Check the memory of vLLM's tables: a row of the longest rollout for each in-flight rollout."""
    algorithm, num_places = config.algorithm, config.generation.max_rollouts
    needed = num_places * algorithm.longest_branch * _PLACE_TOKEN_BYTES
    available = free_memory()
    if needed > available:
        raise InputError(
            "generation.max_rollouts",
            f"{num_places} in-flight rollouts take {needed / GIB:,.1f} GiB in vLLM's tables alone, and "
            f"{available / GIB:.1f} GiB are free",
            "Lower it; a few hundred keep an engine busy",
        )


def _check_gpus(config: Config) -> None:
    """Check the GPUs: vLLM would fail only after minutes, or wait for workers that are never started."""
    engine, gpus = config.generation.engine, visible_gpus()
    check_gpus_are_seen("generation.engine", gpus)
    warn_of_float32("generation.dtype", config.generation.dtype, gpus)
    if CACHE_ARGUMENT in engine and torch_is_for_cpus():
        warn(f"generation.engine.{CACHE_ARGUMENT} has no effect on a CPU: generation.kv_cache_gb is the cache's size")
    degrees = {key: engine[key] for key in PARALLEL_ARGUMENTS if type(engine.get(key)) is int}
    num_needed = math.prod(degrees.values())
    if num_needed <= max(1, len(gpus)):
        if gpus:
            warn_of_idle_gpus("generation.engine.tensor_parallel_size", num_needed, gpus)
        return
    product = " times ".join(f"{key} {value}" for key, value in degrees.items())
    fix = f"Lower it to {len(gpus)}, or give this generator more GPUs"
    raise InputError(
        f"generation.engine.{next(iter(degrees))}",
        f"{product} needs {num_needed} GPUs, and {len(gpus) or 'none'} can be used",
        fix if gpus else "Leave it out: on a CPU an engine is one process; generation.replicas starts several engines",
    )


def _check_chat_template(config: Config, source: Source) -> None:
    """Render an example observation by the chat template, and a tool's answer if there are tools."""
    from transformers import AutoTokenizer  # here: only conversations need it before the start

    from gspo.generation.rollout.chat_turns import ChatTurns, ObservationError

    folder, tools = model_folder(config.model), source.environment.descriptions
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=config.model.trust_remote_code)
    if not tokenizer.chat_template and not tools:
        return
    try:
        turns = ChatTurns(tokenizer, tools, source.chat_template_kwargs)
        turns.between("a", "user", None)
        if tools:
            turns.between([{"role": "tool", "name": "a", "content": "a"}], "tool", None)
        if source.environment.mcp.used:
            _check_tools_are_shown(source, turns)
    except ObservationError as error:
        problem = f"{source.key('environment')}: an observation {error}"
        if tools:
            fix = "Correct chat_template in the model's tokenizer files, or take a model that knows tools"
            raise InputError(f"{source.key('environment')}.tools", problem, fix) from error
        warn(f"{problem}; prompts of plain text need no chat template")


def _check_tools_are_shown(source: Source, turns: ChatTurns) -> None:
    """Refuse a chat template that does not describe the tools of a server, or shows calls in another form."""
    key, tool_format = source.key("environment"), source.environment.tool_format
    if hidden := turns.hidden_tools():
        rule = f"the model's chat template does not describe the tool '{hidden[0]}', so the policy would not know it"
        raise InputError(f"{key}.mcp", rule, "Take a model that knows tools, or correct its chat_template")
    shown = turns.call_format()
    if shown not in (None, tool_format):
        fix = f"Set {key}.tool_format: {shown}" if shown else "Take a model that writes calls in one of these forms"
        rule = f"{tool_format} is not how the model's chat template shows calls"
        raise InputError(f"{key}.tool_format", rule, fix)


def _check_memory(config: Config) -> None:
    """Check the memory of the KV cache, which is the machine's on a CPU."""
    needed = config.generation.kv_cache_gb * config.generation.replicas
    available = free_memory() / GIB
    if needed > available and not visible_gpus():
        generators = f"{config.generation.replicas} generators take" if config.generation.replicas > 1 else "takes"
        raise InputError(
            "generation.kv_cache_gb",
            f"{config.generation.kv_cache_gb:g} {generators} {needed:.1f} GiB, and {available:.1f} GiB are available",
            "Lower it, or use a machine with more memory",
        )
