"""The policy under DeepSpeed on one rank: its start, optimizer steps, gathered weights and checkpoints.

The one file that imports DeepSpeed; trainer.py chooses the rows and makes the losses.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor, distributed

from gspo.common.config.schema import Config
from gspo.common.errors import InputError
from gspo.common.host.durable_write import fsync
from gspo.common.host.machine import generators_per_gpu, visible_gpus
from gspo.learner.model.named_weights import checkpoint_tensors, export_model
from gspo.learner.model.network import can_be_packed, load_policy_model, load_reference_model
from gspo.learner.ranks.launcher import cores_per_rank, num_local_ranks
from gspo.learner.ranks.process_group import join, set_deadlines
from gspo.learner.training.deepspeed_config import engine_config
from gspo.learner.training.gpu_memory import own_fraction
from gspo.learner.training.trainer_api import Hyperparameters

_TAG = "engine"
_STATE, _RANKS = "caller.json", "num_ranks"
_SHARED_MEMORY_OP = "deepspeed_shm_comm"


class PolicyEngine:
    """One rank of the policy. Every rank makes the same calls in the same order."""

    def __init__(self, config: Config, model_folder: Path) -> None:
        self._config, self._folder = config, model_folder
        self._threads = config.learner.threads or cores_per_rank(num_local_ranks())
        torch.set_num_threads(self._threads)
        self._device = _join(config)
        self._rank, self._num_ranks = distributed.get_rank(), distributed.get_world_size()
        self._model = load_policy_model(model_folder, config).to(self._device)
        self._packing = config.learner.packing and can_be_packed(self._model.causal_lm)
        self._engine = self._start_engine()
        self._reference_model = self._start_reference()
        set_deadlines(config.learner.rank_timeout_s)

    def policy(self) -> dict[str, Tensor]:
        """The weights in the generators' dtype, by checkpoint names, tied ones once: contiguous CPU copies.

        Empty on every rank but rank zero. The ranks gather one weight at a time, so that no rank's device ever holds
        the whole policy.
        """
        return checkpoint_tensors(
            self._model.causal_lm,
            getattr(torch, self._config.generation.dtype),
            self._model.adapters,
            whole=self._whole,
            kept=self._rank == 0,
        )

    def save(self, folder: Path, state: Mapping[str, Any]) -> None:
        """Write model and optimizer to `folder`, every rank its part, and the caller's `state`, which is JSON.

        Learning rate and random numbers are functions of the step number, and need no state.
        """
        # Under LoRA the frozen weights are in the model folder.
        self._engine.save_checkpoint(
            str(folder), tag=_TAG, save_latest=False, exclude_frozen_parameters=self._model.adapters is not None
        )
        if self._rank == 0:
            (folder / _STATE).write_text(json.dumps({_RANKS: self._num_ranks, "caller": dict(state)}))
        # On a shared disk only the host that wrote a file can make sure of it.
        for file in folder.rglob("*"):
            fsync(file)
        distributed.barrier()

    def load(self, folder: Path) -> dict[str, Any]:
        """Continue from a checkpoint of `save`; returns the caller's state.

        Without ZeRO every rank holds all of it, so another number of ranks may have written it.

        Raises:
            FileNotFoundError: The folder holds no whole checkpoint.
            InputError: It was written by another number of ranks, each its part.
        """
        written = json.loads((folder / _STATE).read_text())
        stage = self._config.learner.zero_stage
        if stage and written[_RANKS] != self._num_ranks:
            raise InputError(
                "learner.ranks",
                f"{self._num_ranks} is not the number of ranks that wrote the checkpoint {folder}, {written[_RANKS]}; "
                f"under ZeRO {stage} (learner.zero_stage) each wrote its own part of the optimizer",
                f"Start {written[_RANKS]} ranks: only a run with zero_stage 0 can change their number",
            )
        is_whole = self._model.adapters is None
        if self._engine.load_checkpoint(str(folder), tag=_TAG, load_module_strict=is_whole)[0] is None:
            raise FileNotFoundError(f"{folder}: the engine's part of the checkpoint is missing")
        state: dict[str, Any] = written["caller"]
        return state

    def export(self, folder: Path) -> None:
        """Write the policy as a Hugging Face folder with its tokenizer, in the generators' dtype; replaces `folder`.

        Adapters are merged in, and also stand alone in a folder in it.
        """
        tensors, adapters = self.policy(), self._model.adapters
        with self._whole([] if adapters is None else [p for p in self._model.parameters() if p.requires_grad]):
            if self._rank == 0:
                export_model(self._model.causal_lm, tensors, self._folder, folder, adapters)
        distributed.barrier()

    def _start_engine(self) -> Any:
        learner = self._config.learner
        optimizer = torch.optim.AdamW(
            [parameter for parameter in self._model.parameters() if parameter.requires_grad],
            lr=learner.learning_rate,
            betas=learner.adam_betas,
            weight_decay=learner.weight_decay,
            fused=True,
        )
        return deepspeed.initialize(model=self._model, optimizer=optimizer, config=engine_config(self._config))[0]

    def _start_reference(self) -> Any:
        """The first policy as a frozen copy, spread over the ranks under ZeRO 3; None if there is no such copy."""
        if not self._config.algorithm.needs_reference or self._model.adapters is not None:
            return None
        reference = load_reference_model(self._folder, self._config).to(self._device)
        if not self._is_spread:
            return reference
        config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
        return deepspeed.initialize(model=reference, config=config)[0]

    @contextmanager
    def _reference(self) -> Iterator[Any]:
        """A block with the first policy: the frozen copy, or the policy without its adapters."""
        if self._model.adapters is None:
            yield self._reference_model
        else:
            with self._model.adapters.off():
                yield self._engine

    def _set_hyperparameters(self, hyperparameters: Hyperparameters) -> None:
        """Make the next updates with these; a loaded checkpoint brought those of its own step."""
        for group in self._engine.optimizer.param_groups:
            group["lr"], group["weight_decay"] = hyperparameters.learning_rate, hyperparameters.weight_decay
        if self._config.learner.zero_stage:
            self._engine.optimizer.clip_grad = hyperparameters.max_grad_norm

    def _apply(self, max_grad_norm: float) -> float:
        """Clip and update; returns the gradient norm before the clip. A norm that is not finite updates nothing."""
        if self._config.learner.zero_stage:
            self._engine.step()
            return math.nan if self._engine.optimizer.overflow else float(self._engine.get_global_grad_norm())
        parameters = [p for p in self._engine.module.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        if not math.isfinite(norm):
            self._engine.optimizer.zero_grad()
            return float(norm)
        torch.nn.utils.clip_grads_with_norm_(parameters, max_grad_norm, norm)
        self._engine.step()
        return float(norm)

    @property
    def _is_spread(self) -> bool:
        """Under ZeRO 3 a rank holds a part of every weight."""
        return self._config.learner.zero_stage == 3

    @contextmanager
    def _whole(self, parts: Sequence[Tensor], changed_by: int | None = None) -> Iterator[None]:
        """Gather tensors that are spread over the ranks; a change by rank `changed_by` reaches all of them."""
        with deepspeed.zero.GatheredParameters(list(parts), modifier_rank=changed_by, enabled=self._is_spread):
            yield
        if changed_by is not None and not self._is_spread and self._num_ranks > 1:
            for part in parts:
                distributed.broadcast(part.data, changed_by)


def _join(config: Config) -> torch.device:
    """Join the other ranks; returns the device of this one."""
    accelerator = get_accelerator()
    # It serves inference alone. Its build takes a compiler and a minute, and a process killed meanwhile leaves a lock
    # on which every later process would wait for ever.
    deepspeed.ops.__compatible_ops__ = {_SHARED_MEMORY_OP: False}
    local_rank = int(os.environ.setdefault("LOCAL_RANK", "0"))  # DeepSpeed asks the environment, not the group
    accelerator.set_device(local_rank)
    if accelerator.device_name() == "cuda":
        _limit_gpu_memory(config, local_rank)
    join(accelerator.communication_backend_name(), config.learner.rank_timeout_s)
    return torch.device(accelerator.current_device_name())


def _limit_gpu_memory(config: Config, local_rank: int) -> None:
    """Leave the generators their share of this rank's GPU: torch keeps the memory that it has freed."""
    gpus = visible_gpus()
    if local_rank >= len(gpus):
        return  # nvidia-smi does not answer
    fraction = own_fraction(config, gpus[local_rank], generators_per_gpu(gpus)[local_rank])
    if fraction is not None:
        torch.cuda.set_per_process_memory_fraction(fraction, local_rank)
