"""The learner's check of a configuration and of the machine: milliseconds, without torch, DeepSpeed or a model.

A loss of the user's own takes seconds more: a process of its own tries it.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gspo.common.config.engines import SPREAD_STAGE, LearnerConfig
from gspo.common.config.loading import check_ranks
from gspo.common.config.presets import remarks
from gspo.common.config.schema import Config
from gspo.common.errors import InputError, nearest, warn
from gspo.common.host.compilers import missing_compiler
from gspo.common.host.machine import (
    GIB,
    check_gpus_are_seen,
    free_memory,
    generators_per_gpu,
    shared_memory,
    visible_gpus,
    warn_of_float32,
    warn_of_idle_gpus,
)
from gspo.common.model.files import (
    ALL_LINEAR,
    FUSED,
    ModelFiles,
    check_positions,
    is_stacked,
    model_folder,
    read_model_files,
    refuse_other_model,
    refuse_quantized,
)
from gspo.common.model.heads import heads_divide, shares_lines
from gspo.common.model.memory_needs import check_fits, learner_bytes
from gspo.common.model.mixtures import has_experts, replays_experts
from gspo.common.model.teacher_files import check_same_tokens, naming_teacher, read_teacher_files, teacher_folder
from gspo.common.model.teacher_server import check_teacher_server
from gspo.common.model.trained_parameters import layers_of, trained_size
from gspo.common.planning.memory import learner_host_bytes
from gspo.learner.objective.loss_file import check_own_loss
from gspo.learner.ranks.launcher import num_ranks, num_ranks_here, own_rank
from gspo.learner.trackers import check_trackers
from gspo.learner.training.deepspeed_config import engine_config
from gspo.learner.training.gpu_memory import check_gpu_memory

_TARGETS = "learner.lora.target_modules"
# NCCL's buffers in shared memory: up to 33 MB for each of a rank's two neighbours.
_SHARED_A_RANK = 64 << 20


def check(config: Config) -> None:
    """Refuse a configuration that the learner cannot train.

    Raises:
        InputError: A key contradicts another, the model folder is not whole, or the machine lacks what it needs.
    """
    check_trackers(config.tracking)
    for line in remarks(config.algorithm.model_dump(), config.algorithm.clip):
        warn(line)
    check_training(config)
    if config.teacher.address is not None and not own_rank():
        folder = model_folder(config.model)
        files = read_model_files(folder, allow_pickle=config.model.allow_pickle)
        check_teacher_server(config, folder, _text_config(files.config).get("vocab_size"))


def check_training(config: Config) -> None:
    """As `check`, without the programs that a trainer of logged steps does not call: trackers and a teacher's server.

    Raises:
        InputError: As for `check`.
    """
    if warning := check_fits(config, learner_bytes(config), free_memory(), "the learner's memory"):
        warn(warning)
    engine_config(config)
    _check_ranks(config)
    folder = model_folder(config.model)
    files = read_model_files(folder, allow_pickle=config.model.allow_pickle)
    refuse_quantized(str(folder), files.config)
    _check_model(config, folder, files)
    _check_routing(config, files.config)
    _check_adapters(config.learner, folder, files)
    _check_compile(config.learner, files.config)
    if config.teacher.path is not None:
        _check_teacher(config, folder, files)
    _check_memory(config, files)
    if not own_rank():
        check_own_loss(config)


def _check_model(config: Config, folder: Path, files: ModelFiles) -> None:
    refuse_other_model(config.model.path, files.config, trust_remote_code=config.model.trust_remote_code)
    _check_shared_lines(config.learner, files.config)
    _check_lengths(config)
    check_positions(config, folder)
    _check_vocabulary(folder, files)
    _check_shapes(folder, files)


def _check_compile(learner: LearnerConfig, model: Mapping[str, Any]) -> None:
    if not learner.torch_compile:
        return
    if has_experts(model):
        raise InputError(
            "learner.torch_compile",
            "true is refused for a mixture: the sizes of its experts' products depend on the tokens",
            "Leave it out",
        )
    if missing := missing_compiler(on_gpu=bool(visible_gpus())):
        raise InputError("learner.torch_compile", f"torch.compile needs {missing}", "Install it: apt install g++")


def _check_teacher(config: Config, policy: Path, files: ModelFiles) -> None:
    """The teacher is a model that the learner loads, and reads every token that the policy may sample."""
    folder, teacher = teacher_folder(config), read_teacher_files(config)
    with naming_teacher():
        _check_model(config.with_teacher_as_model(), folder, teacher)
    check_same_tokens(policy, folder)
    rows, known = (_text_config(model.config).get("vocab_size") for model in (files, teacher))
    if isinstance(rows, int) and isinstance(known, int) and known < rows:
        raise InputError(
            "teacher.path",
            f"{folder} has a vocabulary of {known} rows, and the policy may sample {rows} token ids",
            "Take a teacher with as many rows, or resize its embeddings",
        )


def _check_lengths(config: Config) -> None:
    longest, whole = config.algorithm.longest_branch, config.algorithm.longest_rollout
    if config.micro_batch_tokens < whole:
        keys = "prompt_length + response_length" if whole == longest else "rollout_length"
        raise InputError(
            "learner.micro_batch_tokens",
            f"{config.micro_batch_tokens} is less than the longest rollout, {keys} = {whole} tokens",
            f"Set it to at least {whole}, or lower algorithm.{keys.replace(' +', ' or')}",
        )


def _check_shapes(folder: Path, files: ModelFiles) -> None:
    """config.json and the weights are of one model: they agree on the input embedding."""
    facts = _text_config(files.config)
    declared = [facts.get("vocab_size"), facts.get("hidden_size")]
    if files.embedding is not None and None not in declared and files.embedding != declared:
        raise InputError(
            "model.path",
            f"{folder}: config.json declares an input embedding of {declared}, the weights hold one of "
            f"{files.embedding} (vocab_size, hidden_size)",
            "Copy config.json and weights from the same model",
        )


def _check_adapters(learner: LearnerConfig, folder: Path, files: ModelFiles) -> None:
    """Every name fits layers that can have such adapters; the weights of a pickle are not read."""
    names = learner.lora.target_modules
    if not learner.lora.rank or not files.linear:
        return
    layers = list(files.linear)
    if names != (ALL_LINEAR,):
        for name in names:
            _check_name(name, folder, files)
        layers = layers_of(names, files)
    if stacked := {layer.rpartition(".")[2] for layer in layers if is_stacked(layer)}:
        _check_stacked(learner, stacked)


def _check_name(name: str, folder: Path, files: ModelFiles) -> None:
    chosen = layers_of((name,), files)
    if not chosen:
        raise InputError(
            _TARGETS,
            f"{name!r} fits no linear layer of {folder} (embeddings and the output layer cannot have adapters)",
            nearest(name, {layer.rpartition(".")[2] for layer in files.linear} | {ALL_LINEAR}),
        )
    last = name.rpartition(".")[2]
    if name != last and any(is_stacked(layer) for layer in chosen):
        raise InputError(
            _TARGETS,
            f"{name!r} names one expert or router: peft adapts those of all layers, or none",
            f"Name {last}",
        )


def _check_stacked(learner: LearnerConfig, stacked: set[str]) -> None:
    """Refuse adapters that peft cannot give to the parameters of a mixture's experts, or to its routers."""
    for pair in FUSED:
        if len(stacked.intersection(pair)) == 1:
            raise InputError(
                _TARGETS,
                f"an expert's {' and '.join(pair)} lie in one parameter, and only one of them is named",
                "Name both, or neither",
            )
    chosen = f"experts and routers ({', '.join(sorted(stacked))} of {_TARGETS})"
    if learner.lora.dropout:
        raise InputError(
            "learner.lora.dropout",
            f"{learner.lora.dropout:g}: peft has no dropout at the adapters of {chosen}",
            "Set it to 0, or name other layers alone, such as q_proj",
        )
    if learner.zero_stage == SPREAD_STAGE:
        raise InputError(
            "learner.zero_stage",
            f"{SPREAD_STAGE} spreads weights over the ranks, which is not supported with adapters of {chosen}",
            "Set it to 2 or less, or name other layers alone, such as q_proj",
        )


def _check_ranks(config: Config) -> None:
    """Every rank has a device of its own, and every optimizer step has the same work for each."""
    ranks = num_ranks(config)
    check_ranks(config)
    if config.learner.ranks != ranks:
        raise InputError(
            "learner.ranks",
            f"{config.learner.ranks} differs from the {ranks} rank(s) that a launcher has started",
            "Start `python -m gspo.learner` without torchrun or deepspeed: it starts its ranks itself",
        )
    here = num_ranks_here(config)
    gpus = visible_gpus()
    check_gpus_are_seen("learner.ranks", gpus)
    warn_of_float32("learner.dtype", config.learner.dtype, gpus)
    if gpus and here > len(gpus):
        raise InputError(
            "learner.ranks", f"{here} ranks need a GPU each, and {len(gpus)} can be seen", f"Set it to {len(gpus)}"
        )
    if gpus:
        warn_of_idle_gpus("learner.ranks", here, gpus)
    if gpus and here > 1 and (shared_bytes := shared_memory()) < here * _SHARED_A_RANK:
        raise InputError(
            "learner.ranks",
            f"NCCL connects {here} ranks through /dev/shm, which holds {shared_bytes >> 20} MiB here and must hold "
            f"{here * _SHARED_A_RANK >> 20}",
            "Give the container more: shm_size in Compose, a memory-backed emptyDir on Kubernetes, docker --shm-size",
        )
    shared = config.learner.sequence_ranks
    if ranks % shared:
        raise InputError(
            "learner.sequence_ranks",
            f"{shared} does not divide {ranks} rank(s) into groups (learner.ranks)",
            f"Set it to a divisor of {ranks}, or start a multiple of {shared} ranks",
        )
    algorithm, num_groups = config.algorithm, max(1, ranks // shared)
    if not algorithm.divides_over(num_groups):
        raise InputError(
            "algorithm.rollout_batch_size",
            f"{algorithm.rollout_batch_size} groups of {algorithm.num_return_sequences_in_group} are "
            f"{algorithm.num_rollouts} rollouts, which {algorithm.num_mini_batches} mini-batches (num_mini_batches) on "
            f"{num_groups} {'rank(s)' if shared == 1 else f'group(s) of {shared} ranks (learner.sequence_ranks)'} do "
            "not divide",
            f"Choose them so that the rollouts are a multiple of {algorithm.num_mini_batches * num_groups}",
        )


def _check_shared_lines(learner: LearnerConfig, model: Mapping[str, Any]) -> None:
    """Ranks share packed lines, and share out their heads; config.json says whether the model takes both."""
    shared, facts = learner.sequence_ranks, _text_config(model)
    if shared == 1:
        return
    if not learner.packing:
        raise InputError(
            "learner.packing",
            f"false, but the lines that {shared} ranks share (learner.sequence_ranks) are packed",
            "Set it to true",
        )
    kind = str(model.get("model_type"))
    if not shares_lines(kind, facts.get("layer_types")):
        raise InputError(
            "learner.sequence_ranks",
            f"{shared} ranks cannot share a line of packed rollouts: a model of type {kind} would mix them, or attends "
            "in a way of its own (docs/models.md)",
            "Set it to 1, or take another model",
        )
    # GPT-2 and its kin have a name of their own for it.
    heads = facts.get("num_attention_heads") or facts.get("n_head")
    key_heads = facts.get("num_key_value_heads") or heads
    if not isinstance(heads, int) or not isinstance(key_heads, int):
        return
    fitting = [number for number in range(1, heads + 1) if heads_divide(heads, key_heads, number)]
    if shared not in fitting:
        raise InputError(
            "learner.sequence_ranks",
            f"{shared} ranks cannot share out the {heads} query heads of the model evenly, with their {key_heads} "
            "heads of keys and values",
            f"Set it to one of {', '.join(map(str, fitting))}",
        )


def _check_routing(config: Config, model: Mapping[str, Any]) -> None:
    """Experts are replayed in a mixture alone, and config.json says whether the model is one."""
    if config.algorithm.routing_replay == "none":
        return
    kind = str(model.get("model_type"))
    if not replays_experts(kind):
        reason = f"a model of type {kind} chooses its experts in a way that cannot be replayed (docs/moe.md)"
    elif not has_experts(_text_config(model)):
        reason = f"routing_replay has no effect: the model ({config.model.path}) has no experts"
    else:
        return
    raise InputError("algorithm.routing_replay", f"{config.algorithm.routing_replay}, but {reason}", "Set it to none")


def _check_vocabulary(folder: Path, files: ModelFiles) -> None:
    """Every token of the tokenizer must have a row in the model; a model may have more, for alignment."""
    rows = _text_config(files.config).get("vocab_size")
    highest = files.highest_token
    if isinstance(rows, int) and highest is not None and highest >= rows:
        raise InputError(
            "model.path",
            f"{folder}: the tokenizer has token ids up to {highest}, the model a vocabulary of {rows}",
            "Use the tokenizer that the model was trained with, or resize the model's embeddings",
        )


def _check_memory(config: Config, files: ModelFiles) -> None:
    ranks_here = num_ranks_here(config)
    gpus = visible_gpus()[:ranks_here]
    size = trained_size(config, files)
    if gpus:
        check_gpu_memory(config, size, num_ranks(config), gpus, generators_per_gpu(gpus))
    needed = learner_host_bytes(config, size, num_ranks(config), ranks_here, on_gpu=bool(gpus))
    available = free_memory()
    if needed > available:
        raise InputError(
            "model.path",
            f"training {files.num_parameters / 1e6:,.0f} M parameters takes {needed / GIB:.1f} GiB of this machine's "
            f"memory for {'loading and keeping weights' if gpus else 'weights, gradients and optimizer'}"
            f"{', and the reference' if config.algorithm.needs_reference and not gpus else ''}"
            f"{f', with a teacher of {size.num_teacher / 1e6:,.0f} M' if size.num_teacher else ''}"
            f"{f', on {ranks_here} ranks' if ranks_here > 1 else ''}; "
            f"{available / GIB:.1f} GiB are available",
            "Use a smaller model or a machine with more memory",
        )


def _text_config(model: Mapping[str, Any]) -> Mapping[str, Any]:
    """Models of several modalities keep the language model's settings one level down."""
    inner = model.get("text_config")
    return inner if isinstance(inner, dict) else model
